"""Many steps in one launch: a loop on the devices, whose inputs are fetched ahead.

- `device_loop`: the loop. Read this one first.
- `chunks`: the same with the batches as arguments of several launches, for devices where a host call takes long.
- `step`: the step of a loop, traced.
- `prefetch`: the thread that fetches batches into the `infeed`, the queue between that thread and the program.
- `batches`: elements of an iterator as arrays, one share for each replica.
"""
