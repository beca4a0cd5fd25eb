"""Signals that end a training: the step ends, the training saves, and the process ends with a status of its own.

A handler only notes the signal. The training asks at the end of each step whether to stop, and saves on the thread that
trains. A later signal ends the process as if nobody had listened. But a scheduler may send two for one reason: Slurm
sends SIGTERM to the tasks and to srun, which then ends the step, so the tasks get it again. A person who presses Ctrl-C
twice means it, however fast.

Workers of one job must stop at the same step, or those that go on wait for the others. So they compare what they have
heard, all at the same steps: the chief says after how many steps the next comparison is, about a second later. Nothing
is compared in between, and no assumption is made about how far one worker may be ahead.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

EVERY = 1.0  # seconds between two comparisons of workers
_MOST = 1000  # steps between two
_SAME = 10.0  # seconds in which a signal that comes again is the same one
_LAUNCHERS_RESTART_ON = 128  # a shell's status of a process that a signal ended is this plus the number

Exchange = Callable[[str, object], list[Any]]
"""Takes what is exchanged, in words, and a value of this worker; returns those of all, when all have called it."""


class Preemption:
    """Listens to signals while a training runs.

    Args:
        signals: those to listen to.
        exchange: how workers tell each other; None if this process is the only one.
    """

    def __init__(self, signals: Iterable[int], exchange: Exchange | None = None):
        self._signals = [signal.Signals(number) for number in signals]
        self._exchange = exchange
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self._came: int | None = None
        self._came_at = 0.0
        self._step, self._last, self._next = 0, 0, 1
        self._compared = time.monotonic()

    def listen(self) -> None:
        """Takes the place of the handlers of the signals; does nothing on other threads than the main one."""
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if number not in self._before:
                    self._before[number] = signal.signal(number, self._note)

    def stop_listening(self) -> None:
        """Gives the program its handlers back, and sends it a signal that has come and that nothing has answered."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # the program may have set another one meanwhile
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        came, self._came = self._came, None
        if came is not None:
            os.kill(os.getpid(), came)

    def agreed(self) -> signal.Signals | None:
        """The signal for which all workers stop now; None if they go on. All must call it at the end of each step."""
        self._step += 1
        if self._exchange is None:
            return None if self._came is None else signal.Signals(self._came)
        if self._step < self._next:
            return None
        now = time.monotonic()
        each = max(now - self._compared, 1e-6) / (self._step - self._last)
        values = self._exchange("the comparison of signals", [self._came, max(1, min(_MOST, int(EVERY / each)))])
        self._compared, self._last, self._next = now, self._step, self._step + values[0][1]
        came = next((number for number, _ in values if number is not None), None)
        return None if came is None else signal.Signals(came)

    def answered(self) -> None:
        """Says that the training has saved; to be followed by `SystemExit(exit_status(signal))`."""
        self._came = None
        self.stop_listening()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._came is None:
            self._came, self._came_at = number, now
        elif number == signal.SIGINT or now - self._came_at > _SAME:
            self._came = number
            self.stop_listening()  # which asks the handler that was here before


def exit_status(number: int) -> int:
    """The exit status of a process that has saved because of a signal: that of one that the signal has ended.

    It is not 0, so launchers start the job again: `replica-engine launch --max-restarts`, Kubernetes' `OnFailure`.
    """
    return _LAUNCHERS_RESTART_ON + number
