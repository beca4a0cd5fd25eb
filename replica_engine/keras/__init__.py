"""Keras models on N replicas.

- `replication`: `replicate_model`, the one line that a user writes.
- `lent_model`: the replicated model, a second object of the same model, and the state that only this one has.
- `scoped_model`: a model that was made in `strategy.scope()`, whose variables are the replicas' own.
- `lent_variables`: the variables that the original, the replicated model and all replicas share.
- `shard`: the part of a batch that a replica computes, its weight in the whole batch, and what a step may do to its
  sums; `shard_step`: a step on it.
- `train_function`: what Keras calls, which runs that step on all replicas, on the next batches; `unequal_shards`: the
  same in one compiled program, for shards of two sizes; `late_logs`: its logs, on devices that may still run the step.
- `shard_hooks`: changes the parts of Keras that must know about shards, and tells which metrics need whole batches.
- `replica_optimizer`: reduces the gradients of all replicas and applies them; in custom loops too.
- `backup`: `BackupAndRestore`, which continues a `fit` that was killed.

A `fit` in a scope goes from `strategies.keras_scopes`, which Keras calls through hooks, to `scoped_model` and
`train_function`; that of a replicated model from `replication` to `lent_model` and `train_function`.

Keras is imported when a name that needs it is first used. `CrossReplicaOptimizer` is registered as serializable then.
"""

from typing import TYPE_CHECKING, Any

from replica_engine.upstream import versions

if TYPE_CHECKING:
    from replica_engine.keras.backup.backup_and_restore import BackupAndRestore
    from replica_engine.keras.replica_optimizer import CrossReplicaOptimizer
    from replica_engine.keras.replication import replicate_model

__all__ = ["BackupAndRestore", "CrossReplicaOptimizer", "replicate_model"]

_HOME = {
    "BackupAndRestore": "replica_engine.keras.backup.backup_and_restore",
    "CrossReplicaOptimizer": "replica_engine.keras.replica_optimizer",
    "replicate_model": "replica_engine.keras.replication",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(versions.imported(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
