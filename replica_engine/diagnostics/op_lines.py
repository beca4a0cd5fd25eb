"""Finds the user's line among the frames that made an op."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from types import FrameType
from typing import Any

import tensorflow as tf

from replica_engine._tf import autograph
from replica_engine.diagnostics.user_frames import is_internal, is_users


def user_line(made: Any) -> str:
    """Returns the user's line as "file.py:12 in step", or "" if there is none.

    Args:
        made: an op, its tensor, or frames (file, line, function) with the outermost first.
    """
    if isinstance(made, tf.Tensor):
        while made.op.type == "Identity":  # added when values leave a graph
            made = made.op.inputs[0]
        made = made.op
    if isinstance(made, tf.Operation):
        frames = [
            (frame.filename, frame.lineno, frame.name) for frame in made.traceback or ()
        ]  # an op of a loaded graph has no frames
    else:
        frames = [(_absolute(file), line, name) for file, line, name in made]
    return _innermost(frames)


def here() -> str:
    """The user's line that led to this call, or "" if there is none."""
    threads = (threading.get_ident(),)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame, threads):
            place = autograph.original_location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, threads)
            if not autograph.is_generated(place[0]):
                return _innermost([place])
        frame = frame.f_back
    return ""


def _innermost(frames: Iterable[tuple[str, Any, str]]) -> str:
    users = [frame for frame in frames if not is_internal(frame[0])]
    if not users:
        return ""
    file, line, name = users[-1]
    return f"{file}:{line} in {name.removeprefix('tf__') or 'a lambda'}"


def _absolute(file: str) -> str:
    """Restores the leading slash of a path, which XLA drops."""
    return file if os.path.isabs(file) or not os.path.exists(os.sep + file) else os.sep + file
