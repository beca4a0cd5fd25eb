"""AutoGraph, which makes TensorFlow's operators of the user's Python.

It converts the user's function, leaves library code alone (`artifact`), and tells the user's lines from those that it
generates. The user's exceptions are restored (`as_user_raised`). Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

# ConversionOptions: what AutoGraph converts, and how. Its list of functions to leave alone has these as a key.
from tensorflow.python.autograph.core import converter as _converter

# ControlStatusCtx, Status: set AutoGraph's status; a tf.function that is not converted has the status "disabled".
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx as _ControlStatusCtx
from tensorflow.python.autograph.core.ag_ctx import Status as _Status

# cache_allowlisted: adds a function to the list of those that AutoGraph leaves alone under certain options.
from tensorflow.python.autograph.impl import conversion as _conversion

# _TRANSPILER: keeps converted functions, with the maps from generated lines to the user's lines. The maps in `tf_stack`
# below are gone when an exception has left the converted function.
from tensorflow.python.autograph.impl.api import _TRANSPILER as _transpiler

# _attach_error_metadata: asks an exception for its text; its frame shows which exception that was.
from tensorflow.python.autograph.impl.api import _attach_error_metadata

# `tf.autograph.experimental.do_not_convert` on library code would also switch AutoGraph off for the user's function
# that this code calls. An artifact itself is not converted, but the functions that it calls are.
from tensorflow.python.autograph.impl.api import autograph_artifact as _artifact

# py_func_from_autograph: converts a function as tf.function does.
from tensorflow.python.eager.polymorphic_function import autograph_util as _autograph_util

# _source_mapper_stacks: for each thread, maps from lines of generated code to the user's lines.
from tensorflow.python.util import tf_stack

# StackTraceFilter, StackTraceMapper: change the lines that are kept of each op.
from tensorflow.python.util.tf_stack import StackTraceFilter as _StackTraceFilter
from tensorflow.python.util.tf_stack import StackTraceMapper as _StackTraceMapper

from replica_engine.errors.base import add_note

F = TypeVar("F", bound=Callable)
E = TypeVar("E", bound=BaseException)

_GENERATED = "__autograph_generated_file"  # the start of names of files that AutoGraph generates
_CONVERTED = "outer_factory.<locals>.inner_factory.<locals>.tf__"  # the start of names of converted functions
_HEAD = "in user code:\n\n"  # the start of AutoGraph's messages, and of our notes

# This feature adds name scopes, which nothing here depends on. With it, host functions have options that no
# tf.function has by default, so `float` and `int` are left alone in host functions only.
_HOST_FEATURES = (tf.autograph.experimental.Feature.NAME_SCOPES,)


@functools.cache
def _leave_numbers_alone() -> None:
    options = _converter.ConversionOptions(recursive=True, optional_features=_HOST_FEATURES)
    for number in (float, int):
        _conversion.cache_allowlisted(number, options)


OPERATORS = "ag__"
"""The variable that converted functions close over; it holds AutoGraph's operators."""


def convert(fn: F) -> F:
    """`fn` as converted by AutoGraph if the caller's own function was converted; otherwise `fn` itself."""
    return tf.__internal__.autograph.tf_convert(fn, tf.__internal__.autograph.control_status_ctx())


def is_out_of_play() -> bool:
    """Whether AutoGraph converts nothing here: in eager mode, outside converted functions."""
    return tf.executing_eagerly() and tf.__internal__.autograph.control_status_ctx().status is _Status.UNSPECIFIED


def convert_always(fn: F) -> F:
    """Converts `fn` as tf.function converts its function."""
    return _autograph_util.py_func_from_autograph(fn)


def convert_for_host(fn: F) -> F:
    """Converts `fn` as tf.function converts its function, but leaves `float(x)` and `int(x)` alone.

    AutoGraph would make ops of them, whose results are tensors. On the host they give Python numbers, which the
    function may put in a list or a file. So they raise a TypeError here, as they do without AutoGraph.
    """
    _leave_numbers_alone()
    return _autograph_util.py_func_from_autograph(fn, _HOST_FEATURES)


def as_outside() -> contextlib.AbstractContextManager[Any]:
    """Inside the block, functions are converted as if no caller had set a status for AutoGraph."""
    return _ControlStatusCtx(_Status.UNSPECIFIED)


def artifact(fn: F) -> F:
    """Marks `fn` as library code: AutoGraph does not convert it, but still converts the functions that it calls."""
    return _artifact(fn)


def is_generated(filename: str) -> bool:
    """Whether AutoGraph generated the file."""
    return _GENERATED in filename


def original_location(filename: str, lineno: int, function: str, threads: tuple[int, ...]) -> tuple[str, int, str]:
    """The user's file, line and function for a line that may be in code that AutoGraph generated.

    A function that is defined inside a converted function is converted with it. So the map may belong to the thread
    that called `run`; `threads` are the idents of the threads whose maps are searched.
    """
    for thread in threads:
        for mapper in reversed(tf_stack._source_mapper_stacks.get(thread, ())):
            place = mapper.get_effective_source_map().get((filename, lineno))
            if place is not None:
                return place[0], place[1], place[2] or function
    return filename, lineno, function


def written(filename: str, number: int) -> str:
    """The user's line for a line of generated code, as in a traceback; "" if there is none."""
    line = _written(filename, number) if is_generated(filename) else None
    return "" if line is None else str(line)[2:].replace("\n  ", "\n")


def written_at(filename: str, number: int) -> str:
    """The place of the user's line for a line of generated code, "train.py:12 in step"; "" if there is none."""
    line = _written(filename, number) if is_generated(filename) else None
    return "" if line is None else f"{line.file}:{line.number} in {line.function}"


def first_line(code: CodeType) -> tuple[str, int]:
    """The user's file and first line of a function, also if AutoGraph generated its code."""
    file, first = code.co_filename, code.co_firstlineno
    if is_generated(file):
        for number in (first, first + 1):  # AutoGraph adds a decorator, whose line the user did not write
            line = _written(file, number)
            if line is not None:
                return line.file, line.number
    return file, first


def source_map() -> dict[tuple[str, int], tuple[str, int, str]]:
    """Maps each generated line of the converted functions around this call to the user's file, line and function."""
    known: dict[tuple[str, int], tuple[str, int, str]] = {}
    for mapper in tf_stack._source_mapper_stacks.get(threading.get_ident(), ()):
        known.update(mapper.get_effective_source_map())
    return known


class _LineMaps(_StackTraceMapper):
    """Maps generated lines to the user's on this thread too. The maps of functions converted below it add to these."""

    def __init__(self, known: Mapping[tuple[str, int], tuple[str, int, str]]):
        super().__init__()
        self._known = known

    def get_effective_source_map(self) -> Mapping[tuple[str, int], tuple[str, int, str]]:
        return self._known


class _Hidden(_StackTraceFilter):
    """Leaves files out of the lines that TensorFlow keeps of each op."""

    def __init__(self, files: frozenset[str]):
        super().__init__()
        self._files = files

    def get_filtered_filenames(self) -> frozenset[str]:
        return self._files


@contextlib.contextmanager
def lines_of_ops(known: Mapping[tuple[str, int], tuple[str, int, str]], hidden: frozenset[str]) -> Iterator[None]:
    """Inside the block, ops that this thread makes keep the user's lines, which TensorFlow shows if an op fails.

    Args:
        known: `source_map` of the thread that made the functions: a function that is defined inside a converted one is
            in its generated file.
        hidden: files whose lines say nothing to the user.
    """
    with _LineMaps(known), _Hidden(hidden):
        yield


def as_user_raised(error: E, is_internal: Callable[[str], bool]) -> E:
    """Returns the exception that user code raised, whatever AutoGraph made of it.

    When an exception leaves a converted function, AutoGraph replaces it by a new one with a longer message. If
    AutoGraph cannot build one of the user's type, the new one has another type. This function finds the original, adds
    the user's source lines as a note, and tells AutoGraph to leave the exception alone from here on (`ag_pass_through`;
    the exceptions of this library have that attribute from the start).

    Args:
        error: the exception that left the function.
        is_internal: whether a file does not belong to the user.
    """
    original: Any = error
    while (failed := _whose_text_failed(original)) is not None and failed is not original:  # `__str__` may raise itself
        original = failed
    while _is_copy(original) and isinstance(original.__context__, Exception):
        original = original.__context__
    _name_as_written(original)
    metadata = getattr(error, "ag_error_metadata", None)
    note = "" if metadata is None else metadata.get_message().strip()  # used if no lines are found
    if '  File "' not in note:
        note = ""
    with contextlib.suppress(Exception):  # a failure here must not hide the exception itself
        note = _format_user_lines(original, is_internal) or note
    if note:
        add_note(original, _with_deeper_lines(note, original))
    original.__dict__.pop("ag_error_metadata", None)
    with contextlib.suppress(Exception):  # AutoGraph will change an exception that takes no attributes
        original.ag_pass_through = True
    return original


def _whose_text_failed(error: BaseException) -> BaseException | None:
    """The exception that AutoGraph could not describe, if `error` is what its `__str__` raised then; else None."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is _attach_error_metadata.__code__:
            return frame.f_locals["e"]
    return None


def _name_as_written(error: BaseException) -> None:
    """Calls the function as the user does where Python says that it was called with the wrong arguments."""
    if type(error) is TypeError and error.args and str(error.args[0]).startswith(_CONVERTED):
        error.args = (error.args[0].removeprefix(_CONVERTED), *error.args[1:])


def has_note(error: BaseException) -> bool:
    """Whether an exception has a note of `as_user_raised`."""
    return any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ()))


class _Line(NamedTuple):
    """A line of the user's program."""

    file: str
    number: int
    function: str
    source: str

    def __str__(self) -> str:
        return f'    File "{self.file}", line {self.number}, in {self.function}\n        {self.source.strip()}'


def _format_user_lines(error: BaseException, is_internal: Callable[[str], bool]) -> str:
    """The user's lines that an exception passed through, from the first generated one on; "" if there is none.

    A traceback shows the generated code, whose file is deleted when the process ends.
    """
    lines: list[_Line] = []
    for frame, number in traceback.walk_tb(error.__traceback__):  # TensorFlow breaks extract_tb
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
    """The line that the user wrote, for a line of generated code."""
    with _transpiler._cache_lock:
        converted = [each for factories in _transpiler._cache._cache.values() for each in factories.values()]
    for each in converted:
        if each.module.__file__ == filename:
            origin = each.source_map.get((filename, number))
            if origin is None:
                return None
            file, line = origin.loc.filename, origin.loc.lineno
            if is_generated(file):  # a function inside a converted one, converted separately
                return _written(file, line)
            return _Line(file, line, origin.function_name or "a lambda", origin.source_code_line)
    return None


def _with_deeper_lines(note: str, error: BaseException) -> str:
    """Takes earlier notes of an exception, which are about deeper lines, into `note`, and away from the exception."""
    notes = getattr(error, "__notes__", None)
    for each in [each for each in notes or () if isinstance(notes, list) and each.startswith(_HEAD)]:
        notes.remove(each)  # type: ignore[union-attr]
        deeper = _entries(each)
        note = _HEAD + "\n".join([*(entry for entry in _entries(note) if entry not in deeper), *deeper])
    return note


def _entries(note: str) -> list[str]:
    return re.split(r"\n(?=    File )", note.removeprefix(_HEAD))


def _is_copy(error: BaseException) -> bool:
    """Whether AutoGraph made this exception from the one that it was handling; a user's exception has no such text."""
    if not error.__suppress_context__ or error.__cause__ is not None:
        return False
    with contextlib.suppress(Exception):  # the user's exception may fail to make a text
        return str(error).startswith(_HEAD)
    return False
