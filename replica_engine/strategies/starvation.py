"""Keeping distributed datasets from hanging for want of threads.

TensorFlow runs ops that wait on others on the threads of its inter-op pool, of which it makes one a core. A
dataset distributed over N devices keeps up to one thread a device waiting for a function that needs a
thread of the same pool. With two cores and two devices nobody is left to run it, and the step never ends.
The size of the pool is fixed when TensorFlow starts, so it is set when this package is imported, if
TensorFlow has not started by then and nobody has set it; where that comes too late, it is said.
"""

from __future__ import annotations

import os

import tensorflow as tf
from absl import logging

from replica_engine._compat import thread_state

ROOMY = 16  # threads: none of ten runs hung with these, all of ten with two
SPARE = 2  # threads beside one for each device


def make_room() -> None:
    """Gives TensorFlow's inter-op pool enough threads, if it has not started and nobody chose a number."""
    if _started() or os.environ.get("TF_NUM_INTEROP_THREADS"):
        return
    if tf.config.threading.get_inter_op_parallelism_threads() == 0 and (os.cpu_count() or 1) < ROOMY:
        tf.config.threading.set_inter_op_parallelism_threads(ROOMY)


def check_inter_op_threads(replicas: int) -> None:
    """Warns if TensorFlow has started with too few threads to feed `replicas` devices."""
    threads = tf.config.threading.get_inter_op_parallelism_threads() or int(
        os.environ.get("TF_NUM_INTEROP_THREADS") or os.cpu_count() or 1
    )
    needed = replicas + SPARE
    if replicas > 1 and threads < needed:
        logging.warning(
            "A dataset distributed over %d devices can hang: TensorFlow started with %d inter-op threads and "
            "needs %d. Import replica_engine before TensorFlow runs its first op, or call "
            "tf.config.threading.set_inter_op_parallelism_threads(%d) at the top of the program.",
            replicas,
            threads,
            needed,
            needed,
        )


def _started() -> bool:
    return thread_state.started()
