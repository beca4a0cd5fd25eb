"""`replicate_model`: runs a Keras model on N replicas, with one line of code."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf import patches
from replica_engine._tf.keras import model as keras_model
from replica_engine.diagnostics.user_frames import FOLDERS
from replica_engine.errors import ReplicateError, positive_int
from replica_engine.keras.choice import choose
from replica_engine.keras.model import is_replicated, replicated
from replica_engine.strategies.backend import has_backend

_logger = logging.getLogger("replica_engine")


def replicate_model(
    model: keras.Model, replicas: int | None = None, strategy: tf.distribute.Strategy | None = None
) -> keras.Model:
    """Makes a Keras model that trains, evaluates and predicts on N replicas; it shares everything with the original.

    `fit`, `evaluate`, `predict` and their `_on_batch` forms split each batch over the replicas, whatever its size.
    Losses and metrics are means over all samples, as on one device. Predictions come in the order of the inputs.
    Everything else (weights, layers, optimizer, `compile`, `save`, `summary`) belongs to both models: each change of
    one is a change of the other. If the model has its own `train_step`, that step runs on each replica, on the
    replica's shard of the batch; its gradients are averaged over all samples.

    Args:
        model: a built Keras 3 model: functional, sequential or subclassed, compiled or not.
        replicas: the number of replicas. None takes all devices of the strategy.
        strategy: a strategy of this library to run on, or one of your own with `ReplicaThreads`. None picks the faster
            one for the model on this machine; a message at level INFO of the logger "replica_engine" names it and the
            reason.

    Returns:
        The replicated model, an instance of the model's class.

    Raises:
        ReplicateError: the model is not built, is already replicated or was built under a strategy, or there are fewer
            devices than replicas.

    Example:
        >>> import keras, numpy as np
        >>> from replica_engine.keras import replicate_model
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> fast = replicate_model(model, replicas=2)
        >>> x, y = np.ones((10, 4), "float32"), np.ones((10, 1), "float32")
        >>> history = fast.fit(x, y, batch_size=7, verbose=0)
        >>> fast.predict(x, verbose=0).shape
        (10, 1)
    """
    _check(model)
    count = _number(replicas)
    if strategy is None:
        strategy, reason = choose(model, count)
        _logger.info(
            "replicate_model: %r on %d replicas of %s: %s",
            model.name,
            strategy.num_replicas_in_sync,
            type(strategy).__name__,
            reason,
        )
    elif not isinstance(strategy, tf.distribute.Strategy) or not has_backend(strategy):
        raise ReplicateError.bad_strategy(strategy)
    present = strategy.num_replicas_in_sync
    if count is not None and count != present:
        raise ReplicateError.too_many(count, type(strategy).__name__, present)
    _check_inputs(model, present)
    patches.hide_frames(FOLDERS)
    twin = replicated(model, strategy)
    if hasattr(strategy, "leave_files_to_chief"):  # a strategy that may have several workers
        strategy.leave_files_to_chief(model, twin)
    return twin


def _check(model: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ReplicateError.other_backend(keras.backend.backend())
    if not isinstance(model, keras.Model):
        raise ReplicateError.not_a_model(model)
    if is_replicated(model):
        raise ReplicateError.replicated(model.name)
    if keras_model.strategy_of(model) is not None:
        raise ReplicateError.of_strategy(model.name)
    unbuilt = keras_model.unbuilt_layers(model)
    if unbuilt:
        raise ReplicateError.unbuilt(model.name, unbuilt[-1])
    if own := keras_model.own_functions(model):
        raise ReplicateError.own_function(model.name, own[0])


def _check_inputs(model: keras.Model, replicas: int) -> None:
    inputs = getattr(model, "inputs", None)
    for tensor in keras.tree.flatten(inputs) if inputs else ():
        size = tensor.shape[0] if isinstance(tensor, keras.KerasTensor) and tensor.shape else None
        if size is not None and replicas > 1:
            raise ReplicateError.fixed_batch(tensor.name, size, -(-size // replicas), replicas)


def _number(replicas: Any) -> int | None:
    if replicas is None:
        return None
    count = positive_int(replicas)
    if count is None:
        raise ReplicateError.bad_count(replicas)
    return count
