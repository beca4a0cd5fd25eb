"""The stages of a replica body, from a Python function to a program that runs.

- `traced`: the function becomes a graph. `body_graph`: that graph, which of its ops run on the host, its results as
  tensors, and how often each stage ran.
- `collective_meetings`: what may differ between replicas, and collectives that only some of them reach.
  `known_values`: conditions whose value is known for each replica.
- `lowered`: the graph becomes a StableHLO program, or an error in the user's terms.
- `program`: the data that the later stages need.
- `compiled`: the program, compiled for devices. `launch`: one run of the program.
- `saved_programs`: programs in a folder, for later processes.
"""
