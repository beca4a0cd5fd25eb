"""Stacks of threads, for reports: where each thread is in the user's program."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

_STANDARD_LIBRARY = os.path.dirname(traceback.__file__) + os.sep


def _nothing(filename: str) -> bool:
    return False


_is_internal: Callable[[str], bool] = _nothing


def hide(is_internal: Callable[[str], bool]) -> None:
    """Sets the function that tells internal files from the user's files. Stacks leave out frames of internal files."""
    global _is_internal
    _is_internal = is_internal


def in_users_code(thread: int) -> bool:
    """Whether the innermost frame of a thread is in the user's code or in Python's standard library.

    True as well if the thread has no frame, because it has ended. Files in site-packages do not count as the standard
    library.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return True
    filename = frame.f_code.co_filename
    del frame  # see `stack_of`
    return not _is_internal(filename) or (filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename)


def stack_of(thread: int | None) -> str:
    """The stack of a thread as text, with the innermost frame last; "" if the thread does not exist.

    The text has the frames of the user's files and the innermost frame, also if that is internal.
    """
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    del frame  # perhaps that of this call: it would hold itself, and all that calls of this thread have
    shown = [each for each in frames if not _is_internal(each.filename)]
    if frames[-1] not in shown:
        shown.append(frames[-1])
    return "".join(traceback.format_list(shown))
