"""The first backend: each replica runs the user's function on its own thread.

- `replica_run`: calls a function once on each replica, and its merge functions once for all. Read this module first.
- `replica_context`: the replica context, its merge call, and the gradient of its all-reduce.
- `inherited_state`: the state that a replica thread takes over from the calling thread.
- `control_flow`: merge calls in branches, loops and nested functions.
- `merge_checks`: checks that replicas bring values of the same kind to a sync point, and workers the same launches.
- `shared_variables`: variables created inside a run, and the seeds of random ops on each replica.
- `step_marks`: marks in the graph of a traced step, which tell where its replicas are.
- `all_reduce`: all-reduces between CPU devices, and over workers.

The engine, which does not depend on TensorFlow, runs the threads and makes them meet.
"""
