"""A replica's share of a batch, and what a number that it computes counts for in the whole.

One device computes the mean of its batch. Replica r has n_r of the n samples and computes the mean of those, and the
mean of all is the sum of `n_r / n` times that. So a loss, a gradient or a mean of replica r counts `weight = n_r / n`,
and what comes of all replicas is what one device computes, whatever the sizes of the shares are.

Where a batch cannot be shared out (fewer samples than replicas, say) every replica computes the *whole* batch, and what
replica 0 computed counts.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


@dataclasses.dataclass
class Shard:
    """What one replica has of a batch.

    Attributes:
        rows: how many samples it has.
        total: how many all replicas have.
        replicas: how many replicas there are.
        whole: whether every replica has all samples.
        scaled: the ids of optimizers that have weighed the loss of this step.
        results: what metrics returned in this step, with the metric, and the key where that returned a dictionary.
        deferred: updates that wait for the end of a branch, with their gradients; None where they need not.
    """

    rows: Any
    total: Any
    replicas: int
    whole: bool = False
    scaled: set[int] = dataclasses.field(default_factory=set)
    results: list[tuple[Any, Any, str | None]] = dataclasses.field(default_factory=list)
    deferred: list[tuple[Any, list[Any], Any]] | None = None

    def fraction(self, dtype: Any = "float32") -> Any:
        """How much of the batch this replica has."""
        if self.whole:
            return tf.ones([], dtype)
        return tf.cast(self.rows, dtype) / tf.cast(self.total, dtype)

    def weight(self, dtype: Any = "float32") -> Any:
        """What a mean over this replica's samples counts in the mean over all."""
        return self.once(dtype) if self.whole else self.fraction(dtype)

    def once(self, dtype: Any = "float32") -> Any:
        """What a sum over this replica's samples counts in the sum over all."""
        if not self.whole:
            return tf.ones([], dtype)
        return tf.cast(tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0), dtype)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What runs inside computes this share."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


def current_shard() -> Shard | None:
    """The share that is being computed; None outside of the steps of a replicated model."""
    return _current.get()


_current: contextvars.ContextVar[Shard | None] = contextvars.ContextVar("replica_engine_share", default=None)
