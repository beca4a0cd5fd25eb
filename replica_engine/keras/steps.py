"""One step of a model on one replica, in replica context, on a shard of the batch or on the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf.keras import metrics as keras_metrics
from replica_engine.keras.shard import Shard


def run_step(model: keras.Model, name: str, data: Any, share: Shard) -> dict[str, Any]:
    """Runs `train_step` or `test_step` of a model.

    Args:
        model: the model whose step runs.
        name: the name of the step.
        data: this replica's samples.
        share: the part of the batch that these samples are.

    Returns:
        The logs of the step over all replicas; they are equal on all replicas.
    """
    counted = metric_variables(model)
    before = [tf.identity(variable.value) for variable in counted] if share.whole else []
    with share.entered():
        logs = getattr(model, name)(data)
    for variable, value in zip(counted, before, strict=False):
        # All replicas computed the same samples, which must count once.
        is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        variable.assign(tf.where(is_first, variable.value, value))
    return across_replicas(model, Logs(logs, share), share.weight())


class Logs:
    """The logs that a step returned on one replica.

    Args:
        returned: the return value of the step; nested dictionaries are flattened, as in Keras.
        share: the shard that the step computed.

    Attributes:
        values: the numbers, by name.
        metrics: for each number that is the result of a metric: the metric, and the key of the number in the result.
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
    """Combines the logs of all replicas: metric results over all samples, and weighted means of all other numbers.

    Args:
        model: the model whose step ran.
        logs: the logs of this replica.
        weight: the weight of this replica's means.
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
            # Inside the scope: a result may be a variable of the metric, and is read here.
            means[key] = tf.convert_to_tensor(result if part is None else result[part])
    return means


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The metric variables that each replica counts in separately and whose values are added up."""
    return [variable for variable in model.metrics_variables if keras_metrics.is_counted(variable)]


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in logs.items():
        flat.update(_flat(value) if isinstance(value, Mapping) else {key: value})
    return flat
