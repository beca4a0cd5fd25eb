"""Other names for checkpoints that TensorFlow cannot read at their own.

TensorFlow's readers take `[ ] * ? \\` in the prefix of a checkpoint for a pattern, and find nothing: `lr[1]/ckpt`. No
form of that prefix works, since one string is both the pattern and the name that is opened. So it is read through links
in a folder of this process, which stay until the process ends: variables that are made later are restored then.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile

import tensorflow as tf

from replica_engine._tf import checkpoints
from replica_engine.process.folders import absolute

_PATTERN = frozenset("*?[\\")
_FOLDER = "/tmp"  # where the folder for temporary files is itself a pattern


def readable(path: str) -> str:
    """The prefix to read a checkpoint from: from the root, and one that TensorFlow takes for no pattern.

    Args:
        path: the prefix that the user gave.
    """
    path = absolute(path)
    if _PATTERN.isdisjoint(path) or not tf.io.gfile.exists(path + ".index"):
        return path
    alias = os.path.join(tempfile.mkdtemp(dir=_folder()), "checkpoint")
    link = tf.io.gfile.copy if "://" in path else os.symlink
    for file in (path + ".index", *checkpoints.matching(path + checkpoints.DATA)):
        link(file, alias + file[len(path) :])
    return alias


@functools.cache
def _folder() -> str:
    usual = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="replica_engine_", dir=usual if _PATTERN.isdisjoint(usual) else _FOLDER)
    atexit.register(_delete, folder, os.getpid())
    return folder


def _delete(folder: str, owner: int) -> None:
    """Deletes the folder; a forked child leaves it to its owner."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
