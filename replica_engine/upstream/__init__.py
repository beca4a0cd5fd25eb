"""Every private name of TensorFlow and Keras that this library needs, each with the reason next to its import.

TensorFlow:

- `graphs/`: function graphs and their ops: conversion by AutoGraph, tracing, StableHLO, ops that XLA cannot compile.
- `distribute`: distributed values, strategies and reductions; the description of TPU hardware.
- `worker_collectives`: collectives between processes. `checkpoint_hooks`: checkpoints of several workers in one folder.
- `host_datasets`: distributed datasets for CPU devices. `data_pulls`: takes many elements of an iterator with one call.
- `thread_state`: the state that TensorFlow keeps separately for each thread.
- `eager`: eager tensors and arrays without ops; handles of variables.
- `own_attributes`: what replicas on threads keep in attributes of objects that they share.

Keras:

- `keras/`: models, training functions, and the state of a thread.

Both:

- `hook`: the class of what this library changes in TensorFlow and Keras; modules of this package declare it.
- `versions`: the versions that this library works with. It is imported first, and raises an error for any other one.

Nothing outside this package imports from `tensorflow.python` or `keras.src`. The engine must not import this package.
"""

from replica_engine.upstream import versions

__all__ = ["versions"]
