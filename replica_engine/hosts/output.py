"""What the launcher prints, wherever it goes: an output that is closed, or a full disk behind it, ends no job.

Lines that cannot be written are counted, and the other output says how many. Every write is tried again, since a disk
may have room again. Nothing is kept in a buffer, which could be neither written nor thrown away later. Only a pipe that
nobody reads any more is the caller's matter: `BrokenPipeError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from typing import TextIO

from replica_engine.errors.timeouts import count_of


class Output:
    """One of the standard outputs of this process.

    Args:
        descriptor: its number: 1 or 2.
        name: what it is called in messages.
        program: what messages begin with.
    """

    def __init__(self, descriptor: int, name: str, program: str):
        self._descriptor = descriptor
        self._name, self._program = name, program
        self._other: Output | None = None
        self._lost = 0  # lines
        self._is_cut = False  # in the middle of a line
        self._is_unread = False
        self._reason = ""

    def write(self, data: bytes) -> None:
        """Writes whole lines, or counts them as lost.

        Raises:
            BrokenPipeError: nobody reads any more; raised once, and what comes then is dropped.
        """
        if self._is_unread:
            return
        left = memoryview(b"\n" + data if self._is_cut else data)
        try:
            while left:
                left = left[self._written(left) :]
            self._is_cut = False
        except BrokenPipeError:
            self._is_unread = True
            raise
        except OSError as error:
            # Without the end of a line that is counted already.
            self._lost += bytes(left[max(0, len(left) - len(data)) :]).count(b"\n")
            self._is_cut |= 0 < len(left) < len(data)
            if not self._reason:
                self._reason = "it is closed" if error.errno == errno.EBADF else error.strerror or str(error)
                self._tell(f"{self._name} cannot be written: {self._reason}. The workers go on.")

    def end(self) -> None:
        """Tells how much was lost."""
        if self._lost:
            lines = count_of(self._lost, "line")
            self._tell(f"{lines} could not be written to {self._name}: {self._reason}")

    def _written(self, data: memoryview) -> int:
        try:
            return os.write(self._descriptor, data)
        except BlockingIOError:  # another program has made it so
            select.select([], [self._descriptor], [])
            return 0

    def _tell(self, text: str) -> None:
        if self._other is not None:
            self._other.write(f"{self._program}: {text}\n".encode())


def outputs(program: str) -> tuple[Output, Output]:
    """The standard output and the standard error of this process.

    Args:
        program: what their messages about each other begin with.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # it is closed: a socket would get this number, and what something prints would go there
            os.open(os.devnull, os.O_RDONLY)  # writing to it fails as to one that is closed
    out = Output(_descriptor(sys.stdout, 1), "standard output", program)
    err = Output(_descriptor(sys.stderr, 2), "standard error", program)
    out._other, err._other = err, out
    return out, err


def _descriptor(stream: TextIO | None, usual: int) -> int:
    with contextlib.suppress(OSError, ValueError):  # it has no descriptor, as those of notebooks
        if stream is not None:
            stream.flush()
            return stream.fileno()
    return usual
