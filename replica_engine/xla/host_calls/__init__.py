"""Calls from a compiled body to the host.

- `outside_compilation`: the function that users call. Read this one first.
- `closures`: the user's function, rebuilt with concrete tensors instead of the tensors of the body it closes over; and
  the function that the user wrote, for one that AutoGraph converted.
- `host_results`: the results of the function.
- `host_call`: one call, as the program makes it. `session`: the calls of one launch.
"""
