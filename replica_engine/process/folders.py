"""Which folder a relative path is in: the one of the call that got it, wherever the program goes later.

Programs change their folder (hydra does, and notebooks), and what takes a path may use it much later, or on another
thread. So a path is made absolute by what takes it from the user.
"""

from __future__ import annotations

import contextlib
import os


def absolute(path: str) -> str:
    """A path from the root, as it is in the current folder; an address, such as gs://..., stays.

    `..` stays in it: behind a symbolic link it is another folder than the one before.
    """
    if "://" not in path and not os.path.isabs(path):
        with contextlib.suppress(FileNotFoundError):  # somebody has deleted the folder: whatever opens the path says so
            return os.path.join(os.getcwd(), path)
    return path


def of_environment(path: str) -> str:
    """A path that stands in an environment variable: it is relative to the folder in which the process has begun."""
    return path if not path or "://" in path else os.path.join(_BEGAN_IN, path)


def to_disk(path: str) -> None:
    """Waits until a file, or the names in a folder, would survive a loss of power. Object stores need no such call."""
    if "://" in path:
        return
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_BEGAN_IN = absolute("")
