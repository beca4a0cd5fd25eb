"""The size of TensorFlow's inter-op thread pool, which a launch inside a `tf.function` must never exhaust.

TensorFlow runs the ops of a `tf.function` on the threads of its inter-op pool, and makes one thread for each core. The
launch of a compiled program is one op, and holds its thread until the program has ended. A host call of that program
may run another `tf.function`, which needs another thread of the same pool. If launches hold all threads (a launch that
waits for its turn holds one too), the host call never gets a thread and the program never ends.

Nothing else needs more threads than cores, because iterators wait on other threads. On few cores, more threads make
small graph steps slower. So the pool is enlarged only where compiled programs are used. TensorFlow fixes the size when
it starts. A size that the user has chosen is kept.

This module imports neither TensorFlow nor a module that imports it, so that importing the package stays cheap.
"""

from __future__ import annotations

import os
import sys

from replica_engine.process import cores

VARIABLE = "TF_NUM_INTEROP_THREADS"  # TensorFlow reads it when it starts
FOR_ONE_LAUNCH = 2  # threads: one for the launch, and one for its host calls
FOR_LAUNCHES = 16  # threads: enough for launches from up to 15 user threads

_set_here = False


def make_room(threads: int) -> None:
    """Makes TensorFlow's inter-op pool at least `threads` large.

    Does nothing if the pool is larger already, if TensorFlow has started, or if the user has chosen a size.
    """
    global _set_here
    if "tensorflow" in sys.modules:
        from replica_engine._tf import thread_state

        if thread_state.started():
            return
    if (VARIABLE not in os.environ or _set_here) and cores() < threads:
        os.environ[VARIABLE] = str(threads)
        _set_here = True
