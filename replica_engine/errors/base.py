"""The base class of the package's errors, and helpers that their wordings share."""

from __future__ import annotations

import contextlib
import difflib
import operator
import traceback
from collections.abc import Sequence

_MORE = "more: errors/"
_SITE = "in the site that `make docs` builds"


class ReplicaEngineError(Exception):
    """Base class of the errors that this package raises.

    The constructor of each subclass takes the message only. So code that copies an error as `type(error)(message)` gets
    an error of the same type. Keras does so with an exception that a layer raises. A message stands where it is raised.
    One that several places raise is a class method. The first note of an error names the page of its class, which is
    there once the site is built, and its docstring, which always is.

    Example:
        >>> issubclass(MergeCallMismatchError, ReplicaEngineError)
        True
    """

    ag_pass_through = True  # tells AutoGraph to raise it unchanged: a new exception would lose the type and attributes

    def __init__(self, *args: object):
        # A note and not a part of the text: code that copies an error as `type(error)(str(error))` would add it again.
        super().__init__(*args)
        name = type(self).__name__
        add_note(self, f"{_MORE}{name}.html {_SITE}, or help(replica_engine.errors.{name})")


def warning(name: str, text: str) -> str:
    """The text of a warning, with a last line that names its part of the documentation."""
    return f"{text}\n{_MORE}warnings.html#{name} {_SITE}"


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception, as `error.add_note(note)` does.

    An exception that accepts no note (a frozen dataclass, for example) stays without it: this function never raises,
    because the exception matters more than its note.
    """
    with contextlib.suppress(Exception):
        error.add_note(note)


def in_words(error: BaseException) -> str:
    """An exception as the last lines of its traceback, or the name of its class if the exception cannot be printed.

    Without the note that says where to read more: the text becomes a part of another message.
    """
    with contextlib.suppress(Exception):
        lines = "".join(traceback.format_exception_only(error)).strip().split("\n")
        return "\n".join(line for line in lines if not line.startswith(_MORE))
    return f"{type(error).__module__}.{type(error).__qualname__}"


def is_alike(error: BaseException, other: BaseException) -> bool:
    """Whether two exceptions have the same type and the same text."""
    return type(error) is type(other) and in_words(error) == in_words(other)


def at(where: str) -> str:
    """ " at file:line", or "" if the line is unknown."""
    return f" at {where}" if where else ""


def as_int(value: object) -> int | None:
    """A value as an int, or None if it is not one; the caller then raises an error.

    Integers of NumPy and TensorFlow count as ints.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # not only TypeError: TensorFlow's tensors raise exceptions of TensorFlow's own types
        return None


def positive_int(value: object) -> int | None:
    """A value as a positive int, or None if it is not one. Bools do not count as ints here."""
    number = None if isinstance(value, bool) else as_int(value)
    return number if number is not None and number > 0 else None


_OTHER_WORDS = {"AVG": "MEAN", "AVERAGE": "MEAN", "ADD": "SUM", "TOTAL": "SUM", "MAXIMUM": "MAX", "MINIMUM": "MIN"}


def meant_reduction(given: object, known: Sequence[str], stacked: str) -> str:
    """What to write instead of an unknown reduction, as a sentence; "" if nothing is near.

    Args:
        given: the reduction that the user asked for.
        known: the names of the reductions that are possible.
        stacked: an expression for one tensor with the values of all replicas, whose maximum or minimum can be taken.
    """
    asked = str(getattr(given, "value", given)).upper()
    asked = _OTHER_WORDS.get(asked, asked)
    near = difflib.get_close_matches(asked, known, n=1)
    if near:
        return f' Write "{near[0]}".'
    if asked in ("MAX", "MIN"):
        return f" Write tf.reduce_{asked.lower()}({stacked}, axis=0)."
    return ""


def byte_size(number: int) -> str:
    """A number of bytes as text, with a binary unit: "8 GiB"."""
    size = float(number)
    units = ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.4g} {units[0]}"


def brief(value: object) -> str:
    """The type of a value, and a short form of its repr."""
    return f"{type(value).__name__} {shown(value)}"


def shown(value: object) -> str:
    """The repr of a value, cut to 80 characters.

    Never raises: if the repr fails, the text says so. The message that contains this text reports another problem,
    which must not be lost.
    """
    try:
        text = repr(value)
    except Exception as error:  # of the user's class
        return f"(its repr raises {type(error).__name__})"
    return text if len(text) < 80 else text[:77] + "..."


def plural(number: int, what: str) -> str:
    """A number with its noun: "1 merge call", "2 merge calls"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
