"""AutoGraph: converting the user's function, leaving ours alone, and keeping a user's exception whole.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

# AutoGraph's status on this thread: whether the caller's own function was converted.
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx as _control_status

# `tf.autograph.experimental.do_not_convert` on library code would switch AutoGraph off for the user's
# function that it calls as well; an artifact is left alone, and what it calls is still converted.
from tensorflow.python.autograph.impl.api import autograph_artifact as _artifact

# tf.function stops converting at library code, so whoever calls the user's function converts it.
from tensorflow.python.autograph.impl.api import tf_convert as _tf_convert

# _source_mapper_stacks: for each thread, how lines of generated code map to the user's own.
from tensorflow.python.util import tf_stack

from replica_engine.errors import add_note

F = TypeVar("F", bound=Callable)


def convert(fn: F) -> F:
    """`fn` as AutoGraph converts it, if the caller's own function was converted."""
    return _tf_convert(fn, _control_status())


def artifact(fn: F) -> F:
    """Marks `fn` as library code: AutoGraph calls it as it is, and still converts what it calls."""
    return _artifact(fn)


def original_location(filename: str, lineno: int, function: str, thread: int) -> tuple[str, int, str]:
    """The user's file, line and function for a line that may be in code that AutoGraph generated.

    `thread` identifies the thread that is at that line.
    """
    mappers = tf_stack._source_mapper_stacks.get(thread)
    if not mappers:
        return filename, lineno, function
    return mappers[-1].get_effective_source_map().get((filename, lineno), (filename, lineno, function))


def as_user_raised(error: Exception) -> Exception:
    """The exception that the user raised, whatever AutoGraph made of it on its way out.

    AutoGraph replaces an exception that leaves a converted function by a new one with a longer message,
    and gives it another type when it cannot build one of the user's. Here the original is dug out, the
    message with the user's own source lines becomes a note, and AutoGraph is told to leave it alone from
    here on (`ag_pass_through`).
    """
    original = error
    metadata = getattr(error, "ag_error_metadata", None)
    if metadata is not None:
        while hasattr(original.__context__, "ag_error_metadata"):
            original = original.__context__  # type: ignore[assignment]
        add_note(original, metadata.get_message().strip())
        del original.ag_error_metadata  # type: ignore[attr-defined]
    original.ag_pass_through = True  # type: ignore[attr-defined]
    return original
