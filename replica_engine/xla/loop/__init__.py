"""Many steps in one launch: a loop on the devices, whose inputs are fetched ahead.

- `device_loop`: the loop. Read this one first.
- `prefetch`: the thread that fetches batches into the `infeed`, the queue between that thread and the program.
- `batches`: elements of an iterator as arrays, one share for each replica.
"""
