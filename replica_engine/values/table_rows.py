"""Rows of tables (`tf.IndexedSlices`) in a reduction over replicas: some are joined, the others are added up.

A lookup by the tokens of a batch gives one row of gradient for each token. One device has the rows of all samples, so
the rows of the replicas are joined. A lookup by indices that depend on no input of the step, such as positions, gives
one row for each on one device, however many samples there are. There the rows of the replicas are added up. To a table
both is the same sum. To an optimizer it is not: Keras does not add up the rows of one index, and Adam squares each.

In a graph the ops behind the indices tell. Lengths of an input, but that of its first dimension, do not count as the
input: positions may be `arange(shape(x)[1])`. Replicas that trace the step each on its own may have other constants, as
may other processes. There the indices are compared when the step runs, and rows of the same indices are added up.

A table that is looked up in both ways has the rows of both, one behind the other, and each part is reduced in its way.
So is one lookup of both kinds of indices, one behind the other, as those of `tf.nn.sampled_softmax_loss` are: the
labels of the samples, and the classes that stand for all others.

Eager tensors do not tell what they were made of. Rows of eager tensors are added up if each replica has the same run of
two or more consecutive indices, as positions are.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import graph_walk

_UNKNOWN = ("Stateless", "Xla", "PyFunc", "EagerPyFunc")
"""How the types of stateless ops begin that may give each replica another value: random numbers, host calls, ids."""

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
    """What a tensor of a graph depends on, if it depends on no input of the step.

    Attributes:
        of_lengths: whether it depends on shapes that only the running graph knows.
        of_process: whether it depends on an eager tensor, which may be another one in another process.
        of_branches: whether it comes out of a branch; replicas may take different branches.
        numbers: the integers in the short constants that it depends on; a known shape is one.
    """

    of_lengths: bool
    of_process: bool
    of_branches: bool
    numbers: frozenset[int]


_from_branches: weakref.WeakKeyDictionary[tf.Graph, set[str]] = weakref.WeakKeyDictionary()


def origin(tensor: tf.Tensor, of_variables: bool = False) -> Origin | None:
    """What a tensor depends on; None if it may depend on an input, on random numbers or on the replica.

    With `of_variables`, a tensor may depend on variables, as they are when they are read.
    """
    if not tf.is_symbolic_tensor(tensor):
        return None
    of_lengths = of_process = of_branches = False
    numbers: set[int] = set()
    pending, seen = [tensor], set()
    while pending:
        current = pending.pop()
        op = current.op
        if current.name in _from_branches.get(op.graph, ()):
            of_branches = True
            continue  # other outputs of the op may not come out of one
        if op in seen:
            continue
        if op.type == "Placeholder":
            outside = graph_walk.captured(current)
            if outside is None:
                return None
            if tf.is_symbolic_tensor(outside):
                pending.append(outside)
            elif outside.dtype != tf.resource:
                of_process = True
            elif not of_variables or isinstance(eager.find_container(outside), distribute.SyncOnReadVariable):
                return None
        elif _is_length(op):
            of_lengths = True
        elif _only_computes(op):
            pending += op.inputs
            numbers |= _numbers(op)
        else:
            return None
        seen.add(op)
    return Origin(of_lengths, of_process, of_branches, frozenset(numbers))


def note_from_branches(tensor: tf.Tensor) -> None:
    """Tells `origin` that a tensor comes out of branches, and depends on no input in any of them."""
    _from_branches.setdefault(tensor.graph, set()).add(tensor.name)


def pieces(rows: tf.IndexedSlices) -> list[tf.IndexedSlices]:
    """The rows of each lookup of a table, where a gradient has those of several; in a graph.

    A lookup of indices that were joined counts as several, if not all of these depend on an input.
    """
    indices, values = rows.indices, rows.values
    if not tf.is_symbolic_tensor(indices) or values.shape.rank is None:
        return [rows]
    while indices.op.type == "Identity":
        indices = indices.op.inputs[0]
    if indices.graph is not tf.compat.v1.get_default_graph():
        return [rows]
    parts = list(indices.op.inputs)[:-1] if indices.op.type == "ConcatV2" else _indices_joined(indices)
    if len(parts) < 2:
        return [rows]
    split = tf.split(values, tf.stack([_count(part) for part in parts]), num=len(parts))
    lookups = (tf.IndexedSlices(own, part, rows.dense_shape) for own, part in zip(split, parts, strict=True))
    return [each for lookup in lookups for each in pieces(lookup)]


def _indices_joined(indices: tf.Tensor) -> list[tf.Tensor]:
    """The parts of the indices of one lookup, each flat; an empty list if all parts depend on an input, or none.

    The ops between the parts and the lookup are applied to each part, so that `origin` can follow them.
    """
    if origin(indices) is not None:
        return []
    source = _concatenation(indices)
    if source is None or all(origin(part) is None for part in source.inputs[:-1]):
        return []
    return [_applied(indices, {id(source): tf.reshape(part, [-1])}) for part in source.inputs[:-1]]


def _concatenation(tensor: tf.Tensor) -> tf.Operation | None:
    """The op that joins the parts of a tensor along the first dimension, if there is one; see `_indices_joined`."""

    def behind(op: tf.Operation) -> list[tf.Operation]:
        if _is_passing(op):
            return [op.inputs[0].op]
        return [each.op for each in op.inputs if each.shape.rank != 0] if _is_by_element(op) else []

    ops = graph_walk.reached([tensor.op], behind)
    ends = [op for op in ops if not _is_passing(op) and not _is_by_element(op)]
    is_one = len(ends) == 1 and ends[0].type == "ConcatV2" and tf.get_static_value(ends[0].inputs[-1]) == 0
    return ends[0] if is_one else None


def _is_by_element(op: tf.Operation) -> bool:
    """Whether an op computes each element from the elements at the same place, and broadcasts none of its inputs."""
    if not _BY_ELEMENT.fullmatch(op.type):
        return False
    several = [each.shape for each in op.inputs if each.shape.rank != 0]
    return all(shape.rank is not None and list(shape) == list(op.outputs[0].shape) for shape in several)


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
            known[id(op)] = graph_walk.apply_op(op, [_applied(each, known) for each in op.inputs]).outputs[0]
    return known[id(op)]


def joined(parts: Sequence[tf.IndexedSlices]) -> tf.IndexedSlices:
    """The rows of several lookups of a table as one gradient."""
    if len(parts) == 1:
        return parts[0]
    values, indices = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(values, indices, parts[0].dense_shape)


def reduces_rows(own: Callable[..., list[object]]) -> Callable[..., list[object]]:
    """Makes a `_batch_reduce_to` of replica threads add up rows whose indices depend on no input of the step."""

    @functools.wraps(own)
    def batch_reduce_to(
        self: tf.distribute.StrategyExtended,
        reduce_op: object,
        value_destination_pairs: Iterable[tuple[object, object]],
        options: object,
    ) -> list[object]:
        pairs = list(value_destination_pairs)
        replicas, own_replicas = self._container_strategy().num_replicas_in_sync, len(self.worker_devices)
        is_alone = own_replicas == 1 < replicas  # in its process: its rows are not those of several replicas
        kinds = (distribute.PerReplica, tf.IndexedSlices) if is_alone else distribute.PerReplica
        plans = [_TablePlan(value, to, replicas) if are_rows(value, kinds) else None for value, to in pairs]
        nested = [[pair] if plan is None else plan.pairs for plan, pair in zip(plans, pairs, strict=True)]
        reduced = iter(own(self, reduce_op, list(itertools.chain(*nested)), options))
        return [next(reduced) if plan is None else plan.result([next(reduced) for _ in plan.pairs]) for plan in plans]

    return batch_reduce_to


def are_rows(value: object, kinds: type | tuple[type, ...] = distribute.PerReplica) -> bool:
    """Whether a value of one of some classes is rows of a table, for each replica."""
    return isinstance(value, kinds) and all(
        isinstance(each, tf.IndexedSlices)
        and isinstance(each.values, tf.Tensor)
        and isinstance(each.indices, tf.Tensor)
        for each in _components(value)
    )


class _TablePlan:
    """How one gradient of a table is reduced over replica threads.

    Attributes:
        pairs: what is to be reduced, each with its destinations.
    """

    def __init__(self, value: object, destinations: object, replicas: int):
        rows: list[tf.IndexedSlices] = list(_components(value))
        self._replicas = replicas
        self._compares = replicas > len(rows)  # afterwards: here are only the rows of this process
        columns = _columns(rows)
        self._adds = [_has_no_input(column) for column in columns]
        self.pairs = [
            (_like(value, _moved(column) if adds and not self._compares else column), destinations)
            for adds, column in zip(self._adds, columns, strict=True)
        ]

    def result(self, reduced: list[object]) -> distribute.Mirrored | tf.IndexedSlices:
        """The reduced gradient, from the results of `pairs`."""
        columns = [
            [self._finished(adds, each) for each in _components(result)]
            for adds, result in zip(self._adds, reduced, strict=True)
        ]
        rows = []
        for parts in zip(*columns, strict=True):
            with tf.device(parts[0].values.device):
                rows.append(joined(parts))
        return distribute.Mirrored(rows) if isinstance(reduced[0], distribute.DistributedValues) else rows[0]

    def _finished(self, adds: bool, rows: tf.IndexedSlices) -> tf.IndexedSlices:
        if tf.executing_eagerly():
            return _folded(rows, self._replicas)
        return compared(rows, self._replicas) if adds and self._compares else rows


def _columns(replicas: list[tf.IndexedSlices]) -> list[list[tf.IndexedSlices]]:
    """For each lookup of a table, the rows of all replicas; all in one if none of them are added up."""
    found = []
    for rows in replicas:
        with tf.device(rows.values.device):
            found.append(pieces(rows))
    columns = [list(column) for column in zip(*found, strict=False)]
    # Replicas that found other numbers of lookups were traced apart: nothing says which belong together.
    is_plain = len({len(each) for each in found}) > 1 or not any(map(_has_no_input, columns))
    return [replicas] if is_plain else columns


def _has_no_input(column: list[tf.IndexedSlices]) -> bool:
    """Whether the indices of a lookup depend on no input of the step, on each replica."""
    return all(rows.values.shape.rank is not None and origin(rows.indices) is not None for rows in column)


def _moved(column: list[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
    """Adds the rows that all replicas have at one place to the first replica's, and leaves zeros to the others."""
    counts = [_count(rows.indices) for rows in column]
    least = tf.reduce_min(counts) if any(map(tf.is_tensor, counts)) else min(counts)
    first = column[0].indices[:least]
    is_same = tf.reduce_all([tf.equal(rows.indices[:least], first) for rows in column], 0)
    heads = [rows.values[:least] for rows in column]
    flags = tf.reshape(is_same, [-1] + [1] * (heads[0].shape.rank - 1))
    sums = distribute.total(heads)
    found = []
    for replica, (rows, head) in enumerate(zip(column, heads, strict=True)):
        with tf.device(rows.values.device):
            new = tf.where(flags, tf.zeros_like(head) if replica else sums, head)
            found.append(tf.IndexedSlices(tf.concat([new, rows.values[least:]], 0), rows.indices, rows.dense_shape))
    return found


def compared(rows: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """Adds up joined rows where all replicas turn out to have the same indices, if each has brought equally many.

    Where they have not, rows of the same indices may be added up too. All that have these rows add up the same.
    """
    with tf.device(rows.values.device):
        count = _count(rows.indices) // replicas
        bounds = [0, *(count * (replica + 1) for replica in range(replicas))]
        parts = [_between(rows, *each) for each in itertools.pairwise(bounds)]
        return joined([*_moved(parts), _between(rows, bounds[-1], None)])


def _between(rows: tf.IndexedSlices, start: int | tf.Tensor, stop: int | tf.Tensor | None) -> tf.IndexedSlices:
    return tf.IndexedSlices(rows.values[start:stop], rows.indices[start:stop], rows.dense_shape)


def _folded(rows: tf.IndexedSlices, replicas: int) -> tf.IndexedSlices:
    """Adds up eager rows if each replica has the same run of consecutive indices."""
    count, rest = divmod(int(rows.indices.shape[0]), replicas)
    if rest or count < 2:
        return rows
    indices = rows.indices.numpy().reshape(replicas, count)
    if (indices != range(indices[0, 0], indices[0, 0] + count)).any():
        return rows
    with tf.device(rows.values.device):
        values = distribute.total(tf.split(rows.values, replicas))
        return tf.IndexedSlices(values, rows.indices[:count], rows.dense_shape)


def _like(value: object, components: list[tf.IndexedSlices]) -> distribute.PerReplica | tf.IndexedSlices:
    return distribute.PerReplica(components) if isinstance(value, distribute.PerReplica) else components[0]


def _components(value: object) -> Sequence[Any]:
    return value.values if isinstance(value, distribute.DistributedValues) else (value,)


def _count(indices: tf.Tensor) -> int | tf.Tensor:
    """How many flat indices there are: a number if it is known."""
    return tf.size(indices) if indices.shape[0] is None else indices.shape[0]


def _is_length(op: tf.Operation) -> bool:
    """Whether an op takes a length of a shape, if it is not the first, which is that of the samples."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape" or op.outputs[0].shape.rank != 0:
        return False
    rank, begin = op.inputs[0].op.inputs[0].shape.rank, tf.get_static_value(op.inputs[1])
    return rank is not None and begin is not None and int(begin[0]) % rank != 0


def _only_computes(op: tf.Operation) -> bool:
    """Whether an op gives all replicas the same result for the same inputs."""
    if graph_walk.runs_functions(op) or op.type.startswith(_UNKNOWN):
        return False
    return op.type in graph_walk.READS or not graph_walk.is_stateful(op)


def _numbers(op: tf.Operation) -> set[int]:
    """The integers in a constant of a few elements."""
    if op.type != "Const" or not op.outputs[0].dtype.is_integer or (op.outputs[0].shape.num_elements() or 0) > _FEW:
        return set()
    return set(tf.make_ndarray(op.get_attr("value")).ravel().tolist())
