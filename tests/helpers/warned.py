"""The library's warnings, as soon as they come."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def when_warned(does: Callable[[str], Any]) -> Iterator[None]:
    """Calls a function with the text of each warning of the library that comes in the block."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: does(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("replica_engine")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
