"""One step of a model on one replica, in replica context: of a share of the batch, or of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from replica_engine.keras.shard import Shard


def run_step(model: keras.Model, name: str, data: Any, share: Shard) -> dict[str, Any]:
    """Runs `train_step` or `test_step` of a model.

    Args:
        model: whose step it is.
        name: of the step.
        data: this replica's samples.
        share: what part of the batch they are.

    Returns:
        What the step returned, of all replicas together, equal on all replicas.
    """
    counted = metric_variables(model)
    before = [tf.identity(variable.value) for variable in counted] if share.whole else []
    with share.entered():
        logs = getattr(model, name)(data)
    for variable, value in zip(counted, before, strict=False):
        # All replicas computed the same samples, which count once.
        is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        variable.assign(tf.where(is_first, variable.value, value))
    return across_replicas(model, Logs(logs, share), share.weight())


class Logs:
    """What a step returned.

    Args:
        returned: by the step; dictionaries in it are opened, as Keras does.
        share: of which it was.

    Attributes:
        values: the numbers, by name.
        metrics: of those that are the result of a metric, the metric, and the key of the number in its result.
    """

    def __init__(self, returned: Any, share: Shard):
        flat = _flat(returned) if isinstance(returned, Mapping) else {"loss": returned}
        self.metrics: dict[str, tuple[keras.metrics.Metric, str | None]] = {}
        self.values: dict[str, Any] = {}
        for key, value in flat.items():
            found = [(metric, part) for result, metric, part in share.results if result is value]
            if found:
                self.metrics[key] = found[-1]
            if value is not None:
                self.values[key] = tf.reduce_mean(tf.cast(tf.convert_to_tensor(value), "float32"))


def across_replicas(model: keras.Model, logs: Logs, weight: Any) -> dict[str, Any]:
    """What a step returned, of all replicas together: results of metrics, and means of everything else.

    Args:
        model: whose step it was.
        logs: what it returned.
        weight: what this replica's means count.
    """
    context = tf.distribute.get_replica_context()
    own = {key: value * weight for key, value in logs.values.items()}
    counted = metric_variables(model)
    values = [tf.identity(variable.value) for variable in counted]
    sums, means = context.all_reduce(tf.distribute.ReduceOp.SUM, (values, own))
    with keras.StatelessScope(state_mapping=list(zip(counted, sums, strict=True))):
        results = {id(metric): metric.result() for metric, _ in logs.metrics.values()}
    for key, (metric, part) in logs.metrics.items():
        result = results[id(metric)]
        means[key] = tf.convert_to_tensor(result if part is None else result[part])
    return means


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables that replicas count in, each for itself, to be added up."""
    return [
        variable
        for variable in model.metrics_variables
        if variable.synchronization == "on_read" and variable.aggregation == "sum"
    ]


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in logs.items():
        flat.update(_flat(value) if isinstance(value, Mapping) else {key: value})
    return flat
