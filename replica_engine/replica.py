"""A facade: names for people who write their own strategy, or who call replicas of any strategy.

`replica_engine.strategies.ReplicaThreads` is the base class of such a strategy. These names are the arguments and
results of its hooks. See docs/custom_strategy.md.
"""

from replica_engine.diagnostics.flight_record import SyncPointRecord
from replica_engine.threads.replica_context import MergeRequest, ReplicaContext
from replica_engine.threads.replica_run import ReplicaOptions, call_for_each_replica, sync_points
from replica_engine.values.regroup import regroup, select

__all__ = [
    "MergeRequest",
    "ReplicaContext",
    "ReplicaOptions",
    "SyncPointRecord",
    "call_for_each_replica",
    "regroup",
    "select",
    "sync_points",
]
