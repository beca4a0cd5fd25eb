"""A value for the time of a `with` block; the one before it comes back however the block ends.

No generators: these blocks are around each step, and an interrupt has no line more to come at than in a `finally`.
"""

from __future__ import annotations

import contextvars
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class attribute(Generic[T]):
    """Inside, an attribute has a value, which the block gets; afterwards the one before, or None if there was none.

    Args:
        owner: the object, such as a `threading.local`.
        name: the attribute.
        value: its value.
    """

    __slots__ = ("_before", "_name", "_owner", "_value")

    def __init__(self, owner: object, name: str, value: T):
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> T:
        self._before = getattr(self._owner, self._name, None)
        setattr(self._owner, self._name, self._value)
        return self._value

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._before)


class variable(Generic[T]):
    """Inside, a context variable has a value, which the block gets."""

    __slots__ = ("_token", "_value", "_which")

    def __init__(self, which: contextvars.ContextVar[Any], value: T):
        self._which, self._value = which, value

    def __enter__(self) -> T:
        self._token = self._which.set(self._value)
        return self._value

    def __exit__(self, *_: object) -> None:
        self._which.reset(self._token)
