"""Libraries that need Keras 2 as `tf.keras`, which TensorFlow settles when it is imported: a process of their own."""

import os

import pytest
import tensorflow as tf

if os.environ.get("TF_USE_LEGACY_KERAS") != "1":
    raise pytest.UsageError("tests/clients/keras_2 needs TF_USE_LEGACY_KERAS=1; make test-clients sets it")


@pytest.fixture(autouse=True)
def _replica_threads_go():
    """Instead of the check that no replica thread stays: these libraries keep variables, and so strategies, in caches.

    TensorFlow Probability's cache of bijectors is one: TensorFlow's own MirroredStrategy outlives such a test too.
    """
    yield
    tf.compat.v1.reset_default_graph()
