"""MultiWorkerMirroredStrategy: replica threads in several processes, over jaxlib's Gloo, or TensorFlow's NCCL on GPUs.

- `strategy`: the strategy and its extended half.
- `job`: the job that this process is a worker of, and how its failure ends collectives.
- `launches`: tells the job which collectives this worker launches, for the comparison with the other workers.
- `reduction`: reductions and gathers of CPU devices, inside each worker first.
- `saving`: which worker writes files, and where the workers meet.
"""

from replica_engine.strategies.multi_worker.strategy import MultiWorkerExtended, MultiWorkerMirroredStrategy

__all__ = ["MultiWorkerExtended", "MultiWorkerMirroredStrategy"]
