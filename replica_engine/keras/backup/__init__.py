"""A `fit` that is killed and goes on in another process.

- `callback`: `BackupAndRestore`, what a user writes.
- `own_loop`: `TrainingState`, for loops of one's own.
- `training`: one `fit`: when it saves, what it restores at which moment, and how a signal ends it.
- `variables`: the variables of a model, its optimizers, metrics and random numbers, as a checkpoint of TensorFlow.
- `states`: the state of the other callbacks.
- `data`: the place in the data.
"""
