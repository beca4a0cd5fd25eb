"""Starts TensorFlow without the messages that its C++ code writes to stderr."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

LEVEL = "TF_CPP_MIN_LOG_LEVEL"
ERRORS_ONLY = "2"

# The messages that TensorFlow 2.21 writes even then: some before its logger is set up, and an error without a GPU.
_NOTE = re.compile(rb"WARNING: All log messages before absl::InitializeLog|I\d{4} |E\d{4} .*failed call to cuInit")


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Holds stderr back while TensorFlow is imported and lists its devices; then writes all but the known messages.

    Also sets TensorFlow's C++ log level to errors only. Does nothing if the user has set a level.
    """
    if LEVEL in os.environ:
        yield
        return
    os.environ[LEVEL] = ERRORS_ONLY
    # C++ code writes to the file descriptor, so replacing `sys.stderr` would have no effect.
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
