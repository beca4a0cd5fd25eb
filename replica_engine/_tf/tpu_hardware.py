"""TensorFlow's description of TPU hardware.

TPUHardwareFeature: the message from which a `tf.tpu.experimental.HardwareFeature` is made; the class has no other
constructor. An empty message stands for hardware without an embedding accelerator. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf.tpu.topology_pb2 import TPUHardwareFeature


def without_embeddings() -> Any:
    """A `tf.tpu.experimental.HardwareFeature` whose `embedding_feature` is UNSUPPORTED."""
    return tf.tpu.experimental.HardwareFeature(TPUHardwareFeature())
