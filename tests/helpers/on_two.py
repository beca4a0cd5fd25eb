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


def spread(strategy, fn):
    """A value that is `fn(i)` on replica i."""
    return strategy.experimental_distribute_values_from_function(lambda context: fn(context.replica_id_in_sync_group))


def gradient_of(fn, upstream=None):
    """The gradient of a function at a tensor, for an upstream gradient or for ones."""

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        return tape.gradient(y, x, output_gradients=upstream)

    return gradient


def plain(value):
    value = value.numpy() if tf.is_tensor(value) else value
    return value.tolist() if hasattr(value, "tolist") else value
