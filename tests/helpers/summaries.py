"""What TensorFlow's summary writers have written."""

import tensorflow as tf


def summaries(folder):
    """The step and the value of each summary in the event files of a folder, in order."""
    return [
        (event.step, value)
        for path in sorted(folder.iterdir())
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
    ]
