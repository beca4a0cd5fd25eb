"""TensorFlow's own distributed values, strategies and collectives, which the strategies here build on.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

# The extended half of tf.distribute.MultiWorkerMirroredStrategy, for running it on replica threads.
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended as MultiWorkerMirroredExtended,
)

# Options: the public tf.distribute.experimental.CommunicationOptions makes these.
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys

# canonicalize, resolve: full names of devices, as TensorFlow's values and datasets spell them.
from tensorflow.python.distribute.device_util import canonicalize, resolve

# StrategyExtendedV1 is the base of every strategy's extended half; public only under tf.compat.v1, without
# the hooks.
from tensorflow.python.distribute.distribute_lib import StrategyExtendedV1

# value_container: the distributed variable that a component belongs to.
from tensorflow.python.distribute.distribute_utils import value_container

# The extended half of tf.distribute.MirroredStrategy: variables, datasets, updates, reductions.
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

# DistributedVariable, Mirrored and PerReplica: what `run` returns and variables are; only their common
# base, tf.distribute.DistributedValues, is public.
from tensorflow.python.distribute.values import (
    DistributedValues,
    DistributedVariable,
    Mirrored,
    PerReplica,
)

# _UnreadVariable: what `assign` returns in a graph; it is grouped as a value, not as its variable.
from tensorflow.python.ops.resource_variable_ops import _UnreadVariable as UnreadVariable

__all__ = [
    "CollectiveKeys",
    "DistributedValues",
    "DistributedVariable",
    "Mirrored",
    "MirroredExtended",
    "MultiWorkerMirroredExtended",
    "PerReplica",
    "StrategyExtendedV1",
    "UnreadVariable",
    "UniqueCollectiveKeys",
    "canonicalize",
    "resolve",
    "value_container",
]

_GROUP_KEYS = itertools.count(1_000_000)  # far above the keys that TensorFlow's own strategies start from
_LOCK = threading.Lock()


class UniqueCollectiveKeys(CollectiveKeys):
    """Collective keys that no other strategy in the process uses.

    TensorFlow's strategies all start at group key 1, and a second one of another size fails with "joining
    a group with size 2, but that group has size 4".
    """

    def _get_new_group_key(self, devices: Any) -> int:
        with _LOCK:
            self._group_key = next(_GROUP_KEYS)
        return super()._get_new_group_key(devices)

    def __deepcopy__(self, memo: dict) -> UniqueCollectiveKeys:
        return UniqueCollectiveKeys()
