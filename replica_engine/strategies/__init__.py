"""Strategies, and the base class for your own strategies.

- `mirrored`: MirroredStrategy and its extended half.
- `multi_worker`: MultiWorkerMirroredStrategy, its extended half, and its place in a job of several processes.
- `tpu`: TPUStrategy and its extended half; the replica context of a compiled body; variables on the devices.
- `backend`: OnBackend, the strategy half of all; OnReplicaThreads, the one for replicas on threads.
- `extended`: ExtendedHooks, the hooks that all have in common, and what prepares values for TensorFlow's reductions;
  ReplicaThreads, which runs the replicas of any extended half on this library's threads.
- `multi_step`: the context object of a device loop, which carries the outputs of its steps.
- `validation`: checks the arguments of `run` and `reduce`. `call_advice`: what to write for a call of `run` that does
  not fit its function. `devices`: parses and checks device names.
- `accumulation`: Keras' `gradient_accumulation_steps` on replicas.
- `models`: checks and errors for Keras models that are built under a scope.

`MultiWorkerMirroredExtended` is TensorFlow's own extended half; put `ReplicaThreads` in front of it.
"""

from replica_engine._tf.distribute import MultiWorkerMirroredExtended
from replica_engine.strategies.extended import ReplicaThreads
from replica_engine.strategies.mirrored import MirroredExtended, MirroredStrategy
from replica_engine.threads.call import ReplicaOptions

__all__ = ["MirroredExtended", "MirroredStrategy", "MultiWorkerMirroredExtended", "ReplicaOptions", "ReplicaThreads"]
