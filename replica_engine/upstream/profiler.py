"""TensorFlow's profiler: tells whether it runs, and adds spans. Checked on TensorFlow 2.19 to 2.22."""

from __future__ import annotations

import tensorflow as tf

# enabled: whether a profile is being taken. TensorFlow has no public function for this, and making a Trace costs more.
# A function since TensorFlow 2.21; before, a bool that the profiler sets, so it is looked up in its module each time.
from tensorflow.python.profiler import trace as _trace

Trace = tf.profiler.experimental.Trace
"""A context manager that shows the code inside as a span with a name."""


is_running = _trace.enabled if callable(_trace.enabled) else lambda: _trace.enabled
"""Whether a profile is being taken."""
