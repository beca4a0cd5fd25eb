"""What programs ask a `tf.distribute.TPUStrategy` about its TPUs, answered for devices of any PJRT platform.

`replica_engine.TPUStrategy` is a subclass of TensorFlow's class. So a program that checks `isinstance(strategy,
tf.distribute.TPUStrategy)` takes the branch that it takes on TPUs, and in that branch asks the strategy for more.
TensorFlow's class reads the answers from a TPU system, which does not exist here. The answers here hold on every
platform:

- A host is a worker, which is a process; one has all replicas, unless the job has several.
- A replica has as many logical devices as `cores_per_replica` says. XLA's partitioner, which divides the values of a
  replica, chooses on which of them an op runs; a split of a tensor says how it is divided.
- No embedding accelerator exists, also on real TPUs, because TensorFlow's embedding ops need TensorFlow's own TPU
  runtime. Layers that ask for one (`tensorflow_recommenders.layers.embedding.TPUEmbedding`) then do lookups with ops
  that XLA compiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import autograph
from replica_engine.errors import DeviceError
from replica_engine.errors.base import shown
from replica_engine.xla.body import check_mode, in_body
from replica_engine.xla.constraints import as_int, check, devices_of_replica, divided, whole


class LogicalDevices(tf.distribute.TPUStrategy):
    """`tf.distribute.TPUStrategy`, with its model parallelism on devices of any platform.

    In a replica, these methods say how XLA divides a value over the devices of the replica. Elsewhere they return it.
    """

    @autograph.artifact
    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> tf.Tensor:
        """Names a device of the replica for a tensor. XLA's partitioner chooses the devices that compute it.

        Args:
            tensor: any tensor.
            logical_device_id: the number of the device in its replica, from 0.

        Returns:
            The tensor.

        Raises:
            DeviceError: a replica has no device of this number; or the strategy was made with
                `experimental_spmd_xla_partitioning=True`.
        """
        if self._only_splits:
            raise DeviceError(
                "experimental_assign_to_logical_device was called under a strategy that was made with "
                "experimental_spmd_xla_partitioning=True: there tensors are split over the logical devices, with "
                "experimental_split_to_logical_devices, and never assigned to one."
            )
        check("experimental_assign_to_logical_device", logical_device_id, self.extended.device_group.devices_each)
        return tf.identity(tensor)

    @autograph.artifact
    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> tf.Tensor:
        """Splits a tensor over the devices of its replica.

        Args:
            tensor: any tensor.
            partition_dimensions: the number of parts for each dimension of the tensor. Their product is the number of
                the replica's devices, and each divides the size of its dimension.

        Returns:
            The tensor.

        Raises:
            DeviceError: the numbers are not such ones.
        """
        tensor = tf.convert_to_tensor(tensor)
        parts = list(map(as_int, partition_dimensions))
        count = self.extended.device_group.devices_each
        if (
            min(parts, default=1) < 1
            or math.prod(parts) != count
            or len(parts) != tensor.shape.rank
            or any(size is not None and size % number for size, number in zip(tensor.shape, parts, strict=True))
        ):
            raise DeviceError(
                "experimental_split_to_logical_devices was called with "
                f"partition_dimensions={shown(partition_dimensions)} for a tensor of shape {tensor.shape}. Give one "
                f"number for each dimension, which divides its size, with the product {count}: "
                f"{devices_of_replica(count)}"
            )
        return tf.identity(tensor) if in_body() is None else divided(tensor, parts)

    @autograph.artifact
    def experimental_replicate_to_logical_devices(self, tensor: Any) -> tf.Tensor:
        """Copies a tensor to all devices of its replica. Returns the tensor."""
        check_mode()
        tensor = tf.convert_to_tensor(tensor)
        return tf.identity(tensor) if in_body() is None else whole(tensor)
