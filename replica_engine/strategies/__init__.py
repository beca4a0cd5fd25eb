"""Strategies, and the base class for your own strategies.

- `mirrored`: MirroredStrategy and its extended half.
- `multi_worker`: MultiWorkerMirroredStrategy, its extended half, and its place in a job of several processes.
- `tpu`: TPUStrategy. `compiled_backend`: its backend and its extended half. `device_variables`: its variables.
  `variable_layouts`: how they are divided over the devices of a replica. `worker_values`: values over several workers.
- `on_backend`: the strategy half of all of them: what users call, checked and passed to the backend.
- `extended`: ExtendedHooks, the hooks that all have in common, and what prepares values for TensorFlow's reductions;
  ReplicaThreads, which runs the replicas of any extended half on this library's threads.
- `device_loops`: many steps in a launch. `multi_step`: the context object that carries the outputs of such steps.
- `argument_checks`: checks device names and the arguments of `run` and `reduce`, and says what to write instead.
- `keras_scopes`: Keras models and optimizers that are made in a scope.

`MultiWorkerMirroredExtended` is TensorFlow's own extended half; put `ReplicaThreads` in front of it.
"""

import importlib
import os

from replica_engine.strategies.extended import ReplicaThreads
from replica_engine.strategies.mirrored import MirroredExtended, MirroredStrategy
from replica_engine.threads.replica_run import ReplicaOptions
from replica_engine.upstream.distribute import MultiWorkerMirroredExtended

__all__ = ["MirroredExtended", "MirroredStrategy", "MultiWorkerMirroredExtended", "ReplicaOptions", "ReplicaThreads"]

if os.environ.get("REPLICA_ENGINE_DEBUG") == "1":
    importlib.import_module("replica_engine.debugging").debug()  # it stands above the strategies
