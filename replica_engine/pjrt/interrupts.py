"""Holding off Ctrl-C while a program is launched.

A launch gives a program the old values of variables and takes the new ones over. An exception between the two would
lose both, and Ctrl-C may raise one anywhere.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from replica_engine.pjrt.group import is_needed_by_a_program


class held_off:
    """Ctrl-C is raised at the end of what runs inside, if it comes while that runs."""

    def __enter__(self) -> None:
        """Python runs signal handlers on the main thread only, so another one has nothing to fear."""
        self._handler: Any = None
        self._came: tuple[int, FrameType | None] | None = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                signal.signal(signal.SIGINT, self._note)
                self._handler = handler

    def __exit__(self, kind: Any, error: BaseException | None, frames: TracebackType | None) -> None:
        """Lets it come again."""
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._came is not None:
                self._handler(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if is_needed_by_a_program():
            # On one device a launch may run the program, and its host calls, right here: the user's code is
            # interrupted as ever, and what it raises is taken care of.
            self._handler(number, frame)
        else:
            self._came = number, frame
