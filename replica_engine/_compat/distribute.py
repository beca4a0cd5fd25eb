"""TensorFlow's own distributed values, strategies and collectives, which the strategies here build on.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

# The extended half of tf.distribute.MultiWorkerMirroredStrategy, for running it on replica threads.
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended as MultiWorkerMirroredExtended,
)

# resolve: the full name of a device, as TensorFlow's values and datasets spell it.
from tensorflow.python.distribute.device_util import resolve

# value_container: the distributed variable that a component belongs to.
from tensorflow.python.distribute.distribute_utils import value_container

# The extended half of tf.distribute.MirroredStrategy: variables, datasets, updates, reductions.
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

# DistributedVariable and PerReplica: what variables are and `run` returns. Of the values only the common base,
# tf.distribute.DistributedValues, is public; this one has the values of a replica.
from tensorflow.python.distribute.values import DistributedValues, DistributedVariable, PerReplica

# _UnreadVariable: what `assign` returns in a graph; it is grouped as a value, not as its variable.
from tensorflow.python.ops.resource_variable_ops import _UnreadVariable as UnreadVariable

__all__ = [
    "DistributedValues",
    "DistributedVariable",
    "MirroredExtended",
    "MultiWorkerMirroredExtended",
    "PerReplica",
    "UnreadVariable",
    "resolve",
    "value_container",
]
