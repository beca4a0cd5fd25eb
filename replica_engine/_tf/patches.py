"""Everything that this library changes in TensorFlow and Keras, in one place: what, why, when, and for how long.

`PATCHES` is the list; `docs/reliability.md` shows it to users, and a test looks up every row. A patch passes on to the
original wherever no strategy of this library is concerned. Checked on TensorFlow 2.21.0 and Keras 3.15.1.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from replica_engine._tf import distribute
from replica_engine._tf.keras.trainer import BUILD, METHOD, MODULE, REDUCE, TRAINER, strategy_of


class Patch(NamedTuple):
    """Something that the library replaces or adds.

    Attributes:
        owner: the class or module, by its full name.
        name: the attribute.
        why: the reason.
        since: what installs it.
        until: when it is taken back or has no effect.
    """

    owner: str
    name: str
    why: str
    since: str
    until: str


_VALUES = "tensorflow.python.distribute.values.DistributedVariable"
_LOSSES = "keras.src.losses.loss"
_METRICS = "keras.src.metrics.reduction_metrics"
_FIRST_SCOPE = "the first `TPUStrategy.scope()`"
_OTHERS = "passes on to Keras for models of other strategies"
_FIT = "a replicated `fit`, `evaluate` or `predict`"
_OUTSIDE = "taken back when the last one ends; passes on to Keras for other models meanwhile"

PATCHES = (
    Patch(
        _VALUES,
        "__float__",
        "`float(variable)`, `int`, `complex` of distributed variables",
        "import",
        "only added",
    ),
    Patch(f"{MODULE}.{TRAINER}", METHOD, "`steps_per_execution` steps in one launch", _FIRST_SCOPE, _OTHERS),
    Patch(f"{MODULE}.{TRAINER}", BUILD, "models of strings are built from one replica's part", _FIRST_SCOPE, _OTHERS),
    Patch(MODULE, REDUCE, "logs are means over replicas, not those of replica 0", _FIRST_SCOPE, _OTHERS),
    Patch(_LOSSES, "reduce_weighted_values", "a shard's loss counts by its samples", _FIT, _OUTSIDE),
    Patch(_LOSSES, "scale_loss_for_distribution", "the losses of shards are scaled once", _FIT, _OUTSIDE),
    Patch(_LOSSES, "unscale_loss_for_distribution", "the losses of shards are scaled once", _FIT, _OUTSIDE),
    Patch(_METRICS, "reduce_to_samplewise_values", "means over shards count by samples", _FIT, _OUTSIDE),
    Patch(
        "tensorflow.python.distribute.distribute_lib.StrategyBase",
        "run",
        "`check_parity` refuses a step that calls it; also of the classes of strategies that have their own",
        "each run of `check_parity`",
        "taken back when the run ends; passes on to TensorFlow on other threads meanwhile",
    ),
)

_MARK = "_replica_engine"

Make = Callable[[Any, Callable[..., Any], Callable[..., Any]], Callable[..., Any]]
"""Takes a model, its step and Keras' own function; returns the function to call with an iterator."""


def install_numbers() -> None:
    """Lets float() and int() take distributed variables, as in float(model.optimizer.learning_rate)."""
    for kind in (int, float, complex):
        name = f"__{kind.__name__}__"
        if not hasattr(distribute.DistributedVariable, name):
            setattr(distribute.DistributedVariable, name, _as_number(kind))


def _as_number(kind: type) -> Callable[[Any], Any]:
    return lambda self: kind(self.numpy())


def extend_trainer(make: Make, kind: type) -> None:
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
