"""Exceptions of every kind that a program can raise, including unusual ones.

One kind is left out: exceptions that refuse a `__traceback__`, such as frozen dataclasses. They cannot pass through a
context manager that contextlib makes from a generator, and TensorFlow has many of those: another exception leaves
`strategy.scope()`, also with TensorFlow's own strategies, and the scope may stay entered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NoReturn

import tensorflow as tf

TEXT = "injected"


class OddConstructor(Exception):
    """An exception that cannot be made from its message."""

    def __init__(self, code: int, *, reason: str):
        super().__init__()
        self.code, self.reason = code, reason

    def __str__(self) -> str:
        return f"{self.reason} {self.code}"


class NoText(Exception):
    """An exception that raises when it is printed."""

    def __str__(self) -> str:
        raise RuntimeError("this exception cannot be printed")

    __repr__ = __str__


@dataclasses.dataclass
class Unhashable(Exception):
    """An exception that is compared by value, so it cannot be in a set."""

    code: int


class EqualToNothing(Exception):
    """An exception that raises when it is compared or converted to bool."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("this exception cannot be compared")

    def __bool__(self) -> bool:
        raise RuntimeError("this exception is neither true nor false")

    __hash__ = None  # type: ignore[assignment]


class NoNotes(Exception):
    """An exception that refuses notes."""

    def add_note(self, note: str) -> None:
        raise RuntimeError("no notes")


class OfItsOwn(BaseException):
    """An exception that `except Exception` does not catch."""


def _recursion() -> NoReturn:
    _recursion()


@tf.autograph.experimental.do_not_convert  # converting a stack this deep takes half a minute
def _real_recursion() -> BaseException:
    """An exception that the interpreter raises."""
    try:
        _recursion()
    except RecursionError as error:
        return error.with_traceback(None)


def _raised_from(error: BaseException, cause: BaseException | None) -> BaseException:
    """An exception as `raise ... from` leaves it."""
    error.__cause__ = cause  # which sets __suppress_context__
    return error


KINDS: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError(TEXT),
    "odd constructor": lambda: OddConstructor(7, reason=TEXT),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(TEXT),
    "SystemExit": lambda: SystemExit(3),
    "MemoryError": lambda: MemoryError(TEXT),
    "StopIteration": lambda: StopIteration(TEXT),
    "StopAsyncIteration": lambda: StopAsyncIteration(TEXT),
    "GeneratorExit": lambda: GeneratorExit(TEXT),
    "RecursionError": _real_recursion,
    "ResourceExhaustedError": lambda: tf.errors.ResourceExhaustedError(None, None, TEXT),
    "OutOfRangeError": lambda: tf.errors.OutOfRangeError(None, None, TEXT),
    "no text": NoText,
    "no text, from None": lambda: _raised_from(NoText(), None),
    "unhashable dataclass": lambda: Unhashable(5),
    "not comparable": lambda: EqualToNothing(TEXT),
    "refuses notes": lambda: NoNotes(TEXT),
    "BaseException of the user's": lambda: OfItsOwn(TEXT),
    "with a cause": lambda: _raised_from(OSError(TEXT), KeyError("its cause")),
    "exception group": lambda: ExceptionGroup(TEXT, [ValueError("one"), OSError("two")]),
}
"""For each kind, a function that makes an exception."""

NO_NOTES, NO_TEXT = ("refuses notes",), ("no text", "no text, from None", "not comparable")
"""The kinds that refuse notes, and those whose text with notes cannot be made."""
