"""AutoGraph: converting the user's function, leaving ours alone, and keeping a user's exception whole.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import linecache
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

# ControlStatusCtx, Status: sets that status; a tf.function that is not converted has it switched off.
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx as _ControlStatusCtx
from tensorflow.python.autograph.core.ag_ctx import Status as _Status

# AutoGraph's status on this thread: whether the caller's own function was converted.
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx as _control_status

# `tf.autograph.experimental.do_not_convert` on library code would switch AutoGraph off for the user's
# function that it calls as well; an artifact is left alone, and what it calls is still converted.
from tensorflow.python.autograph.impl.api import autograph_artifact as _artifact

# tf.function stops converting at library code, so whoever calls the user's function converts it.
from tensorflow.python.autograph.impl.api import tf_convert as _tf_convert

# py_func_from_autograph: how tf.function has its function converted.
from tensorflow.python.eager.polymorphic_function.autograph_util import (
    py_func_from_autograph as _py_func_from_autograph,
)

# _source_mapper_stacks: for each thread, how lines of generated code map to the user's own.
from tensorflow.python.util import tf_stack

from replica_engine.errors import add_note

F = TypeVar("F", bound=Callable)

_GENERATED = "__autograph_generated_file"  # how AutoGraph names its files

OPERATORS = "ag__"
"""The variable that converted functions close over: AutoGraph's operators."""


def convert(fn: F) -> F:
    """`fn` as AutoGraph converts it, if the caller's own function was converted."""
    return _tf_convert(fn, _control_status())


def convert_always(fn: F) -> F:
    """`fn` as tf.function converts what it is given."""
    return _py_func_from_autograph(fn)


def as_outside() -> contextlib.AbstractContextManager[Any]:
    """What is converted inside is so as if nobody around had asked for anything."""
    return _ControlStatusCtx(_Status.UNSPECIFIED)


def artifact(fn: F) -> F:
    """Marks `fn` as library code: AutoGraph calls it as it is, and still converts what it calls."""
    return _artifact(fn)


def is_generated(filename: str) -> bool:
    """Whether a file holds code that AutoGraph generated."""
    return _GENERATED in filename


def original_location(filename: str, lineno: int, function: str, threads: tuple[int, ...]) -> tuple[str, int, str]:
    """The user's file, line and function for a line that may be in code that AutoGraph generated.

    A function defined in another that was converted was converted with it, so the map may be the one of the
    thread that called `run`: `threads` are those to ask.
    """
    for thread in threads:
        for mapper in reversed(tf_stack._source_mapper_stacks.get(thread, ())):
            place = mapper.get_effective_source_map().get((filename, lineno))
            if place is not None:
                return place[0], place[1], place[2] or function
    return filename, lineno, function


def source_map() -> dict[tuple[str, int], tuple[str, int, str]]:
    """For lines of code that AutoGraph generated for functions around here: the user's file, line and function."""
    known: dict[tuple[str, int], tuple[str, int, str]] = {}
    for mapper in tf_stack._source_mapper_stacks.get(threading.get_ident(), ()):
        known.update(mapper.get_effective_source_map())
    return known


def as_user_raised(error: Exception, threads: tuple[int, ...]) -> Exception:
    """The exception that the user raised, whatever AutoGraph made of it on its way out.

    AutoGraph replaces an exception that leaves a converted function by a new one with a longer message,
    and gives it another type when it cannot build one of the user's. Here the original is dug out, the
    message with the user's own source lines becomes a note, and AutoGraph is told to leave it alone from
    here on (`ag_pass_through`). `threads` are those of `original_location`.
    """
    original = error
    while _is_copy(original) and isinstance(original.__context__, Exception):
        original = original.__context__
    metadata = getattr(error, "ag_error_metadata", None)
    note = _mapped_frames(original, threads) if metadata is None else metadata.get_message().strip()
    if note:
        add_note(original, note)
    original.__dict__.pop("ag_error_metadata", None)
    try:
        original.ag_pass_through = True  # type: ignore[attr-defined]
    except AttributeError:
        return original  # A frozen one: AutoGraph will change its message and perhaps its type.
    return original


def _mapped_frames(error: Exception, threads: tuple[int, ...]) -> str:
    """The user's lines that an exception went through in generated code, as AutoGraph would list them."""
    lines = []
    for frame, lineno in traceback.walk_tb(error.__traceback__):
        generated = frame.f_code.co_filename
        filename, line, function = original_location(generated, lineno, frame.f_code.co_name, threads)
        if filename != generated:
            source = linecache.getline(filename, line).strip()
            lines.append(f'    File "{filename}", line {line}, in {function}\n        {source}')
    return "\n".join(["in user code:", "", *lines]) if lines else ""


def _is_copy(error: BaseException) -> bool:
    """Whether AutoGraph made it of the exception that it was handling. What a user raises says no such thing."""
    return error.__suppress_context__ and error.__cause__ is None and str(error).startswith("in user code:")
