"""Sets TensorFlow up for tests: eight CPU devices, and no tuning of datasets.

`tests/conftest.py` imports this module before any test module that uses TensorFlow: devices can be made only before
TensorFlow starts.
"""

import tensorflow as tf

from replica_engine.testing import logical_devices

DEVICES = logical_devices(8)


def _switch_tuning_off():
    """Stops tf.data from tuning iterators: deleting one that tunes itself waits, the longer the older it is.

    Deleting one wakes the thread that tunes it, and waits for its end. On a busy machine the thread may look whether it
    is to end before TensorFlow has noted that it is, and then sleeps on.
    """
    options, iterate = tf.data.experimental.AutotuneOptions, tf.data.Dataset.__iter__
    enabled = options.enabled
    options.enabled = property(lambda self: bool(enabled.fget(self)), enabled.fset)
    # Iterators that have no options of their own: one for each device of a strategy of TensorFlow.
    tf.data.Dataset.__iter__ = lambda self: iterate(self.with_options(tf.data.Options()))


_switch_tuning_off()
