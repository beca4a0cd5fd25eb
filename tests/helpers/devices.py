"""Sets TensorFlow up for tests: eight CPU devices, and no tuning of datasets.

`tests/conftest.py` imports this module before any test module that uses TensorFlow: devices can be made only before
TensorFlow starts.
"""

import tensorflow as tf

from replica_engine.testing import logical_devices

DEVICES = logical_devices(8)


def _switch_tuning_off():
    """Stops tf.data from tuning iterators: deleting one that tunes itself waits, the longer the older it is."""
    options, iterate = tf.data.experimental.AutotuneOptions, tf.data.Dataset.__iter__
    enabled = options.enabled
    options.enabled = property(lambda self: bool(enabled.fget(self)), enabled.fset)
    # Iterators that have no options of their own: one for each device of a strategy.
    tf.data.Dataset.__iter__ = lambda self: iterate(self.with_options(tf.data.Options()))


_switch_tuning_off()
