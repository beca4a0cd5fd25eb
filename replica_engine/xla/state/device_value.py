"""Values of variables on the devices, and which side has the newest value.

A variable has a value on the host, in one TensorFlow variable or in one for each replica. It also has a value on each
device. A compiled body reads and writes the values on the devices; everything else reads and writes those on the host.
Each side is brought up to date only when it is needed:

- When a body writes, the host's value becomes stale. The next read on the host fetches the new value.
- When the host writes, the devices' values become stale. The next launch sends the new value. If it is unknown whether
  the host wrote, the next launch compares the two.

Both sides are never stale at once. `host_variable` defines what counts as a read and as a write on the host.

Large weights should not take memory on the host that nothing reads. So a value that is stale on the host is freed, and
an empty tensor stands there instead, until the host reads the value for the first time. After that read the value
stays, since nothing tells when a read is over. While TensorFlow lowers a body that captures the variable, the variable
is pinned: the host then has a tensor of the right shape, perhaps with zeros instead of the value. A value that was made
or written on the host lies outside of TensorFlow's memory pool until the first read (`host_memory`).

A thread holds `_freeing` while it frees values on the host or restores them. It never waits for a device meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from replica_engine.errors import LostVariableError, ProgramError, base
from replica_engine.pjrt import partitioned_group, worker_exchange
from replica_engine.pjrt.device_group import Array, Computed, DeviceGroup
from replica_engine.pjrt.stablehlo.partition_local import WHOLE, Axes, ReplicaMesh, ValuePart
from replica_engine.process import interrupts, shutdown
from replica_engine.upstream import eager
from replica_engine.upstream.graphs import xla_ops
from replica_engine.xla.state import host_memory

Spread = Callable[[np.ndarray, int], list[np.ndarray]]
"""Takes the host's single value and the number of replicas; returns the value of each replica."""

_MARK = "_replica_engine_device_value"
_LARGE = 1 << 16  # bytes; a smaller value is not worth the op that frees it
_WORTH_A_WORD = 1 << 30  # bytes of a divided variable that is read whole
_logger = logging.getLogger("replica_engine")
_thread = threading.local()
_freeing = threading.RLock()  # reentrant, since a signal handler may read a variable too


def accesses_noted(note: Callable[[DeviceValue], None]) -> contextlib.AbstractContextManager[object]:
    """Inside, `note` is called before the host reads or writes a value on this thread; what it does is not noted."""
    return interrupts.set_for_block(_thread, "note", note)


class DeviceValue:
    """The value of one variable on the devices of a strategy.

    Args:
        handles: the handles of the variables on the host; a single one where all replicas have one value.
        devices: where the replicas run.
        spread: for a single handle, what each replica gets of its value; None gives all replicas the same value.
        axes: how the value is divided over the devices of a replica.

    Attributes:
        limits: seconds to wait for other workers when they read it together, and seconds until a warning.
        written_by: on devices with a queue, the program that wrote it last, set together with `on_devices`; None if
            unknown.
        read_anywhere: whether the host's value may be read unnoticed, as functions of datasets do.
        loops: the device loops that write the variable and that run or are about to run. Their inputs must
            never see the variable, however early they read it: a read raises an error on their thread.
        asked: the objects that host functions call to get a handle (`host_handles`). Saving a model needs to know
            them.
        kept_equal: whether all replicas have one value, because what they assign is aggregated.
        on_devices: the value on the devices; None if only the host has it. A launch sets this attribute (and
            `written_by`) of all its variables at once (`Stores`): then the host's value is stale, since `_on_host` is
            another array.
    """

    def __init__(
        self, handles: Sequence[tf.Tensor], devices: DeviceGroup, spread: Spread | None = None, axes: Axes = WHOLE
    ):
        self.handles = list(handles)
        described = xla_ops.variable_dtype_and_shape(self.handles[0])
        assert described is not None, "a variable's handle"
        self.dtype, self._shape = described
        size = self.dtype.size * (self._shape.num_elements() or 0)  # 0 if the shape is unknown
        self._to_free = size >= _LARGE and not xla_ops.is_host_only(self.dtype)  # when the host's value is stale
        self.asked: weakref.WeakSet = weakref.WeakSet()
        self.spread = spread
        self.axes = axes
        self.read_anywhere = False
        self.kept_equal = False
        self.loops: set[object] = set()  # that run now and write it; no lock, since the calls of a set are whole
        self._devices = devices
        self.on_devices: Array | None = None
        self._on_host: Array | None = None  # the array whose value the host has too
        self._looked_at = self._freed = self._maybe_written = self._lost = self._told = False
        self._pins = 0
        self._writer: int | None = None  # the thread in `host_writes`; its reads do not count as the first read
        self._steps = 0  # that have written it
        self.limits: tuple[float | None, float | None] = (None, None)
        self.written_by: Computed | None = None
        self.mark()

    @property
    def bytes(self) -> int:
        """Its size on each device; 0 if the variable's shape is unknown, or no device can have it."""
        if xla_ops.is_host_only(self.dtype) or not self._shape.is_fully_defined():
            return 0
        return self.dtype.size * math.prod(self._devices.on_each(tuple(self._shape), self.axes))

    @property
    def devices_each(self) -> int:
        """The number of devices of each replica."""
        return self._devices.devices_each

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Its shape, in each replica; None if it is not known."""
        return tuple(self._shape) if self._shape.is_fully_defined() else None

    def mark(self) -> None:
        """Marks the handles, so that `find_launch_value` finds this value by them."""
        for handle in self.handles:
            setattr(handle, _MARK, self)

    def unmark(self) -> None:
        """Takes the mark off the handles: they are those of plain variables again."""
        for handle in self.handles:
            vars(handle).pop(_MARK, None)

    def array(self) -> Array:
        """The value on the devices, brought up to date. The caller holds `DeviceGroup.in_flight`."""
        array = self.on_devices
        if not (array is None or self._maybe_written or self._lost or self._devices.interrupted or array.is_deleted()):
            return array  # the fast path: taken between two steps, for each of hundreds of variables
        self._check_there()
        if array is not None and self._maybe_written and not self._host_stale and not self._is_as_on_host():
            self.on_devices = None
        self._maybe_written = False
        if self.on_devices is None:
            self._on_host = array = self._devices.put(self._host_values(), self.axes)
            self.on_devices = array
        return self._present()

    @property
    def _host_stale(self) -> bool:
        """Whether the devices have a newer value than the host."""
        array = self.on_devices
        return array is not None and array is not self._on_host

    def set_array(self, array: Array) -> None:
        """Takes over a value on the devices. The caller holds `DeviceGroup.in_flight`."""
        self.on_devices, self._lost = array, False

    def begin_with(self, array: Array) -> None:
        """Takes over the initial value from the devices; what the host has of it only has its shape."""
        with shutdown.running(), self._devices.in_flight:
            self.set_array(array)
            self._free()

    def invalidate(self) -> None:
        """Marks the value as lost: the program that got the old one, to overwrite it, has failed."""
        self._lost, self.on_devices = True, None

    def launched(self) -> None:
        """Called when the program that wrote the value has ended. The caller holds `DeviceGroup.in_flight`."""
        if self.on_devices is self._on_host:
            return  # it did not write: the launch failed before, and the host has the value
        self._steps += 1
        self._on_host = None  # otherwise the old value would stay in memory
        if self.read_anywhere:
            self.host_reads()
        elif self._to_free and not self._freed:
            self._free()

    def _free(self) -> None:
        """Frees the host's value if it is stale and the host has never read it."""
        with _freeing:
            if self._freed or self._looked_at or self._pins or not self._host_stale:
                return
            self._freed = True  # before the write, since an exception may come at any moment: a freed value is restored
            for handle in self.handles:
                eager.write(handle, np.empty(0, self.dtype.as_numpy_dtype))
            eager.release_arrays()  # or the memory of the last variable would stay until the next conversion
            if self._looked_at:  # a signal handler has just read it
                self._on_host = None

    def leave_pool(self) -> None:
        """Moves a value that the host has just made or written out of TensorFlow's memory pool: room for the next one.

        A value that the host has read stays where it is. The caller holds `DeviceGroup.in_flight`, or nothing else
        knows the variable yet.
        """
        if self._to_free and not self._looked_at:
            host_memory.leave_pool(self.handles, self.dtype)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """Inside, the host's value has the variable's shape, perhaps with zeros: TensorFlow only looks at the shape."""
        with _freeing:
            self._pins += 1
            was_freed = self._freed
            self._restore_shape()
        try:
            yield
        finally:
            with _freeing:
                self._pins -= 1
            if was_freed:
                self._free()

    def _restore_shape(self) -> None:
        if self._freed:
            zeros = host_memory.zeros(tuple(self._shape), np.dtype(self.dtype.as_numpy_dtype))
            for handle in self.handles:
                eager.write(handle, zeros)
            self._freed = False

    def set_values(self, values: Sequence[np.ndarray]) -> None:
        """Gives each replica its own value."""
        with shutdown.running(), self._devices.in_flight:
            self.set_array(self._devices.put(values, self.axes))

    def each_value(self) -> list[np.ndarray]:
        """The value on each replica, as it is on the devices, or on the host if that has the newest value."""
        values = self.on_replicas()
        if values is None:
            self.host_reads()
            values = self._host_values()
        return values * self._devices.size if len(values) == 1 else values

    def host_reads(self) -> None:
        """Brings the host's value up to date, before something reads it."""
        self._note()
        if self._writer != threading.get_ident():
            self._looked_at = True  # before anything else: a step that ends from now on must not free the value
        self._bring_up_to_date()

    def _bring_up_to_date(self) -> None:
        self._check_there()
        if not (self._host_stale or self.loops):
            return
        with shutdown.running(), self._devices.in_flight:
            if not self._host_stale:
                return
            self._tell_of_gather()
            array = self._present()
            if self.spans:
                values = [self._gathered(array)]
            else:
                # Copies: a view of the device's memory would keep the next step from writing to that memory.
                copy = host_memory.outside_pool if self._to_free else np.array
                values = [copy(self._devices.fetch(array, replica, self.shape)) for replica in range(len(self.handles))]
            with _freeing:
                for handle, value in zip(self.handles, values, strict=True):
                    eager.write(handle, value)
                self._freed = False
                self._on_host = self.on_devices

    def parts_here(self) -> list[ValuePart] | None:
        """The parts of a divided value that this process has; None if it is not divided."""
        shape = self.shape
        if self.axes == WHOLE or shape is None or not isinstance(self._devices, partitioned_group.PartitionedGroup):
            return None
        parts = self._devices.parts_here(shape, self.axes)
        return parts if self.spans or len(parts) > 1 else None

    @property
    def spans(self) -> bool:
        """Whether this process may have only some of the parts."""
        return self._devices.spans and self.axes != WHOLE

    def newest(self, keep: Callable[[np.ndarray], np.ndarray], part: ValuePart | None) -> tf.Tensor:
        """The newest value, or a part of it, without a copy that stays on the host.

        Args:
            keep: takes a view of a device's memory, which the next step overwrites, and returns it or a copy. While a
                view lives, a step needs more memory.
            part: one of `parts_here`; None is all of the value, which this process must have.
        """
        self._note()
        self._check_there()
        with shutdown.running(), self._devices.in_flight:
            if not self._host_stale:
                value = eager.read(self.handles[0], self.dtype)
                return value if part is None else value[part.slices]
            array = self._present()
            if part is None:
                found = self._devices.fetch(array, 0, self.shape)
            else:
                assert isinstance(self._devices, partitioned_group.PartitionedGroup), "the value is divided"
                found = self._devices.fetch_part(array, part)
            if not self._devices.has_queue:  # CPUs; from other devices the value comes as a copy
                found = keep(found)
        return eager.tensor_on(np.asarray(found, order="C"))

    def set_parts(self, values: Mapping[ValuePart, np.ndarray]) -> None:
        """Gives all replicas one value. This process has only parts of it, and the host's value becomes stale.

        Args:
            values: the value of each of `parts_here`.
        """
        self._note()
        assert isinstance(self._devices, partitioned_group.PartitionedGroup), "the value is divided"
        with shutdown.running(), self._devices.in_flight:
            self._on_host, self._maybe_written = None, False
            self.set_array(self._devices.put_parts(values, tuple(self._shape), self.axes))
            self._steps += 1
            self._free()

    def host_is_to_write(self) -> None:
        """Brings the host's value up to date for a caller that writes to it: the devices' values become stale."""
        with shutdown.running(), self._devices.in_flight:
            self.host_reads()
            self.on_devices = None

    def host_may_write(self) -> None:
        """Brings the host's value up to date for a caller that may read it or write to it: the next launch compares."""
        with shutdown.running(), self._devices.in_flight:
            self.host_reads()
            self._maybe_written = True

    @contextlib.contextmanager
    def host_writes(self, whole: bool = False) -> Iterator[None]:
        """Inside, the caller reads and writes the host's value, and no step runs.

        Args:
            whole: whether the caller replaces the whole value; then the old one may be lost.
        """
        self._note()
        with shutdown.running(), self._devices.in_flight:
            if not (whole and self._lost):
                with contextlib.suppress(*[LostVariableError] if whole else []):  # lost, but nobody has known
                    self._bring_up_to_date()
            if whole and self._lost:
                with _freeing:
                    self._restore_shape()
            lost, self._lost = self._lost, False
            writer, self._writer = self._writer, threading.get_ident()
            self.on_devices = None  # before the caller writes: an exception may come right after that
            try:
                yield
                lost = self._lost  # the caller has replaced what was lost; a write that fails leaves it lost
            finally:
                self._lost, self._writer = lost, writer
            self.leave_pool()

    def _note(self) -> None:
        note = getattr(_thread, "note", None)
        if note is not None:
            with interrupts.set_for_block(_thread, "note", None):
                note(self)

    def _present(self) -> Array:
        """The value on the devices. A program that fails while it runs deletes it, and a program may never end."""
        array = self.on_devices
        if array.is_deleted():  # type: ignore[union-attr]
            self.invalidate()
        self._check_there()
        try:
            self._devices.wait_for(array, of=self.written_by)
        except ProgramError as failed:
            self.invalidate()
            self._check_there(failed)
        return array

    def _tell_of_gather(self) -> None:
        """Logs, once, that the host is about to have a large variable whole that no device has."""
        size = self.dtype.size * (self._shape.num_elements() or 0)
        if self.axes != WHOLE and size >= _WORTH_A_WORD and not self._told:
            self._told = True
            name = xla_ops.variable_name(self.handles[0])
            _logger.warning(
                f"The variable {name!r} is divided over devices, and is read whole: the host now has its "
                f"{size / 2**30:.1f} GiB too. Saving reads one variable after the other; strategy.layouts() and "
                "strategy.memory() read none."
            )

    def _gathered(self, array: Array) -> tf.Tensor:
        """The array, which all workers put together at the same time."""
        assert isinstance(self._devices, partitioned_group.PartitionedGroup), "the value is divided"
        name = xla_ops.variable_name(self.handles[0])
        what = f"the variable {name!r} after {self._steps} steps"
        into = host_memory.array(self._shape, np.dtype(array.dtype))
        worker_exchange.whole(self._devices, array, self.axes, what, into, self.limits)
        return eager.tensor_on(into)

    def _check_there(self, failed: ProgramError | None = None) -> None:
        if self._lost:
            error = LostVariableError(
                f"The value of the variable {xla_ops.variable_name(self.handles[0])!r} is lost: it was donated to a "
                "compiled program that failed while it ran (out of memory, for example). Assign the variable, or load "
                "a checkpoint."
            )
            if failed is not None:  # Keras shows no error behind another one
                base.add_note(error, str(failed))
            raise error

    def _is_as_on_host(self) -> bool:
        """Whether the devices have the host's value: replica by replica, or replica 0 where all have one value."""
        array, values = self._present(), self._host_values()[: len(self.handles)]
        return all(self._devices.is_equal(array, replica, value, self.axes) for replica, value in enumerate(values))

    def on_replicas(self) -> list[np.ndarray] | None:
        """The value on each replica, or None if all replicas have the same."""
        with shutdown.running(), self._devices.in_flight:
            if self.on_devices is None or self.spread is not None or len(self.handles) == self._devices.size == 1:
                return None
            array = self._present()
            values = [np.array(value) for value in self._devices.fetch_all(array, self.shape)]
        first = values[0].tobytes()
        return None if all(value.tobytes() == first for value in values[1:]) else values

    def _host_values(self) -> list[np.ndarray]:
        values = [eager.read(handle, self.dtype).numpy() for handle in self.handles]
        if self.spread is None:
            return values
        devices = self._devices
        return self.spread(values[0], devices.replicas)[devices.first : devices.first + devices.size]


class Borrowed:
    """The value of a variable that does not live on these devices: it is sent before a launch and fetched after it.

    If the replicas write different values, replica 0's is kept.
    """

    def __init__(self, handle: tf.Tensor, devices: DeviceGroup):
        self._handle = handle
        self._devices = devices
        self._home: DeviceValue | None = getattr(handle, _MARK, None)
        described = xla_ops.variable_dtype_and_shape(handle)
        assert described is not None, "checked when it was captured"
        self._dtype = described[0]
        self._shape = tuple(described[1]) if described[1].is_fully_defined() else None
        self.on_devices: Array | None = None  # what a body wrote, until `launched`
        self.written_by: Computed | None = None  # see `DeviceValue`

    def array(self) -> Array:
        """The value on these devices, sent for this launch; see `DeviceValue.array`."""
        self.launched()  # an exception may have kept the last launch from it
        if self._home is not None:
            self._home.host_reads()
        value = eager.read(self._handle, self._dtype).numpy()
        return self._devices.put([value], find_axes(self._handle, self._devices.mesh))

    def invalidate(self) -> None:
        """Drops the value that a failed program wrote. The variable itself is unchanged."""
        self.on_devices = None

    def launched(self) -> None:
        """Fetches the value that the program wrote, and writes it to the variable; see `DeviceValue.launched`."""
        array = self.on_devices
        if array is None:
            return
        if not array.is_deleted():  # by a program that failed after nothing waited for it any more
            self._devices.wait_for(array, of=self.written_by)
            value = np.array(self._devices.fetch(array, 0, self._shape))
            with contextlib.nullcontext() if self._home is None else self._home.host_writes():
                eager.write(self._handle, value)
        self.on_devices = None


_PATIENCE = 0.5  # seconds; Ctrl-C must end a run within a second


def find_patience(written: Sequence[DeviceValue | Borrowed]) -> float:
    """How long an interrupted launch waits for its program to end: only then can borrowed variables be written."""
    return _PATIENCE if any(isinstance(each, Borrowed) for each in written) else 0.0


def find_device_value(handle: tf.Tensor) -> DeviceValue | None:
    """The value of the variable behind a handle, on whichever devices it lives; None if it lives on the host."""
    return getattr(handle, _MARK, None)


def find_launch_value(handle: tf.Tensor, devices: DeviceGroup) -> DeviceValue | Borrowed:
    """The value of the variable behind a handle, for launches on these devices."""
    value: DeviceValue | None = getattr(handle, _MARK, None)
    return value if value is not None and value._devices is devices else Borrowed(handle, devices)


def find_axes(handle: tf.Tensor, mesh: ReplicaMesh | None) -> Axes:
    """How the value of the variable behind a handle is divided over such a mesh."""
    device_value: DeviceValue | None = getattr(handle, _MARK, None)
    return WHOLE if device_value is None or device_value._devices.mesh != mesh else device_value.axes


def differs_by_replica(handle: tf.Tensor) -> bool:
    """Whether each replica has a value of its own of the variable behind a handle."""
    device_value: DeviceValue | None = getattr(handle, _MARK, None)
    return device_value is not None and (len(device_value.handles) > 1 or device_value.spread is not None)


@contextlib.contextmanager
def pinned(handles: Sequence[tf.Tensor]) -> Iterator[None]:
    """Pins the variables behind handles, on any devices; see `DeviceValue.pinned`."""
    with contextlib.ExitStack() as stack:
        for device_value in filter(None, map(find_device_value, handles)):
            stack.enter_context(device_value.pinned())
        yield
