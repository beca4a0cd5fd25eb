"""The base of every error, and what their wordings share."""

from __future__ import annotations

import contextlib
import operator
import traceback


class ReplicaEngineError(Exception):
    """Base of every error that this package raises on its own account.

    Every class takes the message and nothing else, and its wordings are class methods: so whoever makes an error anew,
    `type(error)(message)`, as Keras does of what a layer raises, gets one of the same type.

    Example:
        >>> issubclass(MergeCallMismatchError, ReplicaEngineError)
        True
    """

    ag_pass_through = True  # AutoGraph, leave it as it is: another type would hide what it says and holds


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note(note)`, for Python 3.10 too, where tracebacks do not print `__notes__`.

    One that takes none, a frozen dataclass say, goes without: the exception itself is what matters.
    """
    with contextlib.suppress(Exception):
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def in_words(error: BaseException) -> str:
    """An exception as the last line of its traceback; of one that cannot be printed its class."""
    with contextlib.suppress(Exception):
        return "".join(traceback.format_exception_only(error)).strip()
    return f"{type(error).__module__}.{type(error).__qualname__}"


def is_alike(error: BaseException, other: BaseException) -> bool:
    """Whether two exceptions say the same."""
    return type(error) is type(other) and in_words(error) == in_words(other)


def at(where: str) -> str:
    """ " at file:line", or nothing where the line is not known."""
    return f" at {where}" if where else ""


def positive_int(value: object) -> int | None:
    """A positive int, NumPy's and TensorFlow's too; None for anything else, which an error is to be made of."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except Exception:  # tensors of TensorFlow have errors of their own
        return None
    return number if number > 0 else None


def brief(value: object) -> str:
    """A value in a few words, with its type."""
    return f"{type(value).__name__} {shown(value)}"


def shown(value: object) -> str:
    """A value in a few words; also of one that cannot be shown, since the message it is for is about something else."""
    try:
        text = repr(value)
    except Exception as error:
        return f"(its repr raises {type(error).__name__})"
    return text if len(text) < 80 else text[:77] + "..."
