"""Many steps in a launch: a loop on the devices, whose inputs are fetched ahead.

- `device_loop`: the loop. Read this one first.
- `chunks`: the body of its program, and its launches, each with a chunk of batches as arguments.
- `prefetch`: the thread that fetches batches, and the queue between that thread and the launches.
- `batches`: elements of an iterator as arrays, one share for each replica.
"""
