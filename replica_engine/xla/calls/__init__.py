"""Calls of a body: found again by their key, as an op of a graph, and many steps in a launch.

- `program_table`: finds bodies that are already traced, lowered and compiled.
- `body_calls`: a compiled body as one op in the graph of a `tf.function`.
- `run_steps`: a loop on the devices. `chunk_launches`: the body of its program, and its launches, each with a chunk of
  batches as arguments. `prefetch`: the thread that fetches batches, their arrays, and the queue before the launches.
"""
