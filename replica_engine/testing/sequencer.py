"""Scripted interleavings: threads pass marked places in the order that a test defines."""

from __future__ import annotations

import threading
from collections.abc import Sequence


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
