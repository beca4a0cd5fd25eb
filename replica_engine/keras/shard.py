"""The shard: the part of a batch that one replica computes, and the weight of its results in the whole batch.

One device computes the mean over its batch of n samples. Replica r has n_r of these samples and computes the mean over
them. The sum over the replicas of `n_r / n` times these means is the mean over the batch. So a loss, a gradient or a
mean of replica r counts with `weight = n_r / n`, and the replicas together compute what one device computes, whatever
the sizes of their shards are.

Some batches cannot be split, for example a batch with fewer samples than replicas. Then every replica computes
the *whole* batch, and only the result of replica 0 counts.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine.process import scoped
from replica_engine.values import rows

_logger = logging.getLogger("replica_engine")


@dataclasses.dataclass
class Shard:
    """The part of a batch that one replica computes.

    Attributes:
        rows: the number of samples of this replica.
        total: the number of samples of all replicas.
        replicas: the number of replicas.
        whole: whether every replica has all samples.
        results: the metric results of this step, each as (result, metric, key); the key is None unless the metric
            returned a dictionary.
        deferred: optimizer updates, with their gradients, that wait for the end of a branch; None where updates need
            not wait.
        longer: tells rows of tables apart that this number of samples leaves unclear; None where the ops must tell.
        is_own: whether a method of the user's own uses the loss of `compile`: the step, or `compute_loss`.
        sums: whether this step has a sum of losses whose use must be looked at.
        gradients: the gradients that tapes have given in an eager step.
        updates: whether an optimizer has got gradients.
    """

    rows: Any
    total: Any
    replicas: int
    whole: bool = False
    results: list[tuple[Any, Any, str | None]] = dataclasses.field(default_factory=list)
    deferred: list[tuple[Any, list[Any], Any]] | None = None
    longer: Longer | None = None
    is_own: bool = False
    sums: bool = False
    gradients: list[Any] = dataclasses.field(default_factory=list)
    updates: bool = False

    def fraction(self, dtype: Any = "float32") -> Any:
        """The fraction of the batch that this replica has, as a scalar of `dtype`."""
        if self.whole:
            return tf.ones([], dtype)
        return tf.cast(self.rows, dtype) / tf.cast(self.total, dtype)

    def weight(self, dtype: Any = "float32") -> Any:
        """The weight of a mean over this replica's samples in the mean over all samples, as a scalar of `dtype`."""
        return self.once(dtype) if self.whole else self.fraction(dtype)

    def once(self, dtype: Any = "float32") -> Any:
        """The weight of a sum over this replica's samples in the sum over all samples, as a scalar of `dtype`."""
        if not self.whole:
            return tf.ones([], dtype)
        return tf.cast(tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0), dtype)

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """Makes this shard the current one for the code inside the `with` block."""
        return scoped.variable(_current, self)


class Longer:
    """Finds out which rows of tables one device has for each sample, from a step on one more sample.

    Indices that are constants in the graph of a step may be repeated for each sample (`zeros_like(words)`), or be as
    many by chance. With one more sample, the former are others.

    Args:
        trace: traces the step on one more sample, in a graph that is thrown away; returns what the indices of each
            lookup depend on, for each gradient of each update.
    """

    def __init__(self, trace: Callable[[], list[list[list[rows.Origin | None]]]]):
        self._trace = trace
        self._updates: list[list[list[rows.Origin | None]]] | None = None
        self._next = 0

    def tell(self, grads: Sequence[Any], count: Any) -> None:
        """Marks the indices of each lookup in the gradients of the next update, of `count` samples."""
        number, self._next = self._next, self._next + 1
        for place, grad in enumerate(grads):
            if not isinstance(grad, tf.IndexedSlices):
                continue
            parts = rows.pieces(grad)
            if not any(rows.is_unclear(part.indices, count) for part in parts):
                continue
            if self._updates is None:
                self._updates = self._traced()
            others = self._updates[number][place] if number < len(self._updates) else []
            if len(others) == len(parts):
                for part, other in zip(parts, others, strict=True):
                    own = rows.origin(part.indices)
                    rows.mark(part.indices, own if own == other else None)

    def _traced(self) -> list[list[list[rows.Origin | None]]]:
        try:
            return self._trace()
        except Exception as error:
            # The step has collectives between its lookups, or takes this number of samples only: the ops must tell.
            _logger.debug("A step on one more sample cannot be traced: %s", error)
            return []


def current_shard() -> Shard | None:
    """The shard that is being computed; None outside the steps of a replicated model."""
    return _current.get()


_current: contextvars.ContextVar[Shard | None] = contextvars.ContextVar("replica_engine_share", default=None)
