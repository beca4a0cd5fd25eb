"""Exceptions of every kind that a program can raise, the odd ones too.

One kind is left out: those that refuse a `__traceback__`, such as frozen dataclasses. Since Python 3.11 none can pass a
context manager that contextlib makes of a generator, and TensorFlow has many: what comes out of `strategy.scope()`, of
TensorFlow's own strategies too, is another exception, and the scope may stay entered.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import NoReturn

import tensorflow as tf

TEXT = "injected"


class OddConstructor(Exception):
    """One that cannot be made of its message."""

    def __init__(self, code: int, *, reason: str):
        super().__init__()
        self.code, self.reason = code, reason

    def __str__(self) -> str:
        return f"{self.reason} {self.code}"


class NoText(Exception):
    """One that fails when it is printed."""

    def __str__(self) -> str:
        raise RuntimeError("this exception cannot be printed")

    __repr__ = __str__


@dataclasses.dataclass
class Unhashable(Exception):
    """One that is compared by value, and so cannot be put into a set."""

    code: int


class EqualToNothing(Exception):
    """One that fails when it is compared, or asked whether it is true."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("this exception cannot be compared")

    def __bool__(self) -> bool:
        raise RuntimeError("this exception is neither true nor false")

    __hash__ = None  # type: ignore[assignment]


class NoNotes(Exception):
    """One that takes no notes."""

    def add_note(self, note: str) -> None:
        raise RuntimeError("no notes")


class OfItsOwn(BaseException):
    """One that `except Exception` does not see."""


def _recursion() -> NoReturn:
    _recursion()


@tf.autograph.experimental.do_not_convert  # which takes half a minute for so deep a stack
def _real_recursion() -> BaseException:
    """One that the interpreter raised."""
    try:
        _recursion()
    except RecursionError as error:
        return error.with_traceback(None)


def _with_cause() -> BaseException:
    error = OSError(TEXT)
    error.__cause__ = KeyError("its cause")
    return error


def _from_none() -> BaseException:
    """As `raise ... from None` makes it."""
    error = NoText()
    error.__cause__ = None  # which sets __suppress_context__
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
    "no text, from None": _from_none,
    "unhashable dataclass": lambda: Unhashable(5),
    "not comparable": lambda: EqualToNothing(TEXT),
    "refuses notes": lambda: NoNotes(TEXT),
    "BaseException of the user's": lambda: OfItsOwn(TEXT),
    "with a cause": _with_cause,
}
"""How to make one of each kind."""

if sys.version_info >= (3, 11):
    KINDS["exception group"] = lambda: ExceptionGroup(  # noqa: F821 (of Python 3.11)
        TEXT, [ValueError("one"), OSError("two")]
    )

NO_NOTES = ("refuses notes",)
"""Those to which no note can be added."""

NO_TEXT = ("no text", "no text, from None", "not comparable")
"""Those of which no text can be made with their notes in it."""
