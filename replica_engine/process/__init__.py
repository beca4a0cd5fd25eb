"""What concerns the whole process rather than one run.

- `pool`: the size of TensorFlow's thread pool.
- `shutdown`: the exit of the process in the middle of a run.
- `fork`: child processes, in which nothing can run.
- `interrupts`: raising an exception in another thread, which is how a wait may have to end.
"""
