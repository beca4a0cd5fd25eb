"""Variables of TPUStrategy: TensorFlow's distributed variables, with their values on the devices.

A mirrored variable has one variable on the host; an on-read variable has one variable on the host per replica.
`DeviceValue` moves values between these variables and the devices.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.backend import HostSide
from replica_engine.checkpoints import checkpoint_files
from replica_engine.errors import CaptureError, DistributionError, LoweringError, base
from replica_engine.pjrt.device_group import Array, DeviceGroup
from replica_engine.pjrt.devices import chip_memory
from replica_engine.pjrt.stablehlo.partition_local import WHOLE, Axes, ReplicaMesh, names
from replica_engine.process.memory import freed_memory_returned
from replica_engine.strategies import worker_values
from replica_engine.strategies.variable_layouts import Distribution, Made
from replica_engine.upstream import checkpoint_hooks, distribute, eager
from replica_engine.upstream.graphs import graph_walk, xla_ops
from replica_engine.upstream.keras import keras_variables
from replica_engine.values import replica_weights, variable_numbers
from replica_engine.xla import arguments, function_spec
from replica_engine.xla.calls.program_table import ProgramTable
from replica_engine.xla.stages.launch import Launch
from replica_engine.xla.state import host_memory, host_variable, random_numbers
from replica_engine.xla.state.device_value import DeviceValue, Spread, find_axes
from replica_engine.xla.state.host_variable import HostVariable

LARGE = 1 << 23
"""The bytes of a variable whose value is made in parts. A program for it takes about a tenth of a second to compile."""


class InitialValue:
    """The body of a program that makes an initial value in parts: no host or device ever has a large variable whole.

    Keras' own initializers are functions of a shape and a seed. So such a function becomes a program, whose result is
    divided like the variable. Random numbers are those that TensorFlow draws on the host (`random_numbers`). All other
    functions run on the host, once: they may have an effect, such as an item taken from an iterator, or need real
    values. So does an initializer with a `SeedGenerator`, whose state counts the draws.

    Args:
        make: makes the value.
        shape: its shape.
        dtype: its dtype.
        axes: how it is divided.
        mesh: over which mesh.
    """

    _replica_engine_where = "the initial value of a variable"

    def __init__(self, make: Callable[[], Any], shape: tuple[int, ...], dtype: tf.DType, axes: Axes, mesh: ReplicaMesh):
        self._make = make
        self._dtype = dtype
        self.shape = shape
        self.result_axes = [axes]
        axes = (*axes, *[None] * (len(shape) - len(axes)))
        self._pieces = random_numbers.Pieces(shape, tuple(mesh.parts(axes)), tuple(map(names, axes)))

    def __call__(self) -> tf.Tensor:
        """Called while the body is traced."""
        with random_numbers.in_pieces(self._pieces):
            return tf.convert_to_tensor(self._make(), self._dtype)


def made(programs: ProgramTable, value: InitialValue) -> Array | None:
    """The value on the devices; None if it must be made on the host."""
    try:
        entry = programs.trace(
            function_spec.FunctionSpec(value, autograph=False), arguments.Arguments((), {}, programs.devices.size), ()
        )
        graph, (output,) = entry.traced.graph, entry.traced.outputs
        # What has a state or an effect, such as a draw from a generator, runs on the host, once.
        has_state = entry.traced.handles or any(map(graph_walk.is_stateful, graph.get_operations()))
        if has_state or tuple(output.shape) != value.shape:
            return None
        compiled = programs.compiled(entry, [])
    except (LoweringError, CaptureError, tf.errors.OpError, TypeError, ValueError):
        return None  # the host makes it, or raises what the user should see
    # Returns when the program has run, on CPU devices.
    with freed_memory_returned() if programs.devices.platform == "cpu" else contextlib.nullcontext():
        return Launch(compiled)([]).results.pop()


_KERAS_SEED = "seed_generator_state"


class _OnDevices:
    """The code that both kinds of variable share."""

    def __deepcopy__(self, memo: dict[int, object]) -> tf.Variable:
        """Copies the variable on its devices. As in `tf.distribute`, this works only under its strategy's scope."""
        variable: Any = self
        strategy = variable.distribute_strategy
        with distribute.enter_or_assert_strategy(strategy):
            unique = {id(value): value for value in variable._values}
            values = [eager.plain_copy(value, memo) for value in unique.values()]
        # As in `create`: one variable on the host stands for all replicas.
        if len(values) == 1:
            values *= len(variable._values)
        copied = type(self)(strategy, values, variable.aggregation)  # type: ignore[call-arg]
        original: DeviceValue = variable._values[0]._replica_engine[0]
        device_value = make_device_value(values, strategy.extended.device_group, original.spread, original.axes)
        device_value.limits, device_value.kept_equal = original.limits, original.kept_equal
        table = strategy.extended.backend.variable_table
        table.note(device_value, table.find_path(original))
        # Replicas may have assigned different values, of which the host has only that of replica 0.
        if len(device_value.handles) == 1 and (own := original.on_replicas()) is not None:
            device_value.set_values(own)
        memo[id(self)] = copied
        return copied


class MirroredDeviceVariable(_OnDevices, distribute.MirroredVariable):
    """A variable with one value on all replicas.

    A variable without aggregation lets replicas assign different values. Then each replica keeps its value on its
    device, and the host has the value of replica 0.
    """

    @property
    def values(self) -> tuple:
        """For each replica, the variable on the host, or a copy of the replica's value where the values differ."""
        if self._aggregation != tf.VariableAggregation.NONE or not tf.executing_eagerly():
            return self._values
        values = self._values[0]._replica_engine[0].on_replicas()
        if values is None:
            return self._values
        return (self._values[0], *(eager.ResourceVariable(value, trainable=False) for value in values[1:]))

    def _serialize_to_tensors(self) -> dict[str, object]:
        """TensorFlow's hook for checkpoints: the value goes from the devices to the file in parts."""
        value = self._on_devices()
        own = None if value is None else checkpoint_files.serialized(value, self._primary.device)
        return {checkpoint_hooks.VALUE: own or checkpoint_hooks.mirrored_spec(self)}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> object:
        """TensorFlow's hook for what `_serialize_to_tensors` has asked for."""
        value, tensor = self._on_devices(), restored_tensors[checkpoint_hooks.VALUE]
        if value is not None and checkpoint_files.restored(value, tensor):
            return None
        return checkpoint_hooks.restore_mirrored(self, tensor)

    def _on_devices(self) -> DeviceValue | None:
        """The value on the devices, in eager mode, if they have it."""
        found = HostVariable.device_value(self._primary)
        return found[0] if found is not None and tf.executing_eagerly() else None

    def each_value(self) -> list[np.ndarray]:
        """The value on each replica of this process; empty if all follow from that of the first, as seeds do."""
        device_value: DeviceValue = self._values[0]._replica_engine[0]
        return device_value.each_value() if device_value.spread is None else []

    def assign_each(self, values: Sequence[np.ndarray]) -> None:
        """Gives each replica a value of its own."""
        self._values[0]._replica_engine[0].set_values(values)

    def __str__(self) -> str:
        return _listed(self, str)

    def __repr__(self) -> str:
        return _listed(self, repr)


class OnReadDeviceVariable(_OnDevices, distribute.SyncOnReadVariable):
    """A variable with one value per replica; reading it in cross-replica context aggregates the values."""

    def _get_cross_replica(self) -> tf.Tensor:
        """The hook that aggregates; for the first replica TensorFlow would take the first one of each worker."""
        if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            extended = self.distribute_strategy.extended
            if extended.device_group.member is not None:
                return extended.backend.over_workers(worker_values.FIRST, self)
        return super()._get_cross_replica()


class _HostSide:
    """Implements `backend.HostSide`."""

    def __init__(self, variable: tf.Variable, device_value: DeviceValue, replica: int):
        self._variable = variable
        self._device_value = device_value
        self._replica = replica

    def attach(self) -> None:
        if not isinstance(self._variable, HostVariable):
            HostVariable.adopt(self._variable, self._device_value, self._replica)

    def used(self, writes: bool) -> None:
        if isinstance(self._variable, HostVariable):
            HostVariable.used(self._variable, writes)

    def release(self) -> None:
        if isinstance(self._variable, HostVariable):
            HostVariable.release(self._variable)


def find_host_side(variable: object) -> HostSide | None:
    """Implements `backend.Backend.find_host_side`."""
    found = HostVariable.device_value(variable)
    return None if found is None else _HostSide(variable, *found)


def create(
    strategy: tf.distribute.Strategy, next_creator: Callable[..., tf.Variable], kwargs: dict[str, Any]
) -> tf.Variable:
    """Makes a variable of a strategy; `kwargs` are the keyword arguments of a variable creator."""
    backend = strategy.extended.backend
    devices, distribution = backend.device_group, backend.distribution
    name = kwargs.get("name") or "Variable"
    spread = replica_weights.states if name.endswith(_KERAS_SEED) and not backend.same_random else None
    early = None if distribution is None else _known_early(distribution, devices, name, kwargs)
    array = None if early is None else _made_in_parts(backend, name, early, kwargs)
    if array is not None:
        assert early is not None, "its axes are known"
        # Pages that nobody touches take no memory, so the host never has the value.
        stand_in = host_memory.zeros(early.shape, np.dtype(early.dtype.as_numpy_dtype))
        kwargs = {**kwargs, "initial_value": lambda: stand_in}

    def components(**kwargs: Any) -> list[tf.Variable]:
        on_read = kwargs["synchronization"] == tf.VariableSynchronization.ON_READ
        # A variable outlives the body that makes it, so its initial value must not need the graph of the body.
        first = eager.create(next_creator, host_variable.outside(kwargs))
        values = [first]
        for replica in range(1, devices.size if on_read else 1):
            # All begin with the first one's value: an initializer that is called again may draw another one.
            like = {**kwargs, "initial_value": first.read_value, "name": f"{_plain(first.name)}/replica_{replica}/"}
            values.append(eager.create(next_creator, like))
        # One variable on the host stands for all replicas.
        return values if on_read else values * devices.size

    variable = distribute.create_variable(strategy, components, MirroredDeviceVariable, OnReadDeviceVariable, kwargs)
    axes = WHOLE
    if early is not None:
        axes = early.axes
    elif distribution is not None and variable.shape.is_fully_defined():
        axes = _axes(distribution, devices, name, tuple(variable.shape), variable.dtype)
    # A value that was made in parts follows from the chief's seed on all workers.
    if devices.member is not None and array is None:
        how = None if distribution is None else distribution.described(axes)
        worker_values.start_from_chief(name, variable._values, devices, backend.limits, how)
    device_value = make_device_value(variable._values, devices, spread, axes, array)
    device_value.limits = backend.limits
    if devices.member is not None:
        variable_numbers.number(device_value.handles)
    is_mirrored = isinstance(variable, MirroredDeviceVariable) and spread is None
    device_value.kept_equal = is_mirrored and variable.aggregation != tf.VariableAggregation.NONE
    backend.variable_table.note(device_value, _path(name))
    return variable


def make_device_value(
    values: Sequence[tf.Variable], devices: DeviceGroup, spread: Spread | None, axes: Axes, array: Array | None = None
) -> DeviceValue:
    """Makes the device value of a distributed variable, and gives its host variables access to that device value.

    Args:
        values: the variable on the host for each replica.
        devices: the devices.
        spread, axes: as for `DeviceValue`.
        array: the value, if the devices have it already; then what the host has only has its shape.
    """
    unique = list({id(value): value for value in values}.values())
    device_value = DeviceValue([eager.raw_handle(value) for value in unique], devices, spread, axes)
    for replica, value in enumerate(unique):
        HostVariable.adopt(value, device_value, replica)
    if array is None:
        device_value.leave_pool()
    else:
        device_value.begin_with(array)
    return device_value


class _Early(NamedTuple):
    """What is known of a variable before it is made."""

    shape: tuple[int, ...]
    dtype: tf.DType
    axes: Axes


def _known_early(distribution: Distribution, devices: DeviceGroup, name: str, kwargs: dict[str, Any]) -> _Early | None:
    shape, dtype = kwargs.get("shape"), kwargs.get("dtype")
    making = keras_variables.being_made().variable
    if making is not None and callable(kwargs.get("initial_value")):
        shape = making.shape
    shape = tf.TensorShape(shape)
    if dtype is None or not shape.is_fully_defined():
        return None
    dtype = tf.dtypes.as_dtype(dtype)
    return _Early(tuple(shape), dtype, _axes(distribution, devices, name, tuple(shape), dtype))


def _axes(distribution: Distribution, devices: DeviceGroup, name: str, shape: tuple[int, ...], dtype: tf.DType) -> Axes:
    """How a variable is divided over the devices of a replica."""
    if xla_ops.is_host_only(dtype):
        return WHOLE
    made, reference, _ = keras_variables.being_made()
    layout, is_weight = getattr(made, "_layout", None), reference is None and getattr(made, "trainable", False)
    like = None if reference is None else find_axes(keras_variables.find_first_handle(reference), distribution.mesh)
    is_state = made is not None and not made.trainable
    axes = distribution.choose_axes(Made(_path(name), shape, dtype.size, layout, like, is_weight, is_state))
    part = dtype.size * math.prod(devices.on_each(shape, axes))
    memory = chip_memory(devices)
    if memory is not None and part > memory:
        raise _too_large(_path(name), shape, part, memory, axes == WHOLE)
    return axes


def _too_large(path: str, shape: tuple[int, ...], part: int, device: int, whole: bool) -> DistributionError:
    sizes = f"{base.byte_size(part)} on each device, which has {base.byte_size(device)}"
    if whole:
        return DistributionError(
            f'The variable {path!r} of shape {shape} takes {sizes}. Divide it: TPUStrategy(distribution="fsdp"), or a '
            "layout in the LayoutMap of a ModelParallel that names an axis for one of its dimensions."
        )
    return DistributionError(
        f"The variable {path!r} of shape {shape} takes {sizes}, though it is divided. Take more devices, or divide it "
        "along another axis too."
    )


def _path(name: str) -> str:
    """The path of the variable that is being made, if it is Keras'; otherwise its name."""
    made = keras_variables.being_made().variable
    return _plain(name) if made is None else made.path


def _made_in_parts(backend: Any, name: str, early: _Early, kwargs: dict[str, Any]) -> Array | None:
    """The initial value of a large divided variable on the devices; None if the host makes it."""
    value, initializer = kwargs.get("initial_value"), keras_variables.being_made().initializer
    is_large = early.dtype.size * math.prod(early.shape) >= LARGE
    if early.axes == WHOLE or not is_large or tf.inside_function() or initializer is None:
        return None
    devices: DeviceGroup = backend.device_group
    assert callable(value), "Keras passes a function"
    assert devices.mesh is not None, "the value is divided"
    if devices.member is not None:
        # First: workers that are at different variables must hear so before they exchange a seed.
        worker_values.agree_to_make(name, early, devices, backend.limits, backend.distribution.described(early.axes))
        worker_values.take_seed_of_chief(initializer, devices, backend.limits)
    value = InitialValue(value, early.shape, early.dtype, early.axes, devices.mesh)
    return made(backend.initial_programs, value)


def _listed(variable: MirroredDeviceVariable, shown: Callable[[tf.Variable], str]) -> str:
    """The value of each replica, in TensorFlow's form; TensorFlow's own would show the host's value for all."""
    lines = ",\n".join(f"  {replica}: {shown(value)}" for replica, value in enumerate(variable.values))
    return f"{type(variable).__name__}:{{\n{lines}\n}}"


def _plain(name: str) -> str:
    return name.split(":")[0]
