"""The stages of a replica body, from a Python function to a program that runs.

- `trace`: the function becomes a graph. `body_graph`: that graph, and which of its ops run on the host.
- `lower`: the graph becomes a StableHLO program. `explain`: the error if XLA cannot compile it.
- `program`: the data that the later stages need. `results`: the results of a launch as tensors, and how often each
  stage ran.
- `compiled`: the program, compiled for devices. `launch`: one run of the program.
- `program_table`: finds bodies that are already traced, lowered and compiled.
- `saved_programs`: programs in a folder, for later processes.
- `uneven`: shares of different shapes, where each replica has its own program.
"""
