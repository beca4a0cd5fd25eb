"""TPUStrategy: the replica body, compiled to one program that runs on N devices.

- `strategy`: TPUStrategy. `extended`: its extended half. `backend`: compiles and runs what the replicas run.
- `variables`: distributed variables whose values live on the devices.
- `workers`: what is different where the job has several workers.
- `device_loops`: `run_steps`.
"""

from replica_engine.strategies.tpu.extended import TPUExtended
from replica_engine.strategies.tpu.strategy import TPUStrategy

__all__ = ["TPUExtended", "TPUStrategy"]
