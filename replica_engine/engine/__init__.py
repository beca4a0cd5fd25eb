"""The engine: replica threads and the sync points where they meet. Standard library only.

- `event`: the binary event that threads hand each other.
- `thread`: one persistent replica thread, parked between jobs.
- `group`: the N threads of a run, and the pool that leases them.
- `sync_point`: where a replica met the others, the record of it, and the states it goes through.
- `observer`: draws a run on a timeline.
- `replica`: one replica in one run.
- `run`: the protocol. Read this one first.

It knows nothing of TensorFlow: a replica's body is any function, a merge any function of N requests.
"""

from replica_engine.engine.group import GroupPool, SyncGroup
from replica_engine.engine.replica import Replica, current_replica
from replica_engine.engine.run import Run
from replica_engine.engine.sync_point import State, SyncPoint, SyncRecord
from replica_engine.engine.thread import ReplicaThread

__all__ = [
    "GroupPool",
    "Replica",
    "ReplicaThread",
    "Run",
    "State",
    "SyncGroup",
    "SyncPoint",
    "SyncRecord",
    "current_replica",
]
