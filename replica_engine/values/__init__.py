"""Values of replicas: conversion between N values and one distributed value, and the samples of a batch.

- `structure`: takes structures of values apart, and converts the leaves to tensors.
- `regroup`: converts N structures to one structure of distributed values, and back.
- `samples`: counts, takes and pads the samples of a batch.
- `split_batches`: batches of any size, and gradient accumulation, for custom training loops.
- `table_rows`: the rows of tables in a reduction. `linear`: whether a value reaches another one linearly.
- `replica_weights`: the seed of each replica, and weights of gradients that are known late.
- `variable_numbers`: numbers of variables, by which workers tell models of one shape apart.
"""
