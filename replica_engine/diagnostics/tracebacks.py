"""What a run raises: the user's exception, with the user's lines.

Tracebacks have the user's frames, without the library's and TensorFlow's between them. Where AutoGraph converted the
function, they show the generated code, and a note has the lines that the user wrote.
"""

from __future__ import annotations

from types import TracebackType
from typing import TypeVar

import tensorflow as tf

from replica_engine._tf import autograph
from replica_engine.diagnostics.user_frames import is_internal

E = TypeVar("E", bound=BaseException)


def as_raised(error: E) -> E:
    """The exception that was raised in a function that may have been converted, with a note of the user's lines."""
    return autograph.as_user_raised(error, is_internal)


def shortened(error: E) -> E:
    """The exception, with the frames of its traceback that are the user's; with all if none is.

    As TensorFlow's own traceback filtering, which switches this off as well
    (`tf.debugging.disable_traceback_filtering()`).
    """
    if not tf.debugging.is_traceback_filtering_enabled():
        return error
    frames = []
    frame = error.__traceback__
    while frame is not None:
        if not is_internal(frame.tb_frame.f_code.co_filename):
            frames.append(frame)
        frame = frame.tb_next
    traceback: TracebackType | None = None
    for each in reversed(frames):
        traceback = TracebackType(traceback, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return error.with_traceback(traceback)  # takes exceptions too that take no attributes
