"""Sets TensorFlow up for tests: makes devices, stops the tuning of datasets, and lets AutoGraph read less source.

`tests/conftest.py` imports this module before any test module that uses TensorFlow: devices can be made only before
TensorFlow starts.
"""

import os

import tensorflow as tf

from helpers import lambdas
from replica_engine import logical_devices


def _gpus(count: int) -> list[str]:
    """The first GPUs; parts of the first one if there are fewer. Where TensorFlow has none, they are jax's."""
    if 0 < len(tf.config.list_physical_devices("GPU")) < count:
        return logical_devices(count, "GPU")
    return [f"GPU:{index}" for index in range(count)]


GPUS = int(os.environ.get("REPLICA_ENGINE_TEST_GPUS", "0"))
"""How many GPUs take the place of CPU devices in the contract suite: cards, or parts of the first one."""

DEVICES = logical_devices(8)  # also beside GPUs: values are sent to CPU devices
if GPUS:
    DEVICES = _gpus(GPUS)


def _switch_tuning_off():
    """Stops tf.data from tuning iterators, because deleting a tuned iterator may take long.

    Deleting such an iterator wakes its tuning thread, and waits until the thread ends. On a busy machine the thread may
    check whether it should end before TensorFlow has set that flag. Then it sleeps again, longer the older it is.
    """
    options, iterate = tf.data.experimental.AutotuneOptions, tf.data.Dataset.__iter__
    enabled = options.enabled
    options.enabled = property(lambda self: bool(enabled.fget(self)), enabled.fset)
    # Iterators that have no options of their own: one for each device of a strategy of TensorFlow.
    tf.data.Dataset.__iter__ = lambda self: iterate(self.with_options(tf.data.Options()))


_switch_tuning_off()
lambdas.look_nearby()
