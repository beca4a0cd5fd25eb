"""Starting TensorFlow without the notes that its C++ side writes to stderr meanwhile."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
ERRORS_ONLY = "2"

# What TensorFlow 2.21 writes even so: notes from before its logger is set up, and an error where there is no GPU.
_NOTE = re.compile(rb"WARNING: All log messages before absl::InitializeLog|I\d{4} |E\d{4} .*failed call to cuInit")


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """For importing TensorFlow and listing its devices: holds stderr back, then passes on all but the notes.

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
