"""Bodies on two replicas, and their results as plain values."""

import tensorflow as tf

from replica_engine import xla


def on_two(fn, *inputs):
    """What two replicas return, as plain values; replica i gets the i-th of each input."""
    rows = [[], []]
    for values in inputs:
        for row, value in zip(rows, values, strict=True):
            row.append(value if isinstance(value, tf.SparseTensor) else tf.convert_to_tensor(value))
    return [tf.nest.map_structure(plain, each) for each in xla.replicate(fn, rows)]


def plain(value):
    value = value.numpy() if tf.is_tensor(value) else value
    return value.tolist() if hasattr(value, "tolist") else value
