"""Enough threads for TensorFlow, so that distributed datasets do not hang.

TensorFlow runs ops that wait for others on the threads of its inter-op pool, of which it makes one a core.
A dataset distributed over N devices can keep a thread a device waiting for a function that needs a thread
of the same pool. With two cores and two devices nobody may be left to run it, and the step never ends. The
size of the pool is fixed when TensorFlow starts. So it is set when this package is imported, unless
TensorFlow has started by then or somebody has chosen a number; where that comes too late, it is said.

Imports neither TensorFlow nor anything that does: importing this package stays cheap.
"""

from __future__ import annotations

import logging
import os
import sys

VARIABLE = "TF_NUM_INTEROP_THREADS"  # TensorFlow reads it when it starts
ROOMY = 16  # threads; runs that hung with two did not with these
SPARE = 2  # threads beside one for each device

log = logging.getLogger("replica_engine")


_set_here = False


def make_room(replicas: int = 0) -> None:
    """Gives TensorFlow's inter-op pool enough threads, if it has not started and nobody else chose a number.

    Args:
        replicas: how many devices there will be, where that is known already.
    """
    global _set_here
    if "tensorflow" in sys.modules:
        from replica_engine._compat import thread_state

        if thread_state.started():
            return
    threads = max(ROOMY, replicas + SPARE)
    if (VARIABLE not in os.environ or _set_here) and _cores() < threads:
        os.environ[VARIABLE] = str(threads)
        _set_here = True


def warn_if_cramped(replicas: int, chosen: int) -> None:
    """Warns if TensorFlow has too few threads to feed `replicas` devices.

    Args:
        replicas: how many devices a dataset is distributed over.
        chosen: the number of inter-op threads set in TensorFlow's configuration; 0 for none.
    """
    in_environment = os.environ.get(VARIABLE, "")
    threads = chosen or (int(in_environment) if in_environment.isdecimal() else 0) or _cores()
    needed = replicas + SPARE
    if replicas > 1 and threads < needed:
        log.warning(
            "A dataset distributed over %d devices can hang: TensorFlow has %d inter-op threads and needs %d. "
            "Import replica_engine before TensorFlow runs its first op, or call "
            "tf.config.threading.set_inter_op_parallelism_threads(%d) at the top of the program.",
            replicas,
            threads,
            needed,
            needed,
        )


def _cores() -> int:
    """The cores that this process may run on, of which TensorFlow makes a thread each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
