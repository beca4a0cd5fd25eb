"""What concerns the whole process rather than one run.

- `pool`: the size of TensorFlow's thread pool.
- `shutdown`: the exit of the process in the middle of a run.
- `fork`: child processes, in which nothing can run.
- `interrupts`: raising an exception in another thread, which is how a wait may have to end.
"""

import os


def cores() -> int:
    """The cores that this process may run on, of which TensorFlow makes a thread each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
