"""Makes the exceptions of a run show the user's lines.

The tracebacks contain the user's frames, without the frames of this library and TensorFlow between them. If AutoGraph
converted the function, a note shows the lines that the user wrote, in place of the frames of the generated code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import tensorflow as tf

from replica_engine._tf.graphs import autograph
from replica_engine.diagnostics.graph_errors import name_lines, remove_ours, shorten_text
from replica_engine.diagnostics.user_frames import is_internal, is_plumbing
from replica_engine.errors import ReplicaEngineError

E = TypeVar("E", bound=BaseException)


def as_raised(error: E) -> E:
    """The exception of a function that AutoGraph may have converted, with a note of the user's lines if it did."""
    return autograph.as_user_raised(error, is_internal)


def shortened(error: E, is_hidden: Callable[[str], bool] = is_internal) -> E:
    """Reduces an exception's traceback to the user's frames; without such a frame, it ends at the call of the library.

    TensorFlow filters its tracebacks in the same way. `tf.debugging.disable_traceback_filtering()` switches off both.

    Args:
        error: the exception.
        is_hidden: whether the frames of a file are left out.
    """
    if not tf.debugging.is_traceback_filtering_enabled():
        return error
    if isinstance(error, tf.errors.OpError):
        shorten_text(error, is_hidden)
    frames = []
    frame = error.__traceback__
    in_note = autograph.has_note(error)
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not is_hidden(file) and not (in_note and autograph.is_generated(file)):
            frames.append(frame)
        frame = frame.tb_next
    traceback: TracebackType | None = None
    for each in reversed(frames):
        traceback = TracebackType(traceback, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return error.with_traceback(traceback)  # this also works for exceptions that take no attributes


def shortened_of_graph(error: E, fn: object) -> E:
    """Like `shortened`, for what the call of a `tf.function` raised; it names the user's lines of the ops that failed.

    TensorFlow's own filter has removed its frames, and left in what this library puts around its functions. AutoGraph
    passes the errors of this library on, and so has named no lines of the function.
    """
    if isinstance(error, ReplicaEngineError) and not autograph.has_note(error):
        as_raised(error)
    if tf.debugging.is_traceback_filtering_enabled() and isinstance(error, tf.errors.OpError):
        with contextlib.suppress(Exception):  # a failure here must not hide the exception itself
            name_lines(error, fn)
    return shortened(error, is_plumbing)


def without_ours(error: E) -> E:
    """The error of a `tf.function` in which no replicas run, as TensorFlow raises it without this library.

    TensorFlow's own filter cuts the traceback. The text has the frames of what this library puts around functions.
    """
    if tf.debugging.is_traceback_filtering_enabled() and isinstance(error, tf.errors.OpError):
        remove_ours(error)
    return error
