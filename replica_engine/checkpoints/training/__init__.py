"""Backups of a training: a folder of complete checkpoints, and what they hold besides variables.

- `folder`: the folder of the last complete backups; a half one is never found, and removed later.
- `plain`: values of Python and NumPy as JSON and arrays, without pickle.
- `random_state`: the random numbers of Python, NumPy, TensorFlow and the strategy.
- `preemption`: signals that end a training after its step, on all workers at the same one.

What belongs to a `fit` of Keras is in `keras/backup`.
"""
