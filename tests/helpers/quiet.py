"""Keeps what TensorFlow says when it starts, about drivers and instructions, out of what a person reads."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Writes to stderr in the block, also by C++, appear only if it fails."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException:
            said.seek(0)
            os.write(before, said.read())
            raise
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
