"""Values of variables on the devices, and who has the newest.

A variable has a value on the host, in one TensorFlow variable or one for each replica, and a value on each
device. A compiled body reads and writes those on the devices, all else those on the host, and each side is
brought up to date only when somebody looks:

- a body that writes makes the host's value stale, and the next look from the host fetches it;
- a write from the host makes the devices' values stale, and the next launch sends it. Where it is not known
  whether the host wrote, the next launch compares.

Both sides are never stale at once. What "a look" and "a write" are is for `host_variable` to say.

Large weights should not take memory on the host that nobody looks at. So until the first look, a value that is stale
there is freed: an empty tensor stands in its place. After it the value stays, since nobody knows when a look is over.
While TensorFlow lowers a body that captures the variable, it is pinned: there is a value of its shape, if not its own.
What was made or written on the host lies outside of TensorFlow's memory pool until then (`host_memory`).
`_freeing` is held while values on the host are freed or come back, and never while anybody waits for a device.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from replica_engine._tf import variables, xla_ops
from replica_engine.errors import LostVariableError
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.xla.state import host_memory

Spread = Callable[[np.ndarray, int], list[np.ndarray]]
"""What each of N replicas gets of a value that the host has one of."""

_MARK = "_replica_engine_device_value"
_LARGE = 1 << 16  # bytes of a value whose memory is worth the op that frees it
_freeing = threading.RLock()  # a signal handler may look, too


class DeviceValue:
    """The value of one variable on the devices of a strategy.

    Args:
        handles: of the variables on the host; a single one where all replicas have one value.
        devices: where the replicas run.
        spread: for a single one, what each replica gets of it; None for the same.

    Attributes:
        read_anywhere: whether somebody reads the host's value without our seeing it, as functions of data sets do.
        loops: how many device loops that write it are going on or about to; their inputs never see it, however early.
        asked: what host functions call to get a handle (`host_graph`); saving a model has to know.
    """

    def __init__(self, handles: Sequence[tf.Tensor], devices: DeviceGroup, spread: Spread | None = None):
        self.handles = list(handles)
        described = xla_ops.variable_dtype_and_shape(self.handles[0])
        assert described is not None, "a variable's handle"
        self.dtype, self._shape = described
        size = self.dtype.size * (self._shape.num_elements() or 0)  # none if it is not known
        self._to_free = size >= _LARGE and not xla_ops.is_host_only(self.dtype)  # once it is stale on the host
        self.asked: weakref.WeakSet = weakref.WeakSet()
        self.spread = spread
        self.read_anywhere = False
        self.loops = 0
        self._devices = devices
        self._array: Array | None = None  # None: the host's value is the newest
        self._host_stale = False
        self._looked_at = False
        self._freed = False
        self._pins = 0
        self._writer: int | None = None  # the thread that is in `host_writes`, which is no look
        self._maybe_written = False
        self._lost = False
        self.mark()

    def mark(self) -> None:
        """Has the handles found to be of this value."""
        for handle in self.handles:
            setattr(handle, _MARK, self)

    def unmark(self) -> None:
        """Has the handles be those of plain variables."""
        for handle in self.handles:
            vars(handle).pop(_MARK, None)

    def array(self) -> Array:
        """The value on the devices, brought up to date. The caller holds `DeviceGroup.in_flight`."""
        array = self._array
        if not (array is None or self._maybe_written or self._lost or self._devices.interrupted or array.is_deleted()):
            return array  # as between one step and the next, for each of hundreds of variables
        self._check_there()
        if self._array is not None and self._maybe_written and not self._host_stale and not self._is_as_on_host():
            self._array = None
        self._maybe_written = False
        if self._array is None:
            self._array = self._devices.put(self._host_values())
        return self._present()

    def set_array(self, array: Array) -> None:
        """A body wrote. The caller holds `DeviceGroup.in_flight`."""
        self._array = array
        self._host_stale, self._lost = True, False

    def invalidate(self) -> None:
        """The program that was to write the value has failed, and the old one was given to it."""
        self._array, self._host_stale, self._lost = None, False, True

    def launched(self) -> None:
        """The program that wrote is done. The caller holds `DeviceGroup.in_flight`."""
        if self.read_anywhere:
            self.host_reads()
        elif self._to_free and not self._freed:
            self._free()

    def _free(self) -> None:
        """Frees the host's value, if it is stale and nobody has looked at it."""
        with _freeing:
            if self._freed or self._looked_at or self._pins or not self._host_stale:
                return
            self._freed = True  # first, since an exception may come at any moment: what counts as freed is sent again
            for handle in self.handles:
                variables.write(handle, np.empty(0, self.dtype.as_numpy_dtype))
            if self._looked_at and self._array is not None:  # by a signal handler, just now
                self._host_stale = True

    def leave_pool(self) -> None:
        """The host's value has just been made or written: makes room for the next one in TensorFlow's memory pool.

        A value that somebody looked at stays where it is. The caller holds `DeviceGroup.in_flight`, or is the only one
        that knows the variable.
        """
        if self._to_free and not self._looked_at:
            host_memory.leave_pool(self.handles, self.dtype)

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        """The host's value is of the variable's shape inside: TensorFlow is about to look at that, and at no more."""
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
                variables.write(handle, zeros)
            self._freed = False

    def set_values(self, values: Sequence[np.ndarray]) -> None:
        """Gives each replica a value of its own."""
        with self._devices.in_flight:
            self.set_array(self._devices.put(values))

    def host_reads(self) -> None:
        """Brings the host's value up to date: somebody is about to look at it."""
        if self._writer != threading.get_ident():
            self._looked_at = True  # before anything is asked: a step that ends from now on must leave the value there
        self._bring_up_to_date()

    def _bring_up_to_date(self) -> None:
        self._check_there()
        if not (self._host_stale or self.loops):
            return
        with self._devices.in_flight:
            if not self._host_stale:
                return
            array = self._present()
            # Copies: a view of the device's memory would keep the next step from writing there.
            copy = host_memory.outside_pool if self._to_free else np.array
            values = [copy(self._devices.fetch(array, replica)) for replica in range(len(self.handles))]
            with _freeing:
                for handle, value in zip(self.handles, values, strict=True):
                    variables.write(handle, value)
                self._host_stale = self._freed = False

    def host_is_to_write(self) -> None:
        """Somebody has got the host's value in hand, and writes to it."""
        with self._devices.in_flight:
            self.host_reads()
            self._array = None

    def host_may_write(self) -> None:
        """Somebody has got the host's value in hand, and may read it, or write to it."""
        with self._devices.in_flight:
            self.host_reads()
            self._maybe_written = True

    @contextlib.contextmanager
    def host_writes(self, whole: bool = False) -> Iterator[None]:
        """The host's value is read and written inside; no step comes between.

        Args:
            whole: whether another value takes the place of this one, which may be lost then.
        """
        with self._devices.in_flight:
            if whole and self._lost:
                with _freeing:
                    self._restore_shape()
            else:
                self._bring_up_to_date()
            lost, self._lost = self._lost, False
            writer, self._writer = self._writer, threading.get_ident()
            try:
                yield
            except BaseException:
                self._lost = lost
                raise
            finally:
                self._writer = writer
            self._array = None
            self.leave_pool()

    def _present(self) -> Array:
        """The value on the devices; a program that fails while it runs takes it along, and one may never end."""
        if self._array.is_deleted():  # type: ignore[union-attr]
            self.invalidate()
        self._check_there()
        self._devices.wait_for(self._array)
        return self._array

    def _check_there(self) -> None:
        if self._lost:
            raise LostVariableError.read(xla_ops.variable_name(self.handles[0]))

    def _is_as_on_host(self) -> bool:
        """Whether the devices still have what the host has; replica by replica, or replica 0 for all."""
        for replica, value in enumerate(self._host_values()[: len(self.handles)]):
            if value.tobytes() != self._devices.fetch(self._array, replica).tobytes():
                return False
        return True

    def on_replicas(self) -> list[np.ndarray] | None:
        """The value on each replica, if they differ."""
        with self._devices.in_flight:
            if self._array is None or self.spread is not None:
                return None
            values = [np.array(value) for value in self._devices.fetch_all(self._present())]
        first = values[0].tobytes()
        return None if all(value.tobytes() == first for value in values[1:]) else values

    def _host_values(self) -> list[np.ndarray]:
        values = [variables.read(handle, self.dtype).numpy() for handle in self.handles]
        return values if self.spread is None else self.spread(values[0], self._devices.size)


class Borrowed:
    """The value of a variable that does not live on these devices: sent before a launch, and fetched after it.

    Replicas that write different values leave that of replica 0.
    """

    def __init__(self, handle: tf.Tensor, devices: DeviceGroup):
        self._handle = handle
        self._devices = devices
        self._home: DeviceValue | None = getattr(handle, _MARK, None)
        described = xla_ops.variable_dtype_and_shape(handle)
        assert described is not None, "checked when it was captured"
        self._dtype = described[0]
        self._written: Array | None = None

    def array(self) -> Array:
        """As `DeviceValue.array`."""
        if self._home is not None:
            self._home.host_reads()
        return self._devices.put([variables.read(self._handle, self._dtype).numpy()])

    def set_array(self, array: Array) -> None:
        """As `DeviceValue.set_array`."""
        self._written = array

    def invalidate(self) -> None:
        """As `DeviceValue.invalidate`; the value at home is as it was."""
        self._written = None

    def launched(self) -> None:
        """As `DeviceValue.launched`."""
        array, self._written = self._written, None
        with contextlib.nullcontext() if self._home is None else self._home.host_writes():
            variables.write(self._handle, np.array(self._devices.fetch(array, 0)))


def home_of(handle: tf.Tensor) -> DeviceValue | None:
    """The value of the variable behind a handle on whichever devices it lives; None if it lives on the host."""
    return getattr(handle, _MARK, None)


def device_value_of(handle: tf.Tensor, devices: DeviceGroup) -> DeviceValue | Borrowed:
    """The value on the devices of the variable behind a handle."""
    device_value = getattr(handle, _MARK, None)
    if device_value is not None and device_value._devices is devices:
        return device_value
    return Borrowed(handle, devices)


@contextlib.contextmanager
def pinned(handles: Sequence[tf.Tensor]) -> Iterator[None]:
    """As `DeviceValue.pinned`, of the variables behind handles that are on any devices."""
    with contextlib.ExitStack() as stack:
        for handle in handles:
            device_value = getattr(handle, _MARK, None)
            if device_value is not None:
                stack.enter_context(device_value.pinned())
        yield
