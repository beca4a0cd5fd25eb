"""The first backend: each replica runs the user's function on a thread of its own.

- `call`: calling a function once per replica. Read this one first.
- `context`: the replica context, and its merge call.
- `inherited_state`: what a replica thread takes over from the caller's.
- `lift`: a tf.function goes around the run, not into it.
- `agreement`: whether the replicas bring values of the same kind to a sync point.
- `variables`: variables created inside a run.
- `gradients`: of an all-reduce in a graph.
- `cpu_reduction`: small tensors are added by NumPy.

The engine, which knows no TensorFlow, runs the threads and brings them together.
"""
