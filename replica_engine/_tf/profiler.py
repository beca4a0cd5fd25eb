"""TensorFlow's profiler: whether it runs, and a span in it. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

import tensorflow as tf

# enabled: whether a profile is being taken now. There is no public way to ask, and making a Trace costs more.
from tensorflow.python.profiler.trace import enabled as is_running

Trace = tf.profiler.experimental.Trace
"""A context manager around what the profiler is to show, by a name."""

__all__ = ["Trace", "is_running"]
