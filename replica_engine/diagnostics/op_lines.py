"""Finds the user's line among the frames that made an op."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

import tensorflow as tf

from replica_engine._tf.graphs import autograph
from replica_engine.diagnostics.user_frames import OURS, WRAPPERS, is_installed, is_internal, is_users, shown_file
from replica_engine.engine import current_replica

_MERGES = os.path.join(OURS, "xla", "context.py")  # the file of the `merge_call` of a compiled body


def user_line(made: tf.Operation | tf.Tensor | Iterable[tuple[str, int, str]]) -> str:
    """Returns the user's line as "file.py:12 in step", or "" if there is none.

    Args:
        made: an op, its tensor, or the frames of a stack trace that XLA printed (file, line, function), the outermost
            first.
    """
    if isinstance(made, tf.Tensor):
        while made.op.type == "Identity":  # added when values leave a graph
            made = made.op.inputs[0]
        made = made.op
    return _innermost(_frames(made) if isinstance(made, tf.Operation) else _with_whole_paths(list(made)))


def merge_line(op: tf.Operation) -> str:
    """The user's line that calls `merge_call`, for an op of its merge function in a compiled body; otherwise ""."""
    frames = _frames(op)
    for index, (file, _, name) in enumerate(frames):
        if name == "merge_call" and file == _MERGES:
            callers = [frame for frame in frames[:index] if frame[2] not in WRAPPERS]
            return _innermost(callers[-1:])  # nothing for a call of an optimizer, or of this library
    return ""


def _frames(op: tf.Operation) -> list[tuple[str, int, str]]:
    """File, line and function of each frame that made an op, the outermost first."""
    # An op of a loaded graph has no frames.
    frames = [(frame.filename, frame.lineno, frame.name) for frame in op.traceback or ()]
    if any(autograph.is_generated(frame[0]) for frame in frames):  # of a function inside a converted function
        known = autograph.source_map()
        frames = [known.get((file, line), (file, line, name)) for file, line, name in frames]
    return frames


def here() -> str:
    """The user's line that led to this call, or "" if there is none.

    In Keras' `fit`, a replica thread has no line of the user. Then this is the line that called `fit`, on the thread
    that called `run`.
    """
    own, replica = threading.get_ident(), current_replica()
    line = _users_line(sys._getframe(1), (own,))
    if line or replica is None or replica.run.coordinator.ident in (None, own):
        return line
    coordinator = replica.run.coordinator.ident
    return _users_line(sys._current_frames().get(coordinator), (coordinator,))


def users_place(frame: FrameType, number: int) -> str:
    """The user's line in a frame of a traceback, "train.py:12 in step"; "" if the frame is not the user's."""
    file = frame.f_code.co_filename
    is_users = not (is_internal(file) or autograph.is_generated(file))
    written = autograph.written_at(file, number)
    return written or (_innermost([(file, number, frame.f_code.co_name)]) if is_users else "")


def raised_at(error: BaseException) -> str:
    """The innermost line of the user in an exception's traceback, or "" if there is none.

    A line of the user's program, rather than one of an installed package that the program calls.
    """
    places = [users_place(*step) for step in traceback.walk_tb(error.__traceback__)]
    users = [place for place in places if place]
    own = [place for place in users if not is_installed(place)]
    return (own or users or [""])[-1]


def _users_line(frame: FrameType | None, threads: tuple[int, ...]) -> str:
    while frame is not None:
        if is_users(frame, threads):
            place = autograph.original_location(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, threads)
            if not autograph.is_generated(place[0]):
                return _innermost([place])
        frame = frame.f_back
    return ""


def _innermost(frames: Iterable[tuple[str, int, str]]) -> str:
    users = [frame for frame in frames if not is_internal(frame[0])]
    if not users:
        return ""
    file, line, name = users[-1]
    return f"{shown_file(file)}:{line} in {'a lambda' if name in ('', '<lambda>') else name.removeprefix('tf__')}"


def _with_whole_paths(frames: Sequence[tuple[str, int, str]]) -> list[tuple[str, int, str]]:
    """Frames of a stack trace that XLA printed, with the beginning of the paths, which XLA drops.

    XLA drops the folders that all files of a trace have in common. Files of TensorFlow or of this package are among
    them, so this is a folder above those.
    """
    files = [file for file, _, _ in frames]
    folders = ["", *map(str, Path(tf.__file__).parents[1:]), *map(str, Path(__file__).parents[1:])]
    found = [sum(_is_whole(os.path.join(folder, file)) for file in files) for folder in folders]
    folder = folders[found.index(max(found))]
    # A cell of a notebook, "<ipython-input-1>", is not a file.
    return [(os.path.join(folder, file) if file[:1] != "<" else file, line, name) for file, line, name in frames]


def _is_whole(path: str) -> bool:
    return os.path.isabs(path) and os.path.exists(path)


def is_scope_of(scope: str, name: str) -> bool:
    """Whether a name scope belongs to a layer; TensorFlow adds a number to a scope that is entered again."""
    return scope == name or (scope.startswith(f"{name}_") and scope[len(name) + 1 :].isdigit())
