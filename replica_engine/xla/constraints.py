"""How values inside a body are divided over the devices of a replica: XLA chooses, and a constraint says how.

TensorFlow calls the devices of a replica its logical devices, and numbers them from 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine.errors import DeviceError, DistributionError, base
from replica_engine.pjrt.stablehlo.partition_local import Axes, Entry, ReplicaMesh, names
from replica_engine.upstream.graphs import autograph, function_graphs, xla_ops
from replica_engine.values.structure import as_tensor
from replica_engine.xla.body import current, host_call_site, in_body


@autograph.artifact
def constrain(x: object, axes: Sequence[Entry]) -> tf.Tensor:
    """Divides a value of a body over the devices of its replica, like `jax.lax.with_sharding_constraint`.

    It never changes a value. Its gradient is divided in the same way. Where a replica has one device it does nothing.
    Outside a body it does nothing either: Keras calls a layer to learn its shapes, and others run the model elsewhere.

    Args:
        x: a tensor, whose number of dimensions must be known.
        axes: for each dimension, the name of an axis of the strategy's mesh, a tuple of names, or None: each device has
            all of that dimension. Fewer entries than dimensions leave the last ones whole. The mesh of
            `distribution="fsdp"` and `"zero1"` has the axis "batch".

    Raises:
        NotInBodyError: called in a function that `outside_compilation` runs on the host.
        DistributionError: there are more entries than dimensions, or the mesh has no such axis, or an axis comes twice.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> from replica_engine import xla
        >>> strategy = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")
        >>> def step(x):
        ...     hidden = xla.constrain(tf.nn.relu(x), (None, "batch"))
        ...     return tf.reduce_sum(hidden)
        >>> float(strategy.run(step, args=(tf.ones([4, 6]),)))
        24.0
    """
    is_outside = in_body() is None or tf.executing_eagerly()
    mesh = None if is_outside and host_call_site() is None else current("constrain").mesh
    tensor = as_tensor(x, "constrain")
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise DistributionError(f'constrain takes an entry for each dimension, such as ("batch", None); got {axes!r}.')
    entries = [None if entry is None else names(entry) for entry in axes]
    if tensor.shape.rank is None:
        raise DistributionError("constrain needs a value whose number of dimensions is known while the body is traced.")
    if len(entries) > tensor.shape.rank:
        raise DistributionError.too_many_axes("the value passed to constrain", tensor.shape.as_list(), tuple(axes))
    # After the checks: a wrong call is an error with one device too.
    if mesh is None:
        return tf.identity(tensor)
    used = [name for entry in entries for name in entry or ()]
    known = [name for name, _ in mesh.axes]
    for name in used:
        if name not in known:
            raise DistributionError.no_such_axis("the value passed to constrain", name, known)
        if used.count(name) > 1:
            raise DistributionError(f"constrain was called with {tuple(axes)}, which has the axis {name!r} twice.")
    return _constrained(tensor, [*entries, *[None] * (tensor.shape.rank - len(entries))])


def divided(x: tf.Tensor, parts: Sequence[int]) -> tf.Tensor:
    """Divides each dimension of a value into so many parts, which together are as many as the devices of a replica."""
    mesh = current("experimental_split_to_logical_devices").mesh
    return tf.identity(x) if mesh is None else _constrained(x, _factored(mesh, parts))


def whole(x: tf.Tensor) -> tf.Tensor:
    """Gives each device of a replica all of a value."""
    mesh = current("experimental_replicate_to_logical_devices").mesh
    return tf.identity(x) if mesh is None else _constrained(x, [None] * x.shape.rank)


def _constrained(x: tf.Tensor, entries: Sequence[Entry]) -> tf.Tensor:
    x = tf.identity(x)  # a gradient in a branch cannot find again an outer tensor that was passed in
    result = xla_ops.same_shape_marker(x, json.dumps({"axes": entries}))
    return function_graphs.differentiable([result], [x], lambda dy: _constrained(dy, entries))[0]


def _factored(mesh: ReplicaMesh, parts: Sequence[int]) -> Axes:
    """Axes, and parts of axes, of a mesh that divide each dimension into a number of parts."""
    left = [(name, 1, size) for name, size in mesh.axes]  # of each axis: what is taken already, and what is left
    sizes = dict(mesh.axes)
    entries: list[Entry] = []
    for wanted in parts:
        taken = []
        while wanted > 1:
            # There is one: all parts together are as many as the devices of the mesh.
            name, before, rest = next(each for each in left if math.gcd(each[2], wanted) > 1)
            size = math.gcd(rest, wanted)
            taken.append(name if size == sizes[name] else f"{name}:({before}){size}")
            left[[each[0] for each in left].index(name)] = (name, before * size, rest // size)
            wanted //= size
        entries.append(tuple(taken) or None)
    return tuple(entries)


def logical_device(logical_device_id: int, count: int) -> contextlib.AbstractContextManager[None]:
    """A block whose variables and ops are on a device of their replica; see `TPUExtended`.

    Raises:
        DeviceError: a replica has no device of this number.
    """
    check("experimental_logical_device", logical_device_id, count)
    return contextlib.nullcontext()


def check(method: str, logical_device_id: object, count: int) -> None:
    """Raises DeviceError for a logical device that none of the `count` devices of a replica is."""
    if not 0 <= as_int(logical_device_id) < count:
        raise DeviceError(
            f"{method} was called with logical_device_id={base.shown(logical_device_id)}, but "
            f"{devices_of_replica(count)}"
        )


def devices_of_replica(count: int) -> str:
    """The sentence that says how many devices each replica has, for errors."""
    having = "one device, number 0" if count == 1 else f"{count} devices, numbers 0 to {count - 1}"
    return f"each replica has {having}. TPUStrategy(cores_per_replica=...) says how many."


def as_int(value: Any) -> int:
    """The value as an int; -1 for a value that is not an integer, which the caller's check then refuses."""
    try:
        return operator.index(value)
    except TypeError:
        return -1
