"""Who has been waiting for a compiled program, and for how long: a warning where XLA would say nothing.

A launch leaves a note of when it began, and one thread looks at the notes every few seconds. A launch itself
pays for two assignments.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from replica_engine.errors import slow_program

WARN_AFTER = 30.0  # seconds, and again after as many
_LOOK_EVERY = 5.0  # seconds

_waiting: dict[int, tuple[float, str, int]] = {}  # by thread: since when, for what, on how many replicas
_lock = threading.Lock()
_logger = logging.getLogger("replica_engine")
_watcher: threading.Thread | None = None


@contextlib.contextmanager
def waiting_for(name: str, replicas: int) -> Iterator[None]:
    """The calling thread waits for a program inside."""
    if _watcher is None:
        _start()
    ident = threading.get_ident()
    _waiting[ident] = (time.monotonic(), name, replicas)
    try:
        yield
    finally:
        del _waiting[ident]


def _start() -> None:
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="replica_engine: slow programs", daemon=True)
            _watcher.start()


def _watch() -> None:
    warned: dict[tuple[int, float], int] = {}
    while True:
        time.sleep(_LOOK_EVERY)
        now = time.monotonic()
        for ident, (since, name, replicas) in list(_waiting.items()):
            times = int((now - since) / WARN_AFTER)
            if times > warned.get((ident, since), 0):
                warned = {(ident, since): times}
                _logger.warning(slow_program(name, replicas, now - since))
