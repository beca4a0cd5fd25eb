"""The first backend: each replica runs the user's function on its own thread.

- `call`: the backend, which calls a function once per replica. Read this module first.
- `merging`: runs the merge functions of a run.
- `context`: the replica context and its merge call.
- `inherited_state`: the state that a replica thread takes over from the calling thread.
- `joint`: merge calls in branches, loops and nested functions.
- `agreement`: checks that the replicas bring values of the same kind to a sync point.
- `variables`: variables created inside a run.
- `gradients`: the gradient of an all-reduce in a graph.
- `random_numbers`: the seeds of random ops on each replica.
- `cpu_reduction`: all-reduces between CPU devices.

The engine, which does not depend on TensorFlow, runs the threads and makes them meet.
"""
