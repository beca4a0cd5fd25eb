"""AutoGraph: converting the user's function, leaving ours alone, and keeping a user's exception whole.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import linecache
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

# ControlStatusCtx, Status: sets that status; a tf.function that is not converted has it switched off.
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx as _ControlStatusCtx
from tensorflow.python.autograph.core.ag_ctx import Status as _Status

# AutoGraph's status on this thread: whether the caller's own function was converted.
from tensorflow.python.autograph.core.ag_ctx import control_status_ctx as _control_status

# _TRANSPILER: keeps what it converted, with the maps from generated lines to the user's; those in `tf_stack` below are
# gone when an exception has left the converted function.
from tensorflow.python.autograph.impl.api import _TRANSPILER as _transpiler

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
E = TypeVar("E", bound=BaseException)

_GENERATED = "__autograph_generated_file"  # how AutoGraph names its files
_HEAD = "in user code:\n\n"  # how the messages begin that AutoGraph makes, and our notes

OPERATORS = "ag__"
"""The variable that converted functions close over: AutoGraph's operators."""


def convert(fn: F) -> F:
    """`fn` as AutoGraph converts it, if the caller's own function was converted."""
    return _tf_convert(fn, _control_status())


def is_out_of_play() -> bool:
    """Whether functions are called as they are: this is eager mode, and no converted function is around."""
    return tf.executing_eagerly() and _control_status().status is _Status.UNSPECIFIED


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


def as_user_raised(error: E, is_internal: Callable[[str], bool]) -> E:
    """The exception that was raised, whatever AutoGraph made of it on its way out.

    AutoGraph replaces an exception that leaves a converted function by a new one with a longer message,
    and gives it another type when it cannot build one of the user's. Here the original is dug out, the
    user's own source lines become a note, and AutoGraph is told to leave it alone from here on
    (`ag_pass_through`; our own errors say so from the start). `is_internal` says which files are not the user's.
    """
    original: Any = error
    while _is_copy(original) and isinstance(original.__context__, Exception):
        original = original.__context__
    metadata = getattr(error, "ag_error_metadata", None)
    note = "" if metadata is None else metadata.get_message().strip()  # where there are no lines
    with contextlib.suppress(Exception):  # the exception itself is what matters
        note = _lines_of(original, is_internal) or note
    if note:
        _forget_parts_of(note, original)
        add_note(original, note)
    original.__dict__.pop("ag_error_metadata", None)
    with contextlib.suppress(Exception):  # of one that takes no attributes AutoGraph will change message and type
        original.ag_pass_through = True
    return original


class _Line(NamedTuple):
    """A line of the user's program."""

    file: str
    number: int
    function: str
    source: str

    def __str__(self) -> str:
        return f'    File "{self.file}", line {self.number}, in {self.function}\n        {self.source.strip()}'


def _lines_of(error: BaseException, is_internal: Callable[[str], bool]) -> str:
    """The user's lines that an exception went through, from the first in generated code on; "" if there is none.

    Tracebacks show the generated code, in a file that is deleted when the process ends.
    """
    lines: list[_Line] = []
    for frame, number in traceback.walk_tb(error.__traceback__):  # not extract_tb: TensorFlow mixes up what it goes by
        code = frame.f_code
        line: _Line | None = None
        if is_generated(code.co_filename):
            line = _written(code.co_filename, number)
        elif lines and not is_internal(code.co_filename):
            line = _Line(code.co_filename, number, code.co_name, linecache.getline(code.co_filename, number))
        if line is not None and lines[-1:] != [line]:
            lines.append(line)
    return _HEAD + "\n".join(str(line) for line in lines) if lines else ""


def _written(filename: str, number: int) -> _Line | None:
    """What the user wrote, for a line of generated code."""
    with _transpiler._cache_lock:
        converted = [each for factories in _transpiler._cache._cache.values() for each in factories.values()]
    for each in converted:
        if each.module.__file__ == filename:
            origin = each.source_map.get((filename, number))
            if origin is None:
                return None
            file, line = origin.loc.filename, origin.loc.lineno
            if is_generated(file):  # of a function in a converted one, converted by itself
                return _written(file, line)
            return _Line(file, line, origin.function_name or "a lambda", origin.source_code_line)
    return None


def _forget_parts_of(note: str, error: BaseException) -> None:
    """Takes away what was noted on the way here, which `note` has as its last lines."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [each for each in notes if not (each.startswith(_HEAD) and note.endswith(each[len(_HEAD) :]))]


def _is_copy(error: BaseException) -> bool:
    """Whether AutoGraph made it of the exception that it was handling. What a user raises says no such thing."""
    if not error.__suppress_context__ or error.__cause__ is not None:
        return False
    with contextlib.suppress(Exception):  # the user's may have no text
        return str(error).startswith(_HEAD)
    return False
