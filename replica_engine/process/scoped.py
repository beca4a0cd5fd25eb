"""A value for the time of a `with` block; the one before it comes back however the block ends.

Generators, although classes were faster: an exception of a signal may come before the first line of `__exit__`, and
then Python still ends the generator, which restores the value.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def attribute(owner: object, name: str, value: T) -> Iterator[T]:
    """Inside, an attribute has a value, which the block gets; afterwards the one before, or None if there was none.

    Args:
        owner: the object, such as a `threading.local`.
        name: the attribute.
        value: its value.
    """
    before = getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield value
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def variable(which: contextvars.ContextVar[Any], value: T) -> Iterator[T]:
    """Inside, a context variable has a value, which the block gets."""
    token = which.set(value)
    try:
        yield value
    finally:
        which.reset(token)
