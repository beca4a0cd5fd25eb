"""What programs ask a `tf.distribute.TPUStrategy` about its TPUs, answered for devices of any PJRT platform.

`replica_engine.TPUStrategy` is a subclass of TensorFlow's class. So a program that checks `isinstance(strategy,
tf.distribute.TPUStrategy)` takes the branch that it takes on TPUs, and in that branch asks the strategy for more.
TensorFlow's class reads the answers from a TPU system, which does not exist here. The answers here hold on every
platform:

- A host is a worker, which is a process; one has all replicas, unless the job has several.
- Each replica has one device. TensorFlow's model parallelism (several logical devices per replica) then has no effect.
- No embedding accelerator exists, also on real TPUs, because TensorFlow's embedding ops need TensorFlow's own TPU
  runtime. Layers that ask for one (`tensorflow_recommenders.layers.embedding.TPUEmbedding`) then do lookups with ops
  that XLA compiles.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.errors import DeviceError
from replica_engine.xla.graph_mode import refuses_graphs
from replica_engine.xla.logical_devices import as_int, check_only, logical_device


class TPUFacts:
    """Attributes of the extended half of TensorFlow's TPUStrategy. Put it before an extended class.

    Attributes:
        steps_per_run: how many steps one launch of a device loop runs if the call does not say.
    """

    steps_per_run = 1

    @property
    def num_hosts(self) -> int:
        """The number of workers: processes with devices."""
        return self.device_group.replicas // self.device_group.size  # type: ignore[attr-defined]

    @property
    def num_replicas_per_host(self) -> int:
        """The number of replicas of each worker."""
        return self.device_group.size  # type: ignore[attr-defined]

    @property
    def tpu_hardware_feature(self) -> Any:
        """A `tf.tpu.experimental.HardwareFeature` that has no embedding accelerator."""
        return distribute.hardware_without_embeddings()

    def experimental_logical_device(self, logical_device_id: int) -> contextlib.AbstractContextManager[None]:
        """Places variables and ops on a device of their replica; the only device is 0.

        Raises:
            DeviceError: `logical_device_id` is not 0.
        """
        return logical_device(logical_device_id)


@refuses_graphs(
    "experimental_assign_to_logical_device",
    "experimental_replicate_to_logical_devices",
    "experimental_split_to_logical_devices",
)
class OneLogicalDevice:
    """The model parallelism of `tf.distribute.TPUStrategy`, for one device per replica. Put it before that class."""

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> tf.Tensor:
        """Places a tensor on a device of its replica; the only device is 0.

        Args:
            tensor: any tensor.
            logical_device_id: 0.

        Returns:
            The tensor.

        Raises:
            DeviceError: `logical_device_id` is not 0.
        """
        check_only("experimental_assign_to_logical_device", logical_device_id)
        return tf.identity(tensor)

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> tf.Tensor:
        """Splits a tensor over the devices of its replica. A replica has one device, so each dimension stays whole.

        Args:
            tensor: any tensor.
            partition_dimensions: the number of parts for each dimension of the tensor; each must be 1.

        Returns:
            The tensor.

        Raises:
            DeviceError: a number of parts is not 1, or there are more or fewer numbers than dimensions.
        """
        tensor = tf.convert_to_tensor(tensor)
        parts = list(map(as_int, partition_dimensions))
        if math.prod(parts) != 1 or len(parts) != tensor.shape.rank:
            raise DeviceError.one_a_replica(
                "experimental_split_to_logical_devices", "partition_dimensions", partition_dimensions
            )
        return tf.identity(tensor)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> tf.Tensor:
        """Copies a tensor to all devices of its replica. A replica has one device, so this returns the tensor."""
        return tf.identity(tensor)
