"""Libraries that work with Keras 3."""

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def _replica_threads_go():
    """Instead of the check that no replica thread stays: these libraries keep strategies in caches."""
    yield
    tf.compat.v1.reset_default_graph()
