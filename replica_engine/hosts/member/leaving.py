"""The end of a worker whose program has raised: soon, since the others are started again only when it has ended.

With TensorFlow in the process, Python's cyclic collector goes through more than a million objects several times at
exit, which takes a second, and three where the worker was stopped and its memory is cold. The system takes the memory
back anyway.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io

_raised: list[BaseException] = []
_BUFFERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def note_uncaught(error: BaseException) -> None:
    """Notes that an exception ends this process."""
    _raised.append(error)


@atexit.register  # before most others, so that it runs after them
def _spare_the_collector() -> None:
    """Keeps the collector off what lives now. Only the collector would close a file in a cycle, so files are flushed.

    What lives in cycles is not destroyed then; Python promises that of no object at exit.
    """
    if not _raised:
        return
    _raised.clear()
    for each in gc.get_objects():
        if issubclass(type(each), _BUFFERS):  # `isinstance` would ask each object, also those that stand for others
            with contextlib.suppress(OSError, ValueError):  # it is closed, or nobody reads any more
                each.flush()
    gc.freeze()
