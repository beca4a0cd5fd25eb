"""The replica context of a compiled body, and each replica's own values in it.

A body is traced once, so one context stands for all replicas, and each tensor in the body stands for N values, one on
each replica. A collective is an op of the program. A merge call runs its function while the body is traced: everything
that the merge function does in cross-replica context (reduce, update, local results) becomes a collective or a plain
op.

A body may use a value of several replicas that is not an argument of the run. TensorFlow asks the replica context for
an index, and takes the value of that index. In a compiled body the index is 0 on all replicas. A mirrored variable on
the host is one variable, which an update in cross-replica context writes once. In both cases replica 0's value would
count for all, without a word. So here each replica gets its own value (`own_value`, `update_each`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics import observer
from replica_engine.errors import CollectiveError, NotInReplicaError, ReplicaValueError, run_errors
from replica_engine.process.interrupts import afterwards
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import autograph
from replica_engine.values import replica_weights, table_rows
from replica_engine.values.structure import as_axis, as_tensor
from replica_engine.xla.body import in_body, num_replicas, replica_id
from replica_engine.xla.collectives import all_gather, all_reduce, all_to_all, cross_replica_sum, reduce_scatter
from replica_engine.xla.constraints import logical_device
from replica_engine.xla.state.device_value import DeviceValue, accesses_noted


class BodyReplicaContext(tf.distribute.ReplicaContext):
    """The object that `tf.distribute.get_replica_context()` returns in a compiled body.

    TensorFlow's distributed variables ask the context for a replica index. The context answers 0, because the variable
    of replica 0 stands for the variables of all replicas. User code gets the replica id as a tensor.

    Args:
        strategy: the strategy.
        is_step: whether the body is a step of `run_steps`, in which `run` and `reduce` of the strategy also work.
    """

    def __init__(self, strategy: tf.distribute.Strategy, is_step: bool = False):
        super().__init__(strategy, 0)
        self.is_step = is_step

    if not TYPE_CHECKING:  # a type checker would take each name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for an attribute that is not found: says what to write for one that the strategy has."""
            return run_errors.elsewhere(self, "replica", name)

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """The id of the replica that runs this: a scalar int32 tensor."""
        return replica_id()

    @autograph.artifact
    def merge_call(self, merge_fn: Callable[..., object], args: object = (), kwargs: object = None) -> Any:
        """Runs `merge_fn` in cross-replica context; each tensor argument stands for the values of all replicas.

        Like `tf.distribute.ReplicaContext.merge_call`, with two differences: it may be called in branches, loops and
        nested functions, and the arguments are tensors instead of `PerReplica`s.
        """
        _check_in_run()
        if not isinstance(args, (list, tuple)):
            raise ReplicaValueError.no_positional(args)
        return distribute.first_values(super().merge_call(merge_fn, own_values(args), own_values(kwargs)))

    @autograph.artifact
    def all_reduce(self, reduce_op: tf.distribute.ReduceOp | str, value: object, options: object = None) -> Any:
        """Reduces `value` over all replicas, like `tf.distribute.ReplicaContext.all_reduce`; "MIN" and "MAX" work too.

        Args:
            reduce_op: "SUM", "MEAN", "MIN" or "MAX", or a `tf.distribute.ReduceOp`.
            value: a tensor, `tf.IndexedSlices` or nested structure of them.
            options: ignored; XLA decides how to reduce.
        """
        result = _exchange_leaves(value, lambda leaf: reduce_leaf(reduce_op, leaf))
        if observer.current is not None:
            observer.current.reduced(str(getattr(reduce_op, "value", reduce_op)).upper(), value, result)
        return result

    @autograph.artifact
    def all_gather(self, value: object, axis: int, options: object = None) -> Any:
        """Like `tf.distribute.ReplicaContext.all_gather`; shapes must be equal on all replicas."""
        return _exchange_leaves(value, lambda leaf: gather_leaf(leaf, axis))

    @autograph.artifact
    def reduce_scatter(self, value: object, axis: int = 0) -> Any:
        """Sums a value over all replicas, and gives replica i part i along `axis`; see `replica_engine.ReplicaContext`.

        Args:
            value: a tensor or nested structure of tensors, of equal shapes on all replicas.
            axis: the dimension to divide; its size must be a multiple of the number of replicas.
        """
        return _exchange_leaves(value, lambda leaf: reduce_scatter(leaf, axis))

    @autograph.artifact
    def all_to_all(self, value: object, split_axis: int, concat_axis: int) -> Any:
        """Sends part i along `split_axis` to replica i, and joins the received parts along `concat_axis`.

        Args:
            value: a tensor or nested structure of tensors, of equal shapes on all replicas.
            split_axis: the dimension to split; its size must be a multiple of the number of replicas.
            concat_axis: the dimension to concatenate along.
        """
        return _exchange_leaves(value, lambda leaf: all_to_all(leaf, split_axis, concat_axis))

    def experimental_logical_device(self, logical_device_id: int) -> contextlib.AbstractContextManager[None]:
        """As in the context of `tf.distribute.TPUStrategy`: names a device of the replica; XLA chooses them."""
        body = in_body()
        count = 1 if body is None or body.mesh is None else body.mesh.size
        return logical_device(logical_device_id, count)

    @property
    def devices(self) -> list:
        """The host, because values are on the host before and after a run."""
        return ["/device:CPU:0"]


def _as_tensor(
    value: distribute.PerReplica, dtype: tf.DType | None = None, name: str | None = None, as_ref: bool = False
) -> object:
    """TensorFlow's hook that makes a tensor of a value of several replicas that a body uses without being given it.

    Each replica gets its own value, as on replica threads.
    """
    context = tf.distribute.get_replica_context()
    if not isinstance(context, BodyReplicaContext) or in_body() is None:
        return NotImplemented
    return own_value(value, dtype)


@functools.cache
def use_own_values() -> None:
    """Lets bodies use values of several replicas that they are not given; once per process."""
    tf.register_tensor_conversion_function(distribute.PerReplica, _as_tensor, priority=80)  # TensorFlow's has 100


def _check_in_run() -> None:
    """Raises NotInReplicaError if no body is being traced here."""
    if in_body() is None:
        raise NotInReplicaError.used_after_run()


def _exchange_leaves(value: object, exchange: Callable[[Any], object]) -> Any:
    """Exchanges each leaf of a structure between the replicas."""
    _check_in_run()
    return replica_weights.reduced(value, functools.partial(tf.nest.map_structure, exchange))


_SPARSE = ("SUM", "MEAN")  # reductions that keep sparse values sparse


def reduce_leaf(reduce_op: tf.distribute.ReduceOp | str, value: object) -> tf.Tensor | tf.IndexedSlices:
    """Reduces one value over replicas; a sparse value stays sparse if its rank is known."""
    name = str(getattr(reduce_op, "value", reduce_op)).upper()
    if isinstance(value, tf.IndexedSlices) and value.values.dtype == tf.bool:
        raise CollectiveError.wrong_dtype(name, "bool")
    if isinstance(value, tf.IndexedSlices) and (value.values.shape.rank is None or name not in _SPARSE):
        value = tf.convert_to_tensor(value)
    if isinstance(value, tf.IndexedSlices):
        return table_rows.joined([_reduced_rows(name, part) for part in table_rows.pieces(value)])
    tensor = as_tensor(value, "The value to all_reduce")
    if tensor.dtype.is_integer and name == "MEAN":
        return cross_replica_sum(tensor) / num_replicas()  # a fraction, as in tf.distribute
    return all_reduce(tensor, reduce_op)


def _reduced_rows(name: str, value: tf.IndexedSlices) -> tf.IndexedSlices:
    """Adds up the rows of all replicas if their indices depend on no input of the step; joins them otherwise."""
    body, origin = in_body(), table_rows.origin(value.indices)
    shape = value.dense_shape if value.dense_shape is None else tf.convert_to_tensor(value.dense_shape)
    values = value.values
    # Before rows are joined, so that the sum of the rows of one index is their mean.
    if name == "MEAN":
        values /= tf.cast(num_replicas(), values.dtype)
    is_of_one_process = body is not None and body.own == body.size
    if origin is not None and not origin.of_branches and (is_of_one_process or not origin.of_process):
        return tf.IndexedSlices(cross_replica_sum(values), value.indices, shape)  # one program has the same for all
    together = tf.IndexedSlices(all_gather(values, axis=0), all_gather(value.indices, axis=0), shape)
    return together if origin is None else table_rows.compared(together, num_replicas())


def gather_leaf(value: object, axis: int) -> tf.Tensor:
    """Concatenates the values of all replicas along `axis`."""
    if isinstance(value, (tf.IndexedSlices, tf.SparseTensor)):
        raise NotImplementedError("all_gather does not support IndexedSlices/SparseTensor")
    tensor = as_tensor(value, "The value to all_gather")
    if tensor.shape.rank == 0:  # an error in tf.distribute too; `xla.all_gather` makes a vector of scalars
        raise CollectiveError.no_axis("all_gather", as_axis("all_gather", axis), str(tensor.shape))
    return all_gather(tensor, axis=axis)


T = TypeVar("T")
_DIFFERENT = (
    "A variable that has one value on all replicas is updated, in a tf.function and outside replicas, with values "
    'that differ between the replicas. Update it with one value, strategy.reduce("MEAN", x, axis=None), or in the '
    "replicas: strategy.run(lambda x: variable.assign(x), args=(x,))."
)
"""The text of the assertion about the values of an update."""


def own_value(value: distribute.PerReplica, dtype: tf.DType | None = None) -> tf.Tensor:
    """In a body, the value of the replica that runs it.

    Raises:
        ReplicaValueError: the values have different shapes, or belong to another number of replicas.
    """
    values = [tf.convert_to_tensor(each, dtype) for each in value.values]
    if len(values) != num_replicas() or len({str((each.shape, each.dtype)) for each in values}) > 1:
        raise ReplicaValueError.several("A function of TensorFlow", len(values), True)
    return tf.stack(values)[replica_id()]


def own_values(structure: object) -> Any:
    """In a body, the structure; each value of several replicas becomes the value of the replica that runs the body."""
    if not has_several(structure):
        return structure
    return tf.nest.map_structure(lambda leaf: own_value(leaf) if _is_several(leaf) else leaf, structure)


def has_several(structure: object) -> bool:
    """Whether a value of several replicas is in a structure."""
    return any(map(_is_several, tf.nest.flatten(structure)))


def differ(structure: object) -> bool:
    """Whether a value of several replicas in a structure has other bytes on another replica; in eager code."""
    return any(len(set(map(_bytes, leaf.values))) > 1 for leaf in tf.nest.flatten(structure) if _is_several(leaf))


def check_equal(structure: object) -> Any:
    """In a graph: the structure with one tensor for each value of several replicas, checked to be the same on all.

    Raises, when the graph runs:
        tf.errors.InvalidArgumentError: the values differ.
    """

    def checked(leaf: Any) -> object:
        if not _is_several(leaf) or not all(map(tf.is_tensor, leaf.values)):
            return leaf
        first, *others = leaf.values
        checks = [tf.debugging.Assert(_same(first, other), [_DIFFERENT]) for other in others]
        with tf.control_dependencies(checks):
            return tf.identity(first)

    return tf.nest.map_structure(checked, structure)


def update_each(
    component: tf.Variable, fn: Callable[..., T], rows: list[tuple[Sequence[object], Mapping[str, object]]]
) -> list[T]:
    """Updates the one variable of all replicas with the arguments of each; afterwards each replica has its own value.

    The same holds for each other variable that `fn` changes, such as a slot of an optimizer: on the host it is one
    variable too, and gets the value of the replica before `fn` sees it.

    Args:
        component: the variable on the host.
        fn: called with the variable and the arguments of a replica, once for each replica.
        rows: for each replica, the positional and the keyword arguments.

    Returns:
        What `fn` returns for each replica.
    """
    values: dict[DeviceValue, list[np.ndarray]] = {}
    results = []
    for replica, (args, kwargs) in enumerate(rows):
        with (
            _own_on_host(values, replica),
            tf.device(component.device),
            distribute.UpdateContext(0),
            tf.name_scope(f"update_{replica}"),
        ):
            results.append(fn(component, *args, **kwargs))
    return results


@contextlib.contextmanager
def _own_on_host(values: dict[DeviceValue, list[np.ndarray]], replica: int) -> Iterator[None]:
    """Inside, the host has a replica's values of variables that have one value on the host; `values` are all values."""
    seen: list[DeviceValue] = []

    def note(each: DeviceValue) -> None:
        if each in seen or len(each.handles) > 1 or each.spread is not None:
            return
        seen.append(each)
        if each not in values:
            values[each] = each.each_value()
        with each.host_writes(whole=True):
            eager.write(each.handles[0], values[each][replica])

    def keep() -> None:
        for each in seen:
            values[each][replica] = np.array(eager.read(each.handles[0], each.dtype).numpy())
            each.set_values(values[each])

    with afterwards(keep, "keeping the replica's values"), accesses_noted(note):
        yield


def _bytes(value: object) -> object:
    array = value.numpy() if hasattr(value, "numpy") else value
    return array.tobytes() if isinstance(array, (np.ndarray, np.generic)) else array


def _same(first: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    if first.dtype.is_floating:  # two NaNs are the same value
        return tf.reduce_all((first == other) | (tf.math.is_nan(first) & tf.math.is_nan(other)))
    return tf.reduce_all(first == other)


def _is_several(leaf: object) -> bool:
    return isinstance(leaf, distribute.PerReplica)
