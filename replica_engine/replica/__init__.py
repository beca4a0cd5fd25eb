"""What a replica is to TensorFlow.

- `call`: calling a function once per replica. Read this one first.
- `context`: the replica context, and its merge call.
- `inherited`: what a replica thread takes over from the caller's.
- `lift`: a tf.function goes around the run, not into it.
- `variables`: variables created inside a run.
- `gradients`: of an all-reduce in a graph.
- `regroup`, `structure`: N values to one distributed value and back.
- `rows`: the samples of a batch.
- `sync_record`: the record of sync points as data; do the replicas bring the like?
- `failed_run`: what is left of a run that failed.
- `location`, `tracebacks`: the user's file and line, and frames.
- `forked`: where nothing can run.
"""

from replica_engine._compat import profiler
from replica_engine.replica.call import ReplicaOptions, call_for_each_replica, sync_points
from replica_engine.replica.context import MergeRequest, ReplicaContext
from replica_engine.replica.regroup import regroup, select
from replica_engine.replica.sync_record import SyncPointRecord
from replica_engine.telemetry.timeline import Profiler, set_profiler

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

set_profiler(Profiler(profiler.is_running, profiler.Trace))
