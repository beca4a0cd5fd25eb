"""What a replica is to TensorFlow.

- `call`: calling a function once per replica. Read this one first.
- `context`: the replica context, and its merge call.
- `inherited`: what a replica thread takes over from the caller's.
- `lift`: a tf.function goes around the run, not into it.
- `variables`: variables created inside a run.
- `regroup`, `structure`: N values to one distributed value and back.
- `rows`: the samples of a batch.
- `location`: the user's file and line.
"""

from replica_engine.replica.call import ReplicaOptions, call_for_each_replica
from replica_engine.replica.context import MergeRequest, ReplicaContext
from replica_engine.replica.regroup import regroup, select

__all__ = ["MergeRequest", "ReplicaContext", "ReplicaOptions", "call_for_each_replica", "regroup", "select"]
