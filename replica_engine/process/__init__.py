"""Functions that concern the whole process, not one run.

- `interrupts`: exceptions from signals and from other threads, holding them off, and ending a wait with one.
- `threads`: starting a thread safely, and values that hold for the time of a block.
- `setup`: logical devices, the size of TensorFlow's thread pool, forked child processes, in which no run is possible,
  and the folder that a relative path is in.
- `shutdown`: the exit of the process in the middle of a run.
- `memory`: the limits of glibc's allocator.
"""

import os


def cores() -> int:
    """The number of cores that this process may use; TensorFlow makes one thread for each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
