"""Compares the results of replicas with those of one device."""

import numpy as np
import tensorflow as tf

ONE_DEVICE = tf.distribute.get_strategy  # TensorFlow's default strategy: one replica


def assert_close(results, expected, tolerance=1e-4, absolute=0.0):
    """Compares two structures of arrays.

    Args:
        results: the results of the replicas.
        expected: the results of one device.
        tolerance: relative to the largest value of each array, because a small sum of large terms is inexact.
        absolute: a difference that is always allowed.
    """
    tf.nest.assert_same_structure(results, expected)
    for value, other in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        atol = max(absolute, tolerance * np.max(np.abs(other), initial=0))
        np.testing.assert_allclose(value, other, rtol=tolerance, atol=atol)
