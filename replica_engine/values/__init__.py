"""Values of replicas: conversion between N values and one distributed value, and the samples of a batch.

- `structure`: takes structures of values apart, and converts the leaves to tensors.
- `regroup`: converts N structures to one structure of distributed values, and back.
- `seeds`: the seed of each replica.
- `samples`: counts, takes and pads the samples of a batch.
- `micro_batches`: gradient accumulation in custom training loops.
- `uneven_batches`: batches whose size is not a multiple of the number of replicas, for custom training loops.
"""
