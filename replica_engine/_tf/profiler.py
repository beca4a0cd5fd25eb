"""TensorFlow's profiler: tells whether it runs, and adds spans. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

import tensorflow as tf

# enabled: whether a profile is being taken. TensorFlow has no public function for this, and making a Trace costs more.
from tensorflow.python.profiler.trace import enabled as is_running

Trace = tf.profiler.experimental.Trace
"""A context manager that shows the code inside as a span with a name."""

__all__ = ["Trace", "is_running"]
