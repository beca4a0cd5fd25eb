"""What programs ask a `tf.distribute.TPUStrategy` about its TPUs, answered for devices of any PJRT platform.

`replica_engine.TPUStrategy` is a subclass of TensorFlow's class, so programs that ask `isinstance(strategy,
tf.distribute.TPUStrategy)` take the branch that they take on TPUs. Such branches then ask for more. TensorFlow's class
reads the answers from a TPU system, which is not there. The answers here hold on every platform:

- One machine, which has all replicas.
- One device a replica. TensorFlow's model parallelism (several logical devices a replica) has nothing to do then.
- No embedding accelerator, also on real TPUs, because TensorFlow's embedding ops need its own TPU runtime. Layers that
  ask (`tensorflow_recommenders.layers.embedding.TPUEmbedding`) then do lookups with ops that XLA compiles.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import tpu_hardware
from replica_engine.errors import DeviceError
from replica_engine.xla.graph_mode import refuses_graphs


class TPUFacts:
    """Attributes of TensorFlow's extended half of a TPUStrategy. Mix it in before an extended class."""

    @property
    def steps_per_run(self) -> int:
        """How many steps one launch of a device loop takes, if the call does not say."""
        return self._container_strategy().steps_per_run  # type: ignore[attr-defined]

    @property
    def num_hosts(self) -> int:
        """The number of machines."""
        return 1

    @property
    def num_replicas_per_host(self) -> int:
        """The number of replicas on each machine."""
        return self.device_group.size  # type: ignore[attr-defined]

    @property
    def tpu_hardware_feature(self) -> Any:
        """A `tf.tpu.experimental.HardwareFeature` that has no embedding accelerator."""
        return tpu_hardware.without_embeddings()


@refuses_graphs(
    "experimental_assign_to_logical_device",
    "experimental_replicate_to_logical_devices",
    "experimental_split_to_logical_devices",
)
class OneLogicalDevice:
    """The model parallelism of `tf.distribute.TPUStrategy`, for replicas of one device. Mix it in before that class."""

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> tf.Tensor:
        """Places a tensor on a device of its replica; there is one, 0.

        Args:
            tensor: any tensor.
            logical_device_id: 0.

        Returns:
            The tensor.

        Raises:
            DeviceError: another device.
        """
        if _as_int(logical_device_id) != 0:
            raise DeviceError.one_a_replica(
                "experimental_assign_to_logical_device", "logical_device_id", logical_device_id
            )
        return tf.identity(tensor)

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> tf.Tensor:
        """Splits a tensor over the devices of its replica; there is one, so the only split is into one part.

        Args:
            tensor: any tensor.
            partition_dimensions: for each dimension of the tensor the number of parts, 1.

        Returns:
            The tensor.

        Raises:
            DeviceError: more parts.
        """
        tensor = tf.convert_to_tensor(tensor)
        parts = list(map(_as_int, partition_dimensions))
        if math.prod(parts) != 1 or len(parts) != tensor.shape.rank:
            raise DeviceError.one_a_replica(
                "experimental_split_to_logical_devices", "partition_dimensions", partition_dimensions
            )
        return tf.identity(tensor)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> tf.Tensor:
        """Copies a tensor to all devices of its replica, which is one; returns the tensor."""
        return tf.identity(tensor)


def _as_int(value: Any) -> int:
    """An int; -1 for anything else, which an error then names."""
    try:
        return operator.index(value)
    except TypeError:
        return -1
