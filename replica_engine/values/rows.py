"""Rows of tables (`tf.IndexedSlices`) in a reduction over replicas: some are joined, the others are added up.

A lookup by the tokens of a batch gives one row of gradient for each token. One device has the rows of all samples, so
the rows of the replicas are joined. A lookup by indices that are not the batch's, such as positions, gives one row for
each position on one device, however many samples there are. There the rows of the replicas are added up. To a table
both is the same sum. To an optimizer it is not: Keras does not add up the rows of one index, and Adam squares each.

In a graph the ops behind the indices tell. Indices that depend on constants only are the same on all replicas. Indices
that depend on lengths too (`arange(shape(x)[1])`) are the same as far as they reach. All others may depend on the
samples, or on how many there are. A table that is looked up in both ways has the rows of both, one behind the other,
and each part is reduced in its way. So is one lookup of both kinds of indices, one behind the other, as those of
`tf.nn.sampled_softmax_loss` are: the labels of the samples, and the classes that stand for all others.

Eager tensors do not tell what they were made of. Rows of eager tensors are added up if each replica has the same run of
two or more consecutive indices, as positions are.
"""

from __future__ import annotations

import functools
import hashlib
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute, reduction, variables
from replica_engine._tf.graphs import subgraphs

_OF_VARIABLE = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})
_UNKNOWN = ("Stateless", "Xla", "PyFunc", "EagerPyFunc")
"""How the types of stateless ops begin that may give each replica another value: random numbers, host calls, ids."""

_REPEATING = ("BroadcastTo", "Tile", "Fill", "ZerosLike", "OnesLike", "Pack")
"""Ops that repeat a value as often as there are samples, if they repeat it for each."""

_PASSING = ("Identity", "Reshape", "ExpandDims", "Squeeze", "EnsureShape", "StopGradient", "PreventGradient")
"""Ops that leave the elements of a tensor, and their order, as they are."""

_BY_ELEMENT = re.compile(
    "Cast|Add(V2)?|Sub|Mul|Floor(Div|Mod)|Neg|Abs|Maximum|Minimum|ClipByValue|Select(V2)?|(Not)?Equal|"
    "(Less|Greater)(Equal)?|Logical(And|Or|Not)"
)
"""Ops that compute each element of indices from the elements at its place, as Keras does for negative indices."""

_FEW = 8
"""Elements of a short constant."""


class Origin(NamedTuple):
    """What a tensor of a graph depends on, if that is not the samples of a batch.

    Attributes:
        digest: equal for equal computations on the same constants.
        of_lengths: whether it depends on shapes that only the running graph knows.
        of_process: whether it depends on an eager tensor, which may be another one in another process.
        numbers: the integers in the short constants that it depends on; a known shape is one.
    """

    digest: bytes
    of_lengths: bool = False
    of_process: bool = False
    numbers: frozenset[int] = frozenset()


_marks: weakref.WeakKeyDictionary[Any, dict[str, Origin | None]] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[Any, dict[str, list[str]]] = weakref.WeakKeyDictionary()
"""For each graph the names of the parts of joined indices: marks of these parts must be found again."""


def origin(tensor: Any, of_variables: bool = False) -> Origin | None:
    """What a tensor depends on; None if it may depend on a batch, on random numbers or on the replica.

    With `of_variables`, a tensor may depend on variables, as they are when they are read.
    """
    if not tf.is_symbolic_tensor(tensor):
        return None
    digests: dict[int, bytes] = {}
    of_lengths = of_process = False
    numbers: set[int] = set()
    pending = [tensor]
    while pending:
        current = pending[-1]
        op = current.op
        if id(op) in digests:
            pending.pop()
            continue
        inputs: list[Any] = list(op.inputs)
        parts = [op.type.encode()]
        if current.name in (marks := _marks.get(op.graph, {})):
            known = marks[current.name]
            if known is None:
                return None
            digests[id(op)] = known.digest
            of_lengths, of_process = of_lengths or known.of_lengths, of_process or known.of_process
            numbers |= known.numbers
            continue
        if op.type == "Placeholder":
            outside = subgraphs.captured(current)
            if outside is None:
                return None
            inputs = [outside] if tf.is_symbolic_tensor(outside) else []
            if not inputs:
                name = _name(outside, of_variables)
                if name is None:
                    return None
                of_process |= outside.dtype != tf.resource
                parts.append(name)
        elif (length := _length(op)) is not None:
            of_lengths = True
            parts.append(b"length %d" % length)
            inputs = []
        elif not _only_computes(op):
            return None
        if missing := [each for each in inputs if id(each.op) not in digests]:
            pending += missing
            continue
        parts += [b"%s:%d" % (digests[id(each.op)], each.value_index) for each in inputs]
        digests[id(op)] = _digest([*parts, *_attributes(op)])
        numbers |= _numbers(op)
    return Origin(digests[id(tensor.op)], of_lengths, of_process, frozenset(numbers))


def added_up(indices: tf.Tensor) -> Origin | None:
    """What the indices of a lookup depend on, if one device has a row for each, however many samples there are.

    None if they may depend on the samples, or if they are repeated for each sample: `zeros_like(words)`, or positions
    that were broadcast to the batch before the lookup. Constants do not tell that. Indices that are all different are
    not repeated; others count as repeated if they are as many as something that comes from outside of the graph. Where
    this may be wrong (`is_unclear`), the steps of a replicated model find out by another number of samples.
    """
    known = origin(indices)
    if known is None or _marks.get(indices.graph, {}).get(indices.name) is not None:
        return known
    source = indices
    while source.op.type in ("Reshape", "Identity"):
        source = source.op.inputs[0]
    if source.shape.rank is None:
        return None
    if source.shape.rank == 0 or source.shape[0] is None:
        return known
    # Of one sample all indices may be different; but then an op repeats them, once.
    is_repeated = _repeats_once(source) if source.shape[0] == 1 else not _are_different(source)
    return None if is_repeated and source.shape[0] in _sizes_from_outside(source.graph) else known


def is_unclear(indices: tf.Tensor, count: Any) -> bool:
    """Whether only another number of samples shows if the indices of a lookup are repeated for each of `count`."""
    size = indices.shape.num_elements()
    if not isinstance(count, int) or size is None or size % count or origin(indices) is None:
        return False
    return count == 1 or not _are_different(indices)


def mark(tensor: tf.Tensor, known: Origin | None) -> None:
    """Tells `origin` what a tensor depends on, where its op does not show that; None says that it is the samples."""
    _marks.setdefault(tensor.graph, {})[tensor.name] = known


def pieces(rows: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """The rows of each lookup of a table, where a gradient has those of several; in a graph.

    A lookup of indices that were joined counts as several, if not all of these depend on the samples.
    """
    indices, values = rows.indices, rows.values
    if not tf.is_symbolic_tensor(indices) or values.shape.rank is None:
        return [rows]
    while indices.op.type == "Identity":
        indices = indices.op.inputs[0]
    if indices.graph is not tf.compat.v1.get_default_graph() or indices.name in _marks.get(indices.graph, {}):
        return [rows]
    parts = list(indices.op.inputs)[:-1] if indices.op.type == "ConcatV2" else _indices_joined(indices)
    if len(parts) < 2:
        return [rows]
    sizes = [tf.size(part) if part.shape[0] is None else part.shape[0] for part in parts]
    split = tf.split(values, tf.stack(sizes), num=len(parts))
    found = []
    for part, size, own in zip(parts, sizes, split, strict=True):
        own.set_shape([size if isinstance(size, int) else None, *values.shape[1:]])
        found += pieces(tf.IndexedSlices(own, part, rows.dense_shape))
    return found


def _indices_joined(indices: tf.Tensor) -> list[tf.Tensor]:
    """The parts of the indices of one lookup, each flat; an empty list if all parts depend on the samples, or none.

    The ops between the parts and the lookup are applied to each part, so that `origin` can follow them.
    """
    if origin(indices) is not None:
        return []
    source = _concatenation(indices)
    if source is None or all(origin(part) is None for part in source.inputs[:-1]):
        return []
    made = _made.setdefault(indices.graph, {})
    if indices.name not in made:
        parts = [_applied(indices, {id(source): tf.reshape(part, [-1])}) for part in source.inputs[:-1]]
        made[indices.name] = [part.name for part in parts]
    return [indices.graph.get_tensor_by_name(name) for name in made[indices.name]]


def _concatenation(tensor: tf.Tensor) -> tf.Operation | None:
    """The op that joins the parts of a tensor along the first dimension, if there is one; see `_indices_joined`."""
    found: set[tf.Operation] = set()
    pending, seen = [tensor], set()
    while pending:
        each = pending.pop()
        op = each.op
        if id(op) in seen:
            continue
        seen.add(id(op))
        if _is_passing(op):
            pending.append(op.inputs[0])
        elif _BY_ELEMENT.fullmatch(op.type):
            several = [one for one in op.inputs if one.shape.rank != 0]
            if any(one.shape.rank is None or list(one.shape) != list(op.outputs[0].shape) for one in several):
                return None  # it is repeated along a dimension
            pending += several
        elif op.type == "ConcatV2" and tf.get_static_value(op.inputs[-1]) == 0:
            found.add(op)
        else:
            return None
    return found.pop() if len(found) == 1 else None


def _is_passing(op: tf.Operation) -> bool:
    """Whether an op leaves all elements in their order: also one that only adds dimensions, as `x[:, None]` does."""
    if op.type != "StridedSlice":
        return op.type in _PASSING
    begin, end, new, ellipsis = (op.get_attr(f"{name}_mask") for name in ("begin", "end", "new_axis", "ellipsis"))
    strides = tf.get_static_value(op.inputs[3])
    return strides is not None and all(
        (new | ellipsis | begin & end) >> place & 1 and stride == 1 for place, stride in enumerate(strides)
    )


def _applied(tensor: tf.Tensor, known: dict[int, tf.Tensor]) -> tf.Tensor:
    """What a tensor would be if an op returned something else: `known` has the results of ops, by id."""
    op = tensor.op
    if tensor.shape.rank == 0:
        return tensor
    if id(op) not in known:
        if _is_passing(op):
            known[id(op)] = _applied(op.inputs[0], known)
        else:
            known[id(op)] = subgraphs.apply_op(op, [_applied(each, known) for each in op.inputs]).outputs[0]
    return known[id(op)]


def joined(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The rows of several lookups of a table as one gradient."""
    if len(parts) == 1:
        return parts[0]
    values, indices = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def reduces_rows(own: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Makes a `_batch_reduce_to` of replica threads add up rows whose indices are not the batch's."""

    @functools.wraps(own)
    def batch_reduce_to(self: Any, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        pairs = list(value_destination_pairs)
        replicas, own_replicas = self._container_strategy().num_replicas_in_sync, len(self.worker_devices)
        is_alone = own_replicas == 1 < replicas  # in its process: its rows are not those of several replicas
        kinds = (distribute.PerReplica, tf.IndexedSlices) if is_alone else distribute.PerReplica
        plans = [_Plan(value, to, replicas) if are_rows(value, kinds) else None for value, to in pairs]
        if not any(plans):
            return own(self, reduce_op, pairs, options)
        flat = [
            each for plan, pair in zip(plans, pairs, strict=True) for each in ([pair] if plan is None else plan.pairs)
        ]
        reduced = iter(own(self, reduce_op, flat, options))
        return [next(reduced) if plan is None else plan.result([next(reduced) for _ in plan.pairs]) for plan in plans]

    return batch_reduce_to


def are_rows(value: Any, kinds: Any = distribute.PerReplica) -> bool:
    """Whether a value of one of some classes is rows of a table, for each replica."""
    return isinstance(value, kinds) and all(
        isinstance(each, tf.IndexedSlices)
        and isinstance(each.values, tf.Tensor)
        and isinstance(each.indices, tf.Tensor)
        for each in _components(value)
    )


class _Plan:
    """How one gradient of a table is reduced over replica threads.

    Attributes:
        pairs: what is to be reduced, each with its destinations.
    """

    def __init__(self, value: Any, destinations: Any, replicas: int):
        self._rows: list[tf.IndexedSlices] = list(_components(value))
        self._replicas = replicas
        self._is_eager = tf.executing_eagerly()
        self._columns = [self._rows] if self._is_eager else _columns(self._rows)
        self._kinds = [self._kind(column) for column in self._columns]
        if set(self._kinds) == {_JOINED}:
            self._columns, self._kinds, self.pairs = [self._rows], [_JOINED], [(value, destinations)]
            return
        self.pairs = [
            (_like(value, _prepared(kind, column)), destinations)
            for kind, column in zip(self._kinds, self._columns, strict=True)
        ]

    def result(self, reduced: list[Any]) -> Any:
        """The reduced gradient, from the results of `pairs`."""
        columns = [
            [self._finished(kind, column, place, each) for place, each in enumerate(_components(result))]
            for kind, column, result in zip(self._kinds, self._columns, reduced, strict=True)
        ]
        rows = []
        for parts in zip(*columns, strict=True):
            with tf.device(parts[0].values.device):
                rows.append(joined(parts))
        return distribute.Mirrored(rows) if isinstance(reduced[0], distribute.DistributedValues) else rows[0]

    def _kind(self, column: list[tf.IndexedSlices]) -> str:
        if self._is_eager or any(rows.values.shape.rank is None for rows in column):
            return _JOINED
        known = [added_up(rows.indices) for rows in column]
        first = known[0]
        if first is None or any(each is None or each.digest != first.digest for each in known):
            return _JOINED
        if self._replicas > len(column):  # the constants of another worker may be others
            return _JOINED if first.of_process else _COMPARED
        return _MOVED if first.of_lengths else _ADDED

    def _finished(self, kind: str, column: list[tf.IndexedSlices], place: int, reduced: Any) -> Any:
        if kind == _ADDED:
            own = column[place if place < len(column) else 0]
            return tf.IndexedSlices(reduced, own.indices, own.dense_shape)
        if kind == _COMPARED:
            return _compared(reduced, tf.size(column[0].indices), self._replicas)
        return _folded(reduced, self._replicas) if self._is_eager else reduced


_JOINED, _ADDED, _MOVED, _COMPARED = "joined", "added", "moved", "compared"


def _columns(replicas: list[tf.IndexedSlices]) -> list[list[tf.IndexedSlices]]:
    """For each lookup of a table, the rows of all replicas."""
    found = []
    for rows in replicas:
        with tf.device(rows.values.device):
            found.append(pieces(rows))
    if len({len(each) for each in found}) > 1:
        return [replicas]
    return [list(column) for column in zip(*found, strict=True)]


def _prepared(kind: str, column: list[tf.IndexedSlices]) -> list[Any]:
    if kind == _ADDED:
        return [rows.values for rows in column]
    return _moved(column) if kind == _MOVED else column


def _moved(column: list[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
    """Adds the rows that all replicas have at one place to the first replica's, and leaves zeros to the others."""
    least = tf.reduce_min([tf.size(rows.indices) for rows in column])
    first = column[0].indices[:least]
    is_same = tf.reduce_all([tf.equal(rows.indices[:least], first) for rows in column], 0)
    heads = [rows.values[:least] for rows in column]
    flags = tf.reshape(is_same, [-1] + [1] * (heads[0].shape.rank - 1))
    sums = reduction.total(heads)
    found = []
    for replica, (rows, head) in enumerate(zip(column, heads, strict=True)):
        with tf.device(rows.values.device):
            new = tf.where(flags, tf.zeros_like(head) if replica else sums, head)
            found.append(tf.IndexedSlices(tf.concat([new, rows.values[least:]], 0), rows.indices, rows.dense_shape))
    return found


def _compared(rows: tf.IndexedSlices, count: tf.Tensor, replicas: int) -> tf.IndexedSlices:
    """Adds up joined rows if each replica brought `count` of them, and the indices are the same on all."""
    with tf.device(rows.values.device):
        total, most = tf.size(rows.indices), replicas * count
        is_whole = tf.equal(total, most)
        places = tf.minimum(tf.range(most), total - 1)
        indices = tf.reshape(tf.gather(rows.indices, places), [replicas, count])
        shape = tf.shape(rows.values)[1:]
        values = tf.reshape(tf.gather(rows.values, places), tf.concat([[replicas, count], shape], 0))
        is_same = is_whole & tf.reduce_all(tf.equal(indices, indices[:1]), 0)
        flags = tf.reshape(is_same, [-1] + [1] * (rows.values.shape.rank - 1))
        added = tf.concat([_summed(values)[tf.newaxis], tf.zeros_like(values[1:])], 0)
        new = tf.reshape(tf.where(flags, added, values), tf.concat([[most], shape], 0))
        new = tf.gather(new, tf.minimum(tf.range(total), most - 1))
        return tf.IndexedSlices(tf.where(is_whole, new, rows.values), rows.indices, rows.dense_shape)


def _folded(rows: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """Adds up eager rows if each replica has the same run of consecutive indices."""
    count, rest = divmod(int(rows.indices.shape[0]), replicas)
    if rest or count < 2:
        return rows
    indices = rows.indices.numpy().reshape(replicas, count)
    if (indices != range(indices[0, 0], indices[0, 0] + count)).any():
        return rows
    with tf.device(rows.values.device):
        values = _summed(tf.reshape(rows.values, [replicas, count, *rows.values.shape[1:]]))
        return tf.IndexedSlices(values, rows.indices[:count], rows.dense_shape)


def _summed(values: tf.Tensor) -> tf.Tensor:
    """The sum over the first dimension, the replicas; 16-bit floats are rounded once."""
    wide = tf.cast(values, tf.float32) if reduction.is_narrow(values) else values
    return tf.cast(tf.reduce_sum(wide, 0), values.dtype)


def _like(value: Any, components: list[Any]) -> Any:
    return distribute.PerReplica(components) if isinstance(value, distribute.PerReplica) else components[0]


def _components(value: Any) -> Any:
    return value.values if isinstance(value, distribute.DistributedValues) else (value,)


def _name(outside: Any, of_variables: bool) -> bytes | None:
    """What an eager tensor has in common with its like on other replicas: itself, or for a variable its container."""
    if outside.dtype != tf.resource:
        return b"tensor %d" % id(outside)
    container = variables.container_of(outside)
    container = outside if container is None else container
    if not of_variables or isinstance(container, distribute.SyncOnReadVariable):
        return None
    return b"variable %d" % id(container)


def _length(op: tf.Operation) -> int | None:
    """The dimension whose length an op takes of a shape, if it is not the first, which is that of the samples."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape" or op.outputs[0].shape.rank != 0:
        return None
    rank, begin = op.inputs[0].op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    if rank is None or begin is None:
        return None
    return int(begin[0]) % rank or None


def _repeats_once(tensor: tf.Tensor) -> bool:
    """Whether a tensor has a leading 1 because an op repeats something once, or fills as much with one value."""
    for op in _operations(tensor):
        shape = op.outputs[0].shape
        if op.type in _REPEATING:
            return True
        if op.type == "Const" and shape.rank and shape.rank > 1 and shape[0] == 1:
            values = tf.make_ndarray(op.get_attr("value"))
            if (values == values.flat[0]).all():
                return True
    return False


def _operations(tensor: tf.Tensor) -> list[tf.Operation]:
    """All ops that a tensor depends on, in its graph."""
    operations: dict[int, tf.Operation] = {}
    pending = [tensor.op]
    while pending:
        op = pending.pop()
        if id(op) not in operations:
            operations[id(op)] = op
            pending += [each.op for each in op.inputs]
    return list(operations.values())


def _are_different(tensor: tf.Tensor) -> bool:
    """Whether constant indices are all different, as far as their graph can compute them."""
    operations = _operations(tensor)
    for op in operations:
        if op.control_inputs or op.type == "Placeholder" or op.type in _OF_VARIABLE or not _only_computes(op):
            return False
    (values,) = subgraphs.run(tensor.graph, operations, [], [], [tensor])
    found = values.numpy()
    return bool(len(np.unique(found)) == found.size)


def _sizes_from_outside(graph: Any) -> set[int | None]:
    """The lengths of what a graph, or a graph around it, is given or fetches: among them that of a batch."""
    found: set[int | None] = set()
    while isinstance(graph, tf.Graph):
        for op in graph.get_operations():
            is_fetch = op.type.startswith("XlaCustomCall")
            is_given = op.type == "Placeholder" and subgraphs.captured(op.outputs[0]) is None
            is_read = not op.type.startswith("Xla") and op.type not in _OF_VARIABLE and subgraphs.is_stateful(op)
            if is_fetch or is_given or is_read:
                # A device loop fetches several batches at a time, one behind the other along another dimension.
                found.update(size for each in op.outputs if each.shape.rank for size in each.shape[: 1 + is_fetch])
        graph = getattr(graph, "outer_graph", None)
    return found


def _only_computes(op: tf.Operation) -> bool:
    """Whether an op gives all replicas the same result for the same inputs."""
    if subgraphs.runs_functions(op) or op.type.startswith(_UNKNOWN):
        return False
    return op.type in _OF_VARIABLE or not subgraphs.is_stateful(op)


def _numbers(op: tf.Operation) -> set[int]:
    """The integers in a constant of a few elements."""
    if op.type != "Const" or not op.outputs[0].dtype.is_integer or (op.outputs[0].shape.num_elements() or 0) > _FEW:
        return set()
    return set(tf.make_ndarray(op.get_attr("value")).ravel().tolist())


def _attributes(op: tf.Operation) -> list[bytes]:
    attributes = op.node_def.attr
    return [
        name.encode() + attributes[name].SerializeToString(deterministic=True)
        for name in sorted(attributes)
        if not name.startswith("_")
    ]


def _digest(parts: Sequence[bytes]) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(b"%d:" % len(part) + part)
    return found.digest()
