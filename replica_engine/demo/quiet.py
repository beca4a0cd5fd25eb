"""Importing TensorFlow without the notes that its C++ side writes to stderr meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
ERRORS_ONLY = "2"

# TensorFlow 2.21 writes these two whatever the level, through a logger that it has not yet set up.
_NOTE = re.compile(rb"WARNING: All log messages before absl::InitializeLog|I\d{4} ")


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Holds back what is written to stderr inside, and afterwards passes it on without TensorFlow's notes.

    Also sets TensorFlow's C++ log level to errors only. Does nothing if the user has set a level of their own.
    """
    if LEVEL in os.environ:
        yield
        return
    os.environ[LEVEL] = ERRORS_ONLY
    # C++ writes to the file descriptor, so replacing `sys.stderr` would not do.
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not _NOTE.match(line):
                    os.write(2, line)
