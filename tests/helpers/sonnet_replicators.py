"""Sonnet's replicators on our strategies, as a user writes them.

Sonnet's optimizers take its own replicators only, so a program has a class that is both.
"""

from collections.abc import Callable

import sonnet as snt
import tensorflow as tf

import replica_engine
from helpers.versions import HAS_XLA
from replica_engine import logical_devices

REPLICAS = 2


class Mirrored(replica_engine.MirroredStrategy, snt.distribute.Replicator):
    """Each replica on a thread."""


REPLICATORS: dict[str, Callable[[], tf.distribute.Strategy]] = {
    "Mirrored": lambda: Mirrored(logical_devices(8)[:REPLICAS])
}

if HAS_XLA:

    class Xla(replica_engine.TPUStrategy, snt.distribute.TpuReplicator):
        """All replicas in one compiled program."""

    REPLICATORS["Xla"] = lambda: Xla(num_cores=REPLICAS)
