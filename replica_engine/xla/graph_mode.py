"""Compiled bodies do not work in graphs of tf.compat.v1. Every entry point raises the same error there.

A launch is an op around Python code that holds the strategy, and variables live on the devices. Both need eager mode or
a `tf.function`; a session of TensorFlow 1 has neither. Without the check, such a program would build some of its ops
and then fail in a place that tells nothing about the cause.
"""

from __future__ import annotations

import tensorflow as tf

from replica_engine.errors import GraphModeError


def check_mode() -> None:
    """Raises GraphModeError in a graph of tf.compat.v1."""
    if not tf.executing_eagerly() and not tf.inside_function():
        raise GraphModeError(
            "TPUStrategy and compiled bodies run in eager mode and in tf.functions, not in a graph of "
            "tf.compat.v1. Remove the `with tf.Graph().as_default():` or tf.compat.v1.disable_eager_execution(). "
            "MirroredStrategy runs in such a graph."
        )
