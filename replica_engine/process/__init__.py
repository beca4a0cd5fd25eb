"""Functions that concern the whole process, not one run.

- `devices`: several devices on a machine that has one.
- `folders`: which folder a relative path is in.
- `pool`: the size of TensorFlow's thread pool.
- `shutdown`: the exit of the process in the middle of a run.
- `freed_memory`: the limits of glibc's allocator.
- `fork`: forked child processes, in which no run is possible.
- `interrupts`: raises an exception in another thread, which may be the only way to end a wait there, and holds off
  Ctrl-C.
"""

import os


def cores() -> int:
    """The number of cores that this process may use; TensorFlow makes one thread for each."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
