"""Keras models on N replicas.

- `replicate`: `replicate_model`, the one line that a user writes.
- `choice`: which strategy is faster for a model.
- `model`: the replicated model, a second object of the same model; `replicas`: what it has that the original has not.
- `variables`: the variables that both have, and all replicas.
- `shard`: a replica's share of a batch, and what it counts for.
- `steps`: one step of a replica; `on_threads` and `on_xla` run it on all of them, `compiling` says that it takes long.
- `hooks`, `losses`: what of Keras takes shares into account.
- `optimizer`: gradients of all replicas, reduced and applied; `cross_replica_optimizer`: that for custom loops.
"""

from replica_engine.keras.cross_replica_optimizer import CrossReplicaOptimizer
from replica_engine.keras.replicate import replicate_model

__all__ = ["CrossReplicaOptimizer", "replicate_model"]
