"""Keras' training and test functions, which decide what becomes of several steps an execution.

Keras runs `steps_per_execution` steps as a loop of a tf.function on the host, and has no place for another way to run
them. `_make_function` of its trainer makes the function that `fit` and `evaluate` call, of the function that is one
step. Checked on Keras 3.15.1. Keras is not imported here; where it has no such method, its own loop stays.

`reduce_per_replica` makes one of the logs of all replicas: the mean, but under a `tf.distribute.TPUStrategy` those of
replica 0. The strategies here are instances of that class, and take the mean.
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
"""Of a model, its step, and Keras' own function: the function to be called with an iterator."""


def extend(make: Make, kind: type) -> None:
    """Has models call what `make` returns; once for the process. `kind` is the class of the strategies concerned."""
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
    """Has a model of a strategy of ours built for one replica's part of a batch.

    Keras builds it for the mean over the parts of all replicas, and strings have none.
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
    """Makes Keras take the mean over replicas of what a step logs, under instances of a class; once for the process."""
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
    """The strategy that a model was built under; None if there was none."""
    return model._distribute_strategy


def reduced(outputs: Any, strategy: Any) -> Any:
    """The logs of all replicas as one."""
    return getattr(sys.modules[MODULE], REDUCE)(outputs, strategy, reduction="auto")
