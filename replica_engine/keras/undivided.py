"""Metrics for which every replica computes the whole batch, because their variables are no sums over samples.

The values of a metric's variables are added up over replicas. That is right where each update adds something to each
variable: then a sum over shards is the sum over the batch. It is wrong for a maximum, for the last value, for a running
mean. Keras' own metrics are known. A metric of the user's own is looked at where its `update_state` is traced, in the
first step. If it does more than add, that trace is given up, and the steps of the model compute whole batches from then
on, of which the result of replica 0 counts.

A step that runs eagerly cannot be given up: it has updated weights before it comes to the metrics. So a model with
metrics of the user's own computes whole batches there at once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras

from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import sums
from replica_engine.keras.shard import current_shard
from replica_engine.process.interrupts import held_off_once

_logger = logging.getLogger("replica_engine")
_lock = threading.Lock()
_found: weakref.WeakValueDictionary[int, keras.metrics.Metric] = weakref.WeakValueDictionary()  # by their ids


class NotASum(BaseException):
    """A step is given up while it is traced: its shards would not add up. The step of the whole batch takes its place.

    No user sees it, and no `except Exception` on its way takes it for an error, neither of the user's nor of ours.
    """


def needs_whole_batches(model: keras.Model) -> bool:
    """Whether a loss or metric of the model is of the batch as a whole, as far as is known."""
    if keras_model.mixes_samples(model):
        return True
    return bool(_found) and any(id(metric) in _found for metric in keras_model.metrics_of(model))


def has_own_metrics(model: keras.Model) -> bool:
    """Whether the model has metrics that are not Keras' own."""
    return bool(sums.own_metrics_of(model))


def looked_at(metric: keras.metrics.Metric) -> Callable[..., Any]:
    """The `update_state` of a metric of the user's own; it gives up a step of a shard whose values do not add up."""
    own = metric.update_state

    def update_state(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)  # the first call may make variables
        share = current_shard()
        if share is None or share.whole or share.replicas == 1 or sums.is_looking():
            return result
        updates = held_off_once().around(lambda: sums.updates_of(metric, own, args, kwargs, lambda: ""))
        if any(update.kind != sums.SUM for update in updates):
            with _lock:
                if id(metric) not in _found:
                    _found[id(metric)] = metric
                    _logger.info("every replica computes whole batches: the metric %r does not only add", metric.name)
            raise NotASum(metric.name)
        return result

    return update_state
