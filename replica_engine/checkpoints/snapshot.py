"""The values that a save takes, in memory that neither a step nor the user's program can change.

A launch overwrites the memory of variables, and on CPUs a value on the host may be a view of that memory. So an
asynchronous save copies, in the call of `save`, before anything else can run. The memory of the copies is kept for the
next save: pages that the operating system gives for the first time take ten times as long as the copy.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from replica_engine._tf import variables
from replica_engine.checkpoints.bundle import Row

_ALIGNMENT = 64  # bytes; TensorFlow would copy an array that is aligned otherwise
_NOT_NUMBERS = (tf.string, tf.variant, tf.resource)


class Snapshot:
    """What one save takes.

    Attributes:
        bundles: the rows of each bundle that TensorFlow would write.
        together: whether all workers save to one path, so that each saves its own parts of divided variables.
    """

    def __init__(self, together: bool):
        self.bundles: list[list[Row]] = []
        self.together = together

    def keep(self) -> None:
        """Copies the values, so that they stay what they are. They live until the next `keep` of any snapshot."""
        rows = [row for bundle in self.bundles for row in bundle]
        arrays = [None if row.value.dtype in _NOT_NUMBERS else np.asarray(row.value) for row in rows]
        room = iter(_memory.rooms([0 if array is None else array.nbytes for array in arrays]))
        kept = []
        for row, array in zip(rows, arrays, strict=True):
            own = next(room)
            if array is not None and array.nbytes:
                copy = own.view(array.dtype).reshape(array.shape)
                np.copyto(copy, array)
                row = row._replace(value=variables.tensor_on(copy))
            kept.append(row)
        each = iter(kept)
        self.bundles = [[next(each) for _ in bundle] for bundle in self.bundles]

    def release(self) -> None:
        """Forgets the values. On CPUs they may be views of devices' memory, which a step could not overwrite."""
        self.bundles = []
        variables.release_arrays()


_current: contextvars.ContextVar[Snapshot | None] = contextvars.ContextVar("replica_engine_snapshot", default=None)


def current() -> Snapshot | None:
    """The snapshot that this thread is taking; None outside."""
    return _current.get()


@contextlib.contextmanager
def taking(together: bool) -> Iterator[Snapshot]:
    """Inside, what TensorFlow would write to a checkpoint goes to the snapshot."""
    snapshot = Snapshot(together)
    token = _current.set(snapshot)
    try:
        yield snapshot
    finally:
        _current.reset(token)


class _Memory:
    """One block of bytes, as large as the last snapshot."""

    def __init__(self) -> None:
        self._block = np.empty(0, np.uint8)
        self._using = threading.Lock()

    def rooms(self, sizes: Sequence[int]) -> list[np.ndarray]:
        """A view of the block for each size."""
        padded = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        needed = sum(padded) + _ALIGNMENT
        with self._using:
            if not needed <= self._block.nbytes <= 2 * needed:
                self._block = np.empty(0, np.uint8)  # before the new one: never both
                self._block = np.empty(needed, np.uint8)
            block = self._block
        places = np.cumsum([-block.ctypes.data % _ALIGNMENT, *padded])
        return [block[place : place + size] for place, size in zip(places[:-1], sizes, strict=True)]


_memory = _Memory()
