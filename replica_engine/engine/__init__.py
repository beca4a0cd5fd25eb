"""The engine: replica threads and the sync points where they meet. Standard library only.

- `thread`: one persistent replica thread, which sleeps between jobs, and the event with which threads wake each other.
- `group`: the N threads of a run, and the pool that leases them to runs.
- `sync_point`: a sync point, the record of the last ones, and the states of a replica.
- `observer`: draws a run on a timeline.
- `replica`: one replica in one run.
- `run`: the protocol. Read this one first.

The engine does not know TensorFlow: a replica's body can be any function, and a merge any function of N requests.
"""

from replica_engine.engine.group import GroupPool, SyncGroup
from replica_engine.engine.replica import Outcome, Replica, current_replica
from replica_engine.engine.run import ErrandsFailed, Run
from replica_engine.engine.sync_point import State, SyncPoint, SyncRecord
from replica_engine.engine.thread import ReplicaThread

__all__ = [
    "ErrandsFailed",
    "GroupPool",
    "Outcome",
    "Replica",
    "ReplicaThread",
    "Run",
    "State",
    "SyncGroup",
    "SyncPoint",
    "SyncRecord",
    "current_replica",
]
