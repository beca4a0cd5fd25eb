"""Calls from a compiled body to the host.

- `outside_compilation`: what users write. Read this one first.
- `closures`: the user's function, with concrete tensors in the place of those of the body that it closes over.
- `originals`: which object of the user's stands for which.
- `result_specs`, `results`: what the function returns.
- `call`: one call, as the program makes it. `session`: the calls of one launch.
"""
