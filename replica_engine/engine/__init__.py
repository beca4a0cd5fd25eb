"""The engine: replica threads and the sync points where they meet. Standard library only.

- `run`: the protocol. Read this one first.
- `replica_state`: one replica in one run, its states, and its track on a timeline.
- `sync_point`: a sync point, and the record of the last ones.
- `thread_pool`: persistent replica threads, which sleep between jobs, and the pool that leases N of them to a run.

The engine does not know TensorFlow: a replica's body can be any function, and a merge any function of N requests.
"""

from replica_engine.engine.replica_state import Outcome, Replica, State, current_replica
from replica_engine.engine.run import ErrandsFailed, Run
from replica_engine.engine.sync_point import SyncPoint, SyncRecord
from replica_engine.engine.thread_pool import GroupPool, ReplicaThread, SyncGroup

__all__ = ["ErrandsFailed", "Outcome", "Replica", "Run", "current_replica"]
__all__ += ["GroupPool", "ReplicaThread", "State", "SyncGroup", "SyncPoint", "SyncRecord"]
