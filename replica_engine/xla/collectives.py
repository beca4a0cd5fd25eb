"""Cross-replica operations: they combine the values of all replicas inside a compiled body.

They work at the top level of a body, in `tf.cond`, `tf.while_loop` and nested `tf.function`s, and have gradients of
every order. All replicas must reach each operation: every replica must take the same branch of a `tf.cond`, and a loop
must have the same number of iterations on each replica.

The gradients follow one rule, which `tf.distribute` has too: the objective is the sum of the objectives of all
replicas. So the gradient of a sum over replicas is the sum over replicas of the gradients, and the gradient of a
permutation is the reverse permutation.

An operation with a gradient works on an identity of its operand: in a branch, a gradient cannot find again a tensor
that was passed in from outside.

Sums and means of float16 and bfloat16 are added in float32 on CPU devices, and rounded once. TPUs and GPUs get the
collective of the narrow dtype: what a device adds with is its own, and a wider one would move twice as many bytes.

`groups` divides the replicas: `[[0, 1], [2, 3]]` makes two sums, each over two replicas. Each replica must be in
exactly one group. None makes one group of all replicas.

A sum over replicas of one tensor that all replicas share is an error, as on replica threads (`SharedSums`).
"""

from __future__ import annotations

import contextlib
import json
import operator
import threading
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from replica_engine.diagnostics.user_frames import here
from replica_engine.errors import CollectiveError, ReplicaValueError, base
from replica_engine.process import interrupts, ordered_sum, sums_are_ordered
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import autograph, function_graphs, graph_walk, xla_ops
from replica_engine.values.structure import as_axis, as_tensor
from replica_engine.xla import arguments
from replica_engine.xla.arguments import Arguments, describe_placeholder
from replica_engine.xla.body import current, in_body, note_collective
from replica_engine.xla.soft_placement import host_op_kinds

_thread = threading.local()


class SharedSums:
    """The tensors that one trace of a body adds up over replicas; it finds those that all replicas share.

    A replica thread brings a tensor that only it has, or one that all have. A body is traced once: a tensor that the
    caller passes to all replicas, and one that the body uses from outside, look like any other there. So a body notes
    what it adds up, and finds out where that comes from. An argument may be shared in one call and not in the next.

    Attributes:
        slots: for the index of each argument that is added up as it is: its name, and the user's line.
    """

    def __init__(self) -> None:
        self.slots: dict[int, tuple[str, str]] = {}
        self._added: list[tuple[tf.Tensor, str]] = []

    @contextlib.contextmanager
    def noted(self, placeholders: Sequence[tf.Tensor]) -> Iterator[None]:
        """Inside, a body with these arguments is traced.

        Raises:
            ReplicaValueError: at the end, if the body adds up a tensor from outside.
        """
        with interrupts.set_for_block(_thread, "sums", self):
            yield
        graph = eager.graph()
        for tensor, where in self._added:
            origin = _origin(tensor, graph)
            index = next((index for index, each in enumerate(placeholders) if each is origin), None)
            if index is not None:
                self.slots[index] = describe_placeholder(placeholders[index]), where
            elif origin is not None:
                raise ReplicaValueError.sum_of_one(graph_walk.captured(origin), False, where)
        self._added = []

    def check(self, arguments: Arguments) -> None:
        """Checks the arguments of a call.

        Raises:
            ReplicaValueError: all replicas share one that is added up.
        """
        for index, (name, where) in self.slots.items():
            if arguments.slots[index].is_shared:
                raise ReplicaValueError.sum_of_one(name, False, where)


def note(value: object) -> None:
    """Called when a body asks for the sum of a value over its replicas.

    Raises:
        ReplicaValueError: it is one value for all replicas.
    """
    body = in_body()
    if body is None or body.own == 1:  # a worker with one replica has that replica's tensors
        return
    # A plain variable has one value for all replicas; a distributed one may have one for each.
    is_variable = isinstance(value, tf.Variable)
    if distribute.is_mirrored(value) or (is_variable and not isinstance(value, distribute.DistributedVariable)):
        raise ReplicaValueError.sum_of_one(value, is_variable)
    if tf.is_symbolic_tensor(value):
        _thread.sums._added.append((value, here()))
    elif isinstance(value, tf.Tensor):
        raise ReplicaValueError.sum_of_one(value, False)


def _origin(tensor: tf.Tensor, body: tf.Graph) -> tf.Tensor | None:
    """The input of the body's graph that a tensor stands for; None if an op makes the tensor."""
    while tensor.op.type == "Placeholder" and tensor.graph is not body:
        outside = graph_walk.captured(tensor)
        if outside is None:
            outside = _passed(tensor, body)
        if not tf.is_symbolic_tensor(outside):
            return None
        tensor = outside
    return tensor if tensor.op.type == "Placeholder" else None


def _passed(argument: tf.Tensor, graph: tf.Graph) -> tf.Tensor | None:
    """What a nested function is called with for an argument; None if a loop changes it, or if no call is found."""
    for op in filter(graph_walk.runs_functions, graph_walk.everywhere(graph)):
        inner = graph_walk.list_inner_graphs(op)
        if len(inner) == 1 and inner[0] is argument.graph:
            return op.inputs[next(index for index, each in enumerate(inner[0].inputs) if each is argument)]
    return None


Groups = Sequence[Sequence[int]]
_PREFIX = "replica_engine."
_NARROW = (tf.float16, tf.bfloat16)  # a sum of few such numbers has lost digits that float32 keeps


@autograph.artifact
def cross_replica_sum(x: object, groups: Groups | None = None) -> tf.Tensor:
    """The sum of `x` over all replicas, with the shape and dtype of `x`. All replicas get the same bits.

    Args:
        x: a tensor of a numeric dtype, of one shape on all replicas.
        groups: as in `xla.collectives`; each replica gets the sum over its group.

    Raises:
        NotInBodyError: called outside a replicated body.
        CollectiveError: `groups` do not divide the replicas, or the dtype cannot be summed.

    Example:
        >>> from replica_engine import xla
        >>> sums = xla.replicate(xla.cross_replica_sum, [[1.0], [2.0]])
        >>> [float(each) for each in sums]
        [3.0, 3.0]
    """
    # First, so that an error has the name of the function that was called.
    current("cross_replica_sum")
    return all_reduce(x, "SUM", groups)


@autograph.artifact
def all_reduce(x: object, op: tf.distribute.ReduceOp | str = "SUM", groups: Groups | None = None) -> tf.Tensor:
    """Reduces `x` of all replicas to one value, with the shape and dtype of `x`. All replicas get that value.

    Args:
        x: a tensor of one shape on all replicas.
        op: "SUM", "MEAN", "MIN" or "MAX", or a `tf.distribute.ReduceOp`. A mean of integers is rounded down. The
            gradient of a minimum or maximum goes in equal parts to the replicas that hold it.
        groups: as in `xla.collectives`; each replica gets the value of its group.

    Raises:
        NotInBodyError: called outside a replicated body.
        CollectiveError: `groups` do not divide the replicas, `op` is unknown, or the dtype cannot be reduced.

    Example:
        >>> from replica_engine import xla
        >>> [float(each) for each in xla.replicate(lambda x: xla.all_reduce(x, "MAX"), [[1.0], [2.0]])]
        [2.0, 2.0]
    """
    size = current("all_reduce").size
    rows = _rows(groups, size)
    tensor = _operand("all_reduce", x)
    name = str(getattr(op, "value", op)).upper()
    if name not in _REDUCTIONS:
        raise CollectiveError.unknown_reduction(op, sorted(_REDUCTIONS))
    if tensor.dtype == tf.bool or (tensor.dtype.is_complex and name in _EXTREMES):
        raise CollectiveError.wrong_dtype(name, tensor.dtype.name)
    return _REDUCTIONS[name](tensor, rows)


@autograph.artifact
def all_gather(x: object, axis: int = 0, groups: Groups | None = None) -> tf.Tensor:
    """Concatenates `x` of all replicas along `axis`, in the order of the replicas. All replicas get the result.

    Args:
        x: a tensor of one shape on all replicas. Scalars are concatenated to a vector.
        axis: the dimension to concatenate along; a negative one counts from the end.
        groups: as in `xla.collectives`, of equal sizes; each replica gets the values of its group.

    Raises:
        NotInBodyError: called outside a replicated body.
        CollectiveError: `x` has no dimension `axis`, or its shape is unknown, or it holds strings, or `groups` do
            not divide the replicas.

    Example:
        >>> from replica_engine import xla
        >>> [each.numpy().tolist() for each in xla.replicate(xla.all_gather, [[1], [2]])]
        [[1, 2], [1, 2]]
    """
    rows = _rows(groups, current("all_gather").size, "all_gather")
    tensor = _operand("all_gather", x)
    if tensor.shape.rank == 0:
        tensor = tensor[tf.newaxis]
    return _gather(tensor, _axis("all_gather", tensor, axis), rows)


@autograph.artifact
def reduce_scatter(x: object, axis: int = 0, groups: Groups | None = None) -> tf.Tensor:
    """The sum of `x` over all replicas, divided along `axis`: replica i gets part i.

    Args:
        x: a tensor of a numeric dtype, of one shape on all replicas.
        axis: the dimension to divide; its size must be a multiple of the size of a group.
        groups: as in `xla.collectives`, of equal sizes; the sum of a group is divided in it.

    Raises:
        NotInBodyError: called outside a replicated body.
        CollectiveError: `x` has no such dimension, or its size does not divide, or the dtype cannot be summed, or
            `groups` do not divide the replicas.

    Example:
        >>> from replica_engine import xla
        >>> [each.numpy().tolist() for each in xla.replicate(xla.reduce_scatter, [[[1, 2]], [[30, 40]]])]
        [[31], [42]]
    """
    rows = _rows(groups, current("reduce_scatter").size, "reduce_scatter")
    tensor = _operand("reduce_scatter", x)
    if tensor.dtype == tf.bool:
        raise CollectiveError.wrong_dtype("SUM", tensor.dtype.name)
    axis = _axis("reduce_scatter", tensor, axis)
    _check_divides(tensor, axis, rows)
    return _scatter(tensor, axis, rows)


@autograph.artifact
def all_to_all(x: object, split_axis: int, concat_axis: int, groups: Groups | None = None) -> tf.Tensor:
    """Splits `x` along one dimension, sends part i to replica i, and concatenates the received parts along another.

    Args:
        x: a tensor of one shape on all replicas.
        split_axis: the dimension to split; its size must be a multiple of the size of a group.
        concat_axis: the dimension to concatenate along.
        groups: as in `xla.collectives`, of equal sizes; the parts travel inside each group.

    Raises:
        NotInBodyError: called outside a replicated body.
        CollectiveError: `x` has no such dimension, or its size does not divide, or it holds strings, or `groups`
            do not divide the replicas.

    Example:
        >>> from replica_engine import xla
        >>> swap = lambda x: xla.all_to_all(x, split_axis=0, concat_axis=0)
        >>> [each.numpy().tolist() for each in xla.replicate(swap, [[[1, 2]], [[3, 4]]])]
        [[1, 3], [2, 4]]
    """
    rows = _rows(groups, current("all_to_all").size, "all_to_all")
    tensor = _operand("all_to_all", x)
    split, concat = (_axis("all_to_all", tensor, axis) for axis in (split_axis, concat_axis))
    _check_divides(tensor, split, rows)
    return _exchange(tensor, split, concat, rows)


@autograph.artifact
def collective_permute(x: object, pairs: Sequence[tuple[int, int]]) -> tf.Tensor:
    """Sends `x` from replica to replica. The result has the shape and dtype of `x`.

    Args:
        x: a tensor of one shape on all replicas.
        pairs: pairs (from, to) of replica ids. Each replica may send once and receive once. A replica that receives
            nothing gets zeros.

    Raises:
        NotInBodyError: called outside a replicated body.
        CollectiveError: a replica sends twice, receives twice, or does not exist, or `x` holds strings.

    Example:
        >>> from replica_engine import xla
        >>> around = lambda x: xla.collective_permute(x, [(0, 1), (1, 0)])
        >>> [int(each) for each in xla.replicate(around, [[1], [2]])]
        [2, 1]
    """
    size = current("collective_permute").size
    try:
        links = [(int(source), int(target)) for source, target in pairs]
    except (TypeError, ValueError):
        raise CollectiveError.bad_pairs(pairs, size) from None
    # The replicas that send, and then those that receive.
    for side in zip(*links, strict=True):
        if len(set(side)) < len(side) or not set(side) <= set(range(size)):
            raise CollectiveError.bad_pairs(links, size)
    return _permute(_operand("collective_permute", x), links)


ppermute = collective_permute
"""JAX's name for `collective_permute`."""


def _operand(name: str, x: object) -> tf.Tensor:
    tensor = as_tensor(x, f"The value to {name}")
    if xla_ops.is_host_only(tensor.dtype):
        raise CollectiveError.host_only(name, here(), tensor.dtype.name)
    return tensor


def _reduced(x: tf.Tensor, rows: list[list[int]], op: str) -> tf.Tensor:
    note_collective("all_reduce", x)
    if all(len(row) == 1 for row in rows):  # XLA on CPU would copy the value
        return tf.identity(x)
    if x.dtype.is_complex:
        return _join_complex(_reduced_numbers(_parts(x), rows, op))
    return _reduced_numbers(x, rows, op)


def _reduced_numbers(x: tf.Tensor, rows: list[list[int]], op: str) -> tf.Tensor:
    if op == "Add" and x.dtype in _NARROW:
        return _added(x, rows)
    is_even = len({len(row) for row in rows}) == 1
    if is_even and xla_ops.takes_all_reduce(x.dtype):
        return xla_ops.all_reduce(x, rows, op)
    if is_even and not x.shape.is_fully_defined():
        # XLA's op does not take the dtype, and a marker no unknown shape.
        if op == "Add" and sums_are_ordered():
            values = tf.unstack(_stacked(x, [sorted(row) for row in rows]), len(rows[0]))
            return ordered_sum(values, tf.add)
        return _FOLDS[op](_stacked(x, rows), axis=0)
    return _emit("all_reduce", x, x.shape, groups=rows, op=op)


def _parts(x: tf.Tensor) -> tf.Tensor:
    """The real and the imaginary parts of complex numbers, one behind the other along a new first dimension.

    A sum over replicas of complex constants ends the process inside XLA.
    """
    return tf.stack([tf.math.real(x), tf.math.imag(x)])


def _join_complex(parts: tf.Tensor) -> tf.Tensor:
    real, imag = tf.unstack(parts, num=2)
    return tf.complex(real, imag)


def _added(x: tf.Tensor, rows: list[list[int]], divide_by: int = 1) -> tf.Tensor:
    """The sum of 16-bit floats, divided by a number, rounded once. TPUs and GPUs add them in their own way."""
    if x.shape.is_fully_defined():
        return _emit("all_reduce", x, x.shape, groups=rows, op="Add", divide_by=divide_by)
    wide = _reduced_numbers(tf.cast(x, tf.float32), rows, "Add")
    return tf.cast(wide / divide_by, x.dtype)


def _sum(x: tf.Tensor, rows: list[list[int]]) -> tf.Tensor:
    x = tf.identity(x)
    return _differentiable(_reduced(x, rows, "Add"), x, lambda dy: _sum(dy, rows))


def _mean(x: tf.Tensor, rows: list[list[int]]) -> tf.Tensor:
    sizes = {len(row) for row in rows}
    # With groups of several sizes no single number divides the sum before it is rounded.
    if x.dtype in _NARROW and len(sizes) > 1:
        return tf.cast(_mean(tf.cast(x, tf.float32), rows), x.dtype)
    if x.dtype in _NARROW and sizes != {1}:
        x = tf.identity(x)
        note_collective("all_reduce", x)
        return _differentiable(_added(x, rows, len(rows[0])), x, lambda dy: _mean(dy, rows))
    total = _sum(x, rows)
    if len(sizes) == 1:
        count: int | tf.Tensor = sizes.pop()
    else:
        of_replica = [len(next(row for row in rows if replica in row)) for replica in range(sum(map(len, rows)))]
        count = tf.gather(tf.constant(of_replica), xla_ops.replica_id())
    count = tf.cast(count, x.dtype)
    return total // count if x.dtype.is_integer else total / count


def _extreme(op: str, x: tf.Tensor, rows: list[list[int]]) -> tf.Tensor:
    x = tf.identity(x)
    result = _reduced(x, rows, op)
    if x.dtype.is_floating:  # XLA:CPU ignores a NaN in a minimum or maximum
        has_nan = _reduced(tf.cast(tf.math.is_nan(x), tf.int32), rows, "Max")
        result = tf.where(has_nan > 0, tf.constant(float("nan"), x.dtype), result)

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        mine = tf.cast(x == result, dy.dtype)
        return _sum(dy, rows) * mine / _sum(mine, rows)

    return _differentiable(result, x, gradient)


_EXTREMES = {"MIN": lambda x, rows: _extreme("Min", x, rows), "MAX": lambda x, rows: _extreme("Max", x, rows)}
_FOLDS = {"Add": tf.reduce_sum, "Min": tf.reduce_min, "Max": tf.reduce_max}
_REDUCTIONS = {"SUM": _sum, "MEAN": _mean, **_EXTREMES}


def _gather(x: tf.Tensor, axis: int, rows: list[list[int]]) -> tf.Tensor:
    if not x.shape.is_fully_defined():
        return _gather_of_unknown_size(x, axis, rows)
    x, shape = tf.identity(x), x.shape.as_list()
    shape[axis] *= len(rows[0])
    result = _mark_unless_empty("all_gather", x, shape, axis=axis, groups=rows)
    return _differentiable(result, x, lambda dy: _scatter(dy, axis, rows))


def _gather_of_unknown_size(x: tf.Tensor, axis: int, rows: list[list[int]]) -> tf.Tensor:
    """Like `_gather`, but by a sum over replicas: the only collective whose result has the shape of its operand."""
    x, size = tf.identity(x), len(rows[0])
    note_collective("all_gather", x)

    def gradient(dy: tf.Tensor) -> tf.Tensor:
        return tf.gather(tf.stack(tf.split(_sum(dy, rows), size, axis)), _position(rows))

    return _differentiable(tf.concat(tf.unstack(_stacked(x, rows), num=size), axis), x, gradient)


def _scatter(x: tf.Tensor, axis: int, rows: list[list[int]]) -> tf.Tensor:
    x, shape, body = tf.identity(x), x.shape.as_list(), in_body()
    shape[axis] //= len(rows[0])
    if x.dtype.is_complex:
        result = _join_complex(_scatter(_parts(x), axis + 1, rows))
    elif body is not None and body.own < body.size and 0 not in shape and not sums_are_ordered():
        result = _scatter_by_exchange(x, axis, shape, rows)
    else:
        result = _mark_unless_empty("reduce_scatter", x, shape, axis=axis, groups=rows, op="Add")
    return _differentiable(result, x, lambda dy: _gather(dy, axis, rows))


def _scatter_by_exchange(x: tf.Tensor, axis: int, shape: list[int], rows: list[list[int]]) -> tf.Tensor:
    """A reduce-scatter over several workers: Gloo's gives up when one is 30 s late, and its all-to-all waits."""
    parts = _marker("all_to_all", x, x.shape, split_axis=axis, concat_axis=axis, groups=rows)
    if x.dtype in _NARROW:
        parts = tf.cast(parts, tf.float32)
    return tf.cast(tf.reduce_sum(tf.reshape(parts, [*shape[:axis], len(rows[0]), *shape[axis:]]), axis), x.dtype)


def _exchange(x: tf.Tensor, split: int, concat: int, rows: list[list[int]]) -> tf.Tensor:
    x, shape = tf.identity(x), x.shape.as_list()
    shape[split] //= len(rows[0])
    shape[concat] *= len(rows[0])
    result = _marker("all_to_all", x, shape, split_axis=split, concat_axis=concat, groups=rows)
    return _differentiable(result, x, lambda dy: _exchange(dy, concat, split, rows))


def _permute(x: tf.Tensor, links: list[tuple[int, int]]) -> tf.Tensor:
    x, back = tf.identity(x), [(target, source) for source, target in links]
    return _differentiable(_marker("collective_permute", x, x.shape, pairs=links), x, lambda dy: _permute(dy, back))


def _differentiable(result: tf.Tensor, x: tf.Tensor, gradient: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """The result of an operation on `x`, an identity of its operand, with the gradient for that of the result."""
    return function_graphs.differentiable([result], [x], gradient)[0]


def _mark_unless_empty(name: str, x: tf.Tensor, shape: list[int], **parameters: object) -> tf.Tensor:
    """A marker; or an empty tensor if the result has no elements, since XLA refuses to gather nothing."""
    return tf.zeros(shape, x.dtype) if 0 in shape else _marker(name, x, shape, **parameters)


def _marker(name: str, x: tf.Tensor, shape: tf.TensorShape | Sequence[int], **parameters: object) -> tf.Tensor:
    note_collective(name, x)
    return _emit(name, x, shape, **parameters)


def _emit(name: str, x: tf.Tensor, shape: tf.TensorShape | Sequence[int], **parameters: object) -> tf.Tensor:
    _check_static(name, x)
    return xla_ops.marker(_PREFIX + name, [x], json.dumps(parameters), [x.dtype], [shape])[0]


def _axis(name: str, x: tf.Tensor, axis: int) -> int:
    # A gather may have unknown sizes, if they come from an argument or from the host: then it is made of a sum.
    if name != "all_gather" or x.shape.rank is None or not (_sources(x) or _is_made_on_host(x)):
        _check_static(name, x)
    rank, axis = x.shape.rank, as_axis(name, axis)
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise CollectiveError.no_axis(name, axis, str(x.shape))
    return axis % rank


def _check_divides(x: tf.Tensor, axis: int, rows: list[list[int]]) -> None:
    if x.shape[axis] % len(rows[0]):
        raise CollectiveError.not_divisible(axis, x.shape[axis], len(rows[0]))


def _check_static(name: str, x: tf.Tensor) -> None:
    if not x.shape.is_fully_defined():
        if arguments.comes_from_loop(x):
            raise CollectiveError(
                f"{name}{base.at(here())} needs a shape that is known while the body is traced for all replicas, but "
                f"this value has the shape {x.shape}, since shape_invariants of a loop leave it open. Collect "
                "the values of the iterations in a tf.TensorArray(dtype, size=n), and gather them after the loop; "
                "or loop over a Python range, for i in range(n): such a loop is unrolled, and each iteration knows "
                "its shapes."
            )
        raise CollectiveError.unknown_shape(name, here(), str(x.shape), _sources(x))


def _is_made_on_host(x: tf.Tensor) -> bool:
    """Whether an operand comes from ops that soft placement moves: their shapes are known once they have been moved."""
    body = in_body()
    return body is not None and body.moves_ops and any(map(host_op_kinds.is_for_host, arguments.ops_behind(x)))


def _sources(x: tf.Tensor) -> list[str]:
    """The arguments of unknown shape behind an operand of unknown shape. Without any, its shape depends on data."""
    return arguments.behind(x, lambda argument: not argument.shape.is_fully_defined())


def _rows(groups: Groups | None, size: int, equal_for: str = "") -> list[list[int]]:
    """The groups, checked. For the operation `equal_for` they must have equal sizes."""
    if groups is None:
        return [list(range(size))]
    try:
        rows = [[operator.index(replica) for replica in group] for group in groups]
    except (TypeError, ValueError, LookupError, AttributeError, NotImplementedError, tf.errors.OpError):
        raise CollectiveError.bad_groups(groups, size) from None
    if not all(rows) or sorted(replica for row in rows for replica in row) != list(range(size)):
        raise CollectiveError.bad_groups(rows, size)
    if len({len(row) for row in rows}) > 1 and equal_for:
        raise CollectiveError(
            f"`groups` of {equal_for} must have equal sizes, because the shape of its result depends on the size; "
            f"got {rows}. For two halves of four replicas: groups=[[0, 1], [2, 3]]."
        )
    return rows


def _stacked(x: tf.Tensor, rows: Sequence[Sequence[int]]) -> tf.Tensor:
    """The values of a replica's group, stacked along a new first dimension, whatever their size is.

    A body in a `tf.function` is traced once for batches of any size, and compiled for each size that occurs. A marker
    (`xla_ops.marker`) must declare the shape of its result while the body is traced, so no marker can stand for a
    collective of such values. A sum over replicas has the shape of its operand. So each replica puts its value into its
    own place among zeros, and the sum holds the values of all replicas. That moves N times as many bytes as a gather.

    The sum adds integers, the bits of the values, so that a NaN or a negative zero stays exactly as it is.

    Args:
        x: the replica's own value, of a known rank and of one shape on all replicas.
        rows: the groups, of equal sizes.
    """
    if x.dtype.is_complex:
        return tf.complex(_stacked(tf.math.real(x), rows), _stacked(tf.math.imag(x), rows))
    words = _as_words(x)
    places = tf.range(len(rows[0])) == _position(rows)
    mask = tf.reshape(places, [-1, *([1] * words.shape.rank)])
    mine = tf.where(mask, words[tf.newaxis], tf.zeros([], tf.int32))
    return _join_words(xla_ops.all_reduce(mine, rows, "Add"), x.dtype)


def _position(rows: Sequence[Sequence[int]]) -> tf.Tensor:
    """The position of the replica that runs this in its group: a scalar int32 tensor."""
    places = {replica: place for row in rows for place, replica in enumerate(row)}
    return tf.gather(tf.constant([places[replica] for replica in range(len(places))]), xla_ops.replica_id())


def _as_words(x: tf.Tensor) -> tf.Tensor:
    """The bits of a value as int32, with one more dimension if a value has more than 32 bits."""
    if x.dtype in _NARROW:
        x = tf.bitcast(x, tf.uint16)
    return tf.cast(x, tf.int32) if x.dtype.size < 4 else tf.bitcast(x, tf.int32)


def _join_words(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if dtype in _NARROW:
        return tf.bitcast(tf.cast(words, tf.uint16), dtype)
    return tf.cast(words, dtype) if dtype.size < 4 else tf.bitcast(words, dtype)
