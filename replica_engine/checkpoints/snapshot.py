"""The values that a save takes, which neither a step nor the user's program changes until they are written.

Values of TensorFlow need no copy: an op that is about to write to a variable whose value somebody holds makes a copy
first. Devices' values are overwritten by the next launch, and on CPUs a value on the host is a view of that memory. So
an asynchronous save copies those, in the call of `save`, before anything else can run. The memory of the copies is kept
for the next save: pages that the operating system gives for the first time take ten times as long as the copy.
"""

from __future__ import annotations

import contextlib
import contextvars

import numpy as np

from replica_engine._tf import variables
from replica_engine.checkpoints.bundle import Row
from replica_engine.process import scoped

_ALIGNMENT = 64  # bytes; TensorFlow would copy an array that is aligned otherwise


class Snapshot:
    """What one save takes.

    Args:
        together: whether all workers save to one path, so that each saves its own parts of divided variables.
        asynchronous: whether steps may run before the values are written.

    Attributes:
        bundles: the rows of each bundle that TensorFlow would write.
        together: see above.
    """

    def __init__(self, together: bool, asynchronous: bool):
        self.bundles: list[list[Row]] = []
        self.together = together
        self._copies = asynchronous
        self._blocks: list[np.ndarray] = []

    def keep(self, view: np.ndarray) -> np.ndarray:
        """The value of a view of a device's memory, as it is now."""
        if not self._copies or not view.nbytes:
            return view
        size = view.nbytes
        block = next((each for each in _free if each.nbytes == size + _ALIGNMENT), None)
        if block is None:
            block = np.empty(size + _ALIGNMENT, np.uint8)
        else:
            _free[:] = (each for each in _free if each is not block)
        self._blocks.append(block)
        begin = -block.ctypes.data % _ALIGNMENT
        copy = block[begin : begin + size].view(view.dtype).reshape(view.shape)
        np.copyto(copy, view)
        return copy

    def release(self) -> None:
        """Forgets the values. A view of devices' memory would keep steps from overwriting it."""
        self.bundles = []
        variables.release_arrays()
        if self._copies:
            _free[:] = self._blocks  # only what the last save has needed


_free: list[np.ndarray] = []
"""Blocks of memory for copies. One save at a time uses them."""

_current: contextvars.ContextVar[Snapshot | None] = contextvars.ContextVar("replica_engine_snapshot", default=None)


def current() -> Snapshot | None:
    """The snapshot that this thread is taking; None outside."""
    return _current.get()


def taking(together: bool, asynchronous: bool) -> contextlib.AbstractContextManager[Snapshot]:
    """Inside, what TensorFlow would write to a checkpoint goes to the snapshot."""
    return scoped.variable(_current, Snapshot(together, asynchronous))
