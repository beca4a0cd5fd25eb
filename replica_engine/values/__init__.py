"""Values of replicas: N values to one distributed value and back, and the samples of a batch.

- `structure`: structures of values, one level at a time.
- `regroup`: N structures to one structure of distributed values, and back.
- `tensors`: what counts as a tensor.
- `samples`: the samples of a batch: counting, taking, padding.
- `uneven_batches`: batches whose size is no multiple of the number of replicas, for loops of one's own.
"""
