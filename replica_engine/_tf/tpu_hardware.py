"""What TensorFlow says about the hardware of a TPU.

TPUHardwareFeature: the message that a `tf.tpu.experimental.HardwareFeature` is made of; the class has no other
constructor. An empty message means hardware without an embedding accelerator. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.tpu.topology_pb2 import TPUHardwareFeature


def without_embeddings() -> Any:
    """A `tf.tpu.experimental.HardwareFeature` whose `embedding_feature` is UNSUPPORTED."""
    return tf.tpu.experimental.HardwareFeature(TPUHardwareFeature())
