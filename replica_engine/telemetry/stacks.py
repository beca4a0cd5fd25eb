"""Stacks of threads, for reports: where they are in the user's program."""

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
    """Says which files are no user's, so that frames of them need not be shown."""
    global _is_internal
    _is_internal = is_internal


def in_users_code(thread: int) -> bool:
    """Whether the innermost frame of a thread is none of those that need not be shown, but for Python's own library."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return True
    filename = frame.f_code.co_filename
    return not _is_internal(filename) or (filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename)


def stack_of(thread: int | None) -> str:
    """The stack of a thread as text, the innermost frame last; "" if there is no such thread.

    Frames of the user's, and where the thread is in the end.
    """
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    shown = [each for each in frames if not _is_internal(each.filename)]
    if frames[-1] not in shown:
        shown.append(frames[-1])
    return "".join(traceback.format_list(shown))
