"""Keras' training and test functions, which implement `steps_per_execution`.

Keras runs `steps_per_execution` steps as a loop of a `tf.function` on the host and offers no other way. The trainer's
method `_make_function` takes the function that does one step, and makes the function that `fit` and `evaluate` call.
Checked on Keras 3.15.1. This module does not import Keras; if Keras has no such method, Keras' own loop stays.

`reduce_per_replica` combines the logs of all replicas: it takes the mean, but under a `tf.distribute.TPUStrategy` it
takes the logs of replica 0. The strategies here are instances of that class and take the mean.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from replica_engine._tf import distribute

MODULE = "keras.src.backend.tensorflow.trainer"
TRAINER = "TensorFlowTrainer"
METHOD = "_make_function"
BUILD = "_maybe_symbolic_build"
REDUCE = "reduce_per_replica"

_MARK = "_replica_engine"

Make = Callable[[Any, Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
"""Takes a model, its step and Keras' own function; returns the function to call with an iterator."""


def extend(make: Make, kind: type) -> None:
    """Makes models call the function that `make` returns; only once per process. `kind` is the class of strategies."""
    trainer = getattr(sys.modules.get(MODULE), TRAINER, None)
    method = getattr(trainer, METHOD, None)
    if method is None or hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def extended(self: Any, step_function: Callable[..., Any]) -> Callable[..., Any]:
        return make(self, step_function, method(self, step_function))

    setattr(extended, _MARK, True)
    setattr(trainer, METHOD, extended)
    _build_for_one_replica(trainer, kind)


def _build_for_one_replica(trainer: Any, kind: type) -> None:
    """Makes Keras build a model under a strategy of class `kind` from one replica's part of a batch.

    Keras builds the model from the mean over the parts of all replicas, and strings have no mean.
    """
    method = getattr(trainer, BUILD, None)
    if method is None:
        return

    @functools.wraps(method)
    def built(self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
        if iterator is not None and isinstance(strategy_of(self), kind):
            _, _, batches = next(iter(iterator))
            iterator, data_batch = None, distribute.first_values(next(batches))
        return method(self, iterator=iterator, data_batch=data_batch)

    setattr(trainer, BUILD, built)


def average_logs(strategies: type) -> None:
    """Makes Keras log the mean over replicas under strategies of a class; only once per process."""
    module = sys.modules.get(MODULE)
    reduce = getattr(module, REDUCE, None)
    if reduce is None or hasattr(reduce, _MARK):
        return

    @functools.wraps(reduce)
    def averaged(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction == "auto" and isinstance(strategy, strategies):
            reduction = "mean"
        return reduce(values, strategy, reduction)

    setattr(averaged, _MARK, True)
    setattr(module, REDUCE, averaged)


def strategy_of(model: Any) -> Any:
    """The strategy under which a model was built; None if it was built under none."""
    return model._distribute_strategy


def reduced(outputs: Any, strategy: Any) -> Any:
    """Combines the logs of all replicas."""
    return getattr(sys.modules[MODULE], REDUCE)(outputs, strategy, reduction="auto")
