"""One step of a model on one replica, in replica context: of a share of the batch, or of the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from replica_engine._compat import keras_model
from replica_engine.keras.share import Share


def run_step(model: keras.Model, name: str, data: Any, share: Share) -> dict[str, Any]:
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
    return across_replicas(model, logs, share)


def across_replicas(model: keras.Model, logs: Any, share: Share, weight: Any = None) -> dict[str, Any]:
    """What a step returned, of all replicas together: results of the metrics that it updated, and means of the rest.

    Args:
        model: whose step it was.
        logs: what it returned; dictionaries in it are opened, as Keras does.
        share: of which it was.
        weight: what this replica's means count; None for what the share says.
    """
    context = tf.distribute.get_replica_context()
    weight = share.weight() if weight is None else weight
    logs = _flat(logs) if isinstance(logs, Mapping) else {"loss": logs}
    own = {key: tf.cast(tf.convert_to_tensor(value), "float32") * weight for key, value in logs.items()}
    counted = metric_variables(model)
    values = [tf.identity(variable.value) for variable in counted]
    sums, means = context.all_reduce(tf.distribute.ReduceOp.SUM, (values, own))
    with keras.StatelessScope(state_mapping=list(zip(counted, sums, strict=True))):
        results = keras_model.results([metric for metric in model.metrics if id(metric) in share.counted])
    return {key: tf.convert_to_tensor(results[key]) if key in results else means[key] for key in logs}


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables that replicas count in, each for itself."""
    return [variable for variable in model.metrics_variables if variable.synchronization == "on_read"]


def _flat(logs: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in logs.items():
        flat.update(_flat(value) if isinstance(value, Mapping) else {key: value})
    return flat
