"""Enough threads for TensorFlow, so that a launch inside a `tf.function` and what it calls do not starve each other.

TensorFlow runs the ops of a `tf.function` on the threads of its inter-op pool, of which it makes one a core. A launch
of a compiled program is one op, and holds its thread until the program is back. A host call of that program may run a
`tf.function` of its own, which needs another thread of the same pool. If launches hold them all, and one that waits
for its turn holds one, too, it never ends.

Nothing else needs more threads than cores: iterators wait on threads of their own. And on few cores more threads
make small graph steps slower. So the pool is made larger only where there are compiled programs. Its size is fixed when
TensorFlow starts; somebody's own choice is kept.

Imports neither TensorFlow nor anything that does: importing this package stays cheap.
"""

from __future__ import annotations

import os
import sys

from replica_engine.process import cores

VARIABLE = "TF_NUM_INTEROP_THREADS"  # TensorFlow reads it when it starts
FOR_ONE_LAUNCH = 2  # threads: its own, and one for what it calls
FOR_LAUNCHES = 16  # of as many user threads, but one

_set_here = False


def make_room(threads: int) -> None:
    """Gives TensorFlow's inter-op pool so many threads, if it has fewer, has not started, and nobody chose a number."""
    global _set_here
    if "tensorflow" in sys.modules:
        from replica_engine._tf import thread_state

        if thread_state.started():
            return
    if (VARIABLE not in os.environ or _set_here) and cores() < threads:
        os.environ[VARIABLE] = str(threads)
        _set_here = True
