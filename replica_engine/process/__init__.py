"""Functions that concern the whole process, not one run.

- `pool`: the size of TensorFlow's thread pool.
- `shutdown`: the exit of the process in the middle of a run.
- `fork`: forked child processes, in which no run is possible.
- `interrupts`: raises an exception in another thread, which may be the only way to end a wait there, and holds off
  Ctrl-C.
"""
