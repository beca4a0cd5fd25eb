"""Helpers for tests: this library's own tests and yours.

- `check_parity(model, x, y)`: checks whether N replicas compute the same numbers as one device, and shows where not.
- `check_replicas_equal(variables)`: fails if the copies of a variable of a strategy are not bitwise equal.
- `logical_devices(n)`: another name of `replica_engine.logical_devices`.
- `no_leaked_threads()`: fails if a block leaves threads behind.
- `Sequencer`: fixes the order in which threads pass marked places, without sleeping.

TensorFlow and Keras are imported only when a name that needs them is first used.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from replica_engine.process.setup import logical_devices

if TYPE_CHECKING:
    from replica_engine.testing.parity import check_parity
    from replica_engine.testing.parity_report import ParityReport
    from replica_engine.testing.replicas_equal import check_replicas_equal

__all__ = ["ParityReport", "Sequencer", "check_parity", "check_replicas_equal", "logical_devices", "no_leaked_threads"]

_HOME = {"ParityReport": "parity", "check_parity": "parity", "check_replicas_equal": "replicas_equal"}
_STEP = 0.05  # seconds at most between checks: on a busy machine a thread takes some to end
_LOOKS = 5  # at least: on a busy machine one garbage collection may take longer than the grace period


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"replica_engine.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module 'replica_engine.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


@contextlib.contextmanager
def no_leaked_threads(grace: float = 5.0, prefix: str = "replica ") -> Iterator[None]:
    """Fails if replica threads that started in the block still run after it.

    Strategies made in the block must be freed too, because their threads end with them.

    Args:
        grace: the seconds to wait for threads that are about to end.
        prefix: the start of the names of the threads that count; "" counts all threads.

    Raises:
        AssertionError: threads are left; the message names them.

    Example:
        >>> from replica_engine.testing import no_leaked_threads
        >>> with no_leaked_threads():
        ...     pass
    """
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + grace
    looks = 0
    while left := [t for t in threading.enumerate() if t not in before and t.name.startswith(prefix)]:
        looks += 1
        if looks > _LOOKS and time.monotonic() > deadline:
            raise AssertionError(f"threads left behind: {sorted(thread.name for thread in left)}")
        gc.collect(1 if looks == 1 else 2)  # what the block made is young; older objects take many times as long
        left[0].join(_STEP)
        del left


class Sequencer:
    """Makes threads pass marks in one fixed order, whichever thread arrives first.

    Each `pass_(mark)` waits until all earlier marks of the script have been passed. So a test runs one interleaving
    out of many, the same each time, without sleeping.

    Args:
        script: the marks in the required order; each mark is passed once.
        timeout: the seconds to wait for the turn of a mark.

    Example:
        >>> import threading
        >>> from replica_engine.testing import Sequencer
        >>> order, sequencer = [], Sequencer(["b", "a"])
        >>> def first():
        ...     sequencer.pass_("a")
        ...     order.append("a")
        >>> thread = threading.Thread(target=first)
        >>> thread.start()
        >>> order.append("b")
        >>> sequencer.pass_("b")
        >>> thread.join()
        >>> order
        ['b', 'a']
    """

    def __init__(self, script: Sequence[str], timeout: float = 10.0):
        self._script = list(script)
        self._timeout = timeout
        self._next = 0
        self._changed = threading.Condition()

    def pass_(self, mark: str) -> None:
        """Waits for the turn of `mark` and passes it.

        Raises:
            TimeoutError: the turn did not come; the message names the mark that the script waits for.
            ValueError: the mark is not in the script, or was passed before.
        """
        with self._changed:
            if mark not in self._script[self._next :]:
                raise ValueError(f"{mark!r} is not ahead in the script {self._script}")
            if not self._changed.wait_for(lambda: self._script[self._next] == mark, self._timeout):
                raise TimeoutError(f"{mark!r} waits, and the script for {self._script[self._next]!r}")
            self._next += 1
            self._changed.notify_all()
