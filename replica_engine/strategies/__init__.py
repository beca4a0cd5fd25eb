"""Strategies, and the base class for your own strategies.

- `mirrored`: MirroredStrategy and its extended half.
- `tpu`: TPUStrategy and its extended half.
- `base`: ReplicaThreads, which puts any extended half on this library's threads.
- `backend`: what both backends offer to the layers above.
- `devices`: device names, read and checked.

`MultiWorkerMirroredExtended` is TensorFlow's own extended half; put `ReplicaThreads` in front of it.
"""

from replica_engine._tf.distribute import MultiWorkerMirroredExtended
from replica_engine.strategies.base import ReplicaThreads
from replica_engine.strategies.mirrored import MirroredExtended, MirroredStrategy
from replica_engine.threads.call import ReplicaOptions

__all__ = ["MirroredExtended", "MirroredStrategy", "MultiWorkerMirroredExtended", "ReplicaOptions", "ReplicaThreads"]
