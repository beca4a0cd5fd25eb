"""MultiWorkerMirroredStrategy: replica threads in several processes, over TensorFlow's collectives.

- `strategy`: the strategy and its extended half.
- `job`: the job that this process is a worker of, and how its failure ends collectives.
- `launches`: what this worker launches, for the comparison with the others.
"""

from replica_engine.strategies.multi_worker.strategy import MultiWorkerExtended, MultiWorkerMirroredStrategy

__all__ = ["MultiWorkerExtended", "MultiWorkerMirroredStrategy"]
