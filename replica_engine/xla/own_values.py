"""What each compiled replica gets of a value of several replicas that is not an argument of the run.

TensorFlow asks the replica context for an index, and takes the value of that index. In a compiled body the index is 0
on all replicas, since the body is traced once. A mirrored variable on the host is one variable, which an update in
cross-replica context writes once. In both cases replica 0's value would count for all, without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute, variables
from replica_engine.errors import ReplicaValueError
from replica_engine.process.afterwards import afterwards
from replica_engine.xla.body import num_replicas, replica_id
from replica_engine.xla.state.device_value import DeviceValue, accesses_noted

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

    So has each other variable that `fn` changes, such as a slot of an optimizer: on the host it is one variable too,
    and gets the value of the replica before `fn` sees it.

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
            variables.write(each.handles[0], values[each][replica])

    def keep() -> None:
        for each in seen:
            values[each][replica] = np.array(variables.read(each.handles[0], each.dtype).numpy())
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
