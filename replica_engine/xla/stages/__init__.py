"""The stages of a replica body, from a Python function to a program that runs.

- `trace`: the function becomes a graph. `body_graph`: that graph, and which of its ops run on the host.
- `lower`: the graph becomes a StableHLO program. `program`: what the later stages have to know of it.
- `compiled`: the program, compiled for devices. `launch`: one run of it.
- `program_cache`: what was traced, lowered and compiled is found again. `counts`: how often each happened.
- `uneven`: shares of different shapes, where each replica has a program of its own.
"""
