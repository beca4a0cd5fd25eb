"""The base of every error, and what their wordings share."""

from __future__ import annotations

import contextlib
from typing import Any


class ReplicaEngineError(Exception):
    """Base of every error that this package raises on its own account.

    Example:
        >>> issubclass(MergeCallMismatchError, ReplicaEngineError)
        True
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # Most of these build their message from other arguments, and could not be made again of it.
        return _rebuild, (type(self), self.args, self.__dict__)

    ag_pass_through = True  # AutoGraph, leave it as it is: another type would hide what it says and holds


def _rebuild(kind: type[ReplicaEngineError], args: tuple[Any, ...], state: dict[str, Any]) -> ReplicaEngineError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note(note)`, for Python 3.10 too, where tracebacks do not print `__notes__`.

    One that takes no attributes, a frozen dataclass say, goes without: the exception itself is what matters.
    """
    with contextlib.suppress(AttributeError, TypeError):
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:
            error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


def at(where: str) -> str:
    """ " at file:line", or nothing where the line is not known."""
    return f" at {where}" if where else ""


def brief(value: object) -> str:
    """A value in a few words."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) < 80 else text[:77] + '...'}"
