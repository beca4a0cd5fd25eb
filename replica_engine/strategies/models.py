"""Checks and error messages for Keras models that are built under a scope and trained with Keras' own `fit`."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.hook import hide_frames
from replica_engine._tf.keras import added_losses, layouts, normalization
from replica_engine._tf.keras import hooks as keras_hooks
from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.backend import compiles, has_backend
from replica_engine.diagnostics.misuse import explained
from replica_engine.diagnostics.op_lines import here
from replica_engine.diagnostics.suspicions import warn_once
from replica_engine.diagnostics.user_frames import FOLDERS
from replica_engine.engine import current_replica
from replica_engine.errors import BatchError, DistributionError
from replica_engine.errors.models import warn_metric_not_a_sum, warn_uneven_evaluation, warn_uneven_rest
from replica_engine.errors.timeouts import count_of
from replica_engine.process.interrupts import held_off_once
from replica_engine.threads.call import keep_attributes


def explain() -> None:
    """Makes `compile` work outside the scope, and `fit` and `evaluate` check the first batch and explain what fails.

    On threads each replica has its own losses of layers, and its own attributes that a step sets. Synchronized
    normalizations are so with a mask too. A program that has imported `replica_engine.keras`
    can load models with a `CrossReplicaOptimizer`.

    Strategies that do not run on a backend of this library keep what Keras does. Does nothing until Keras is imported,
    or a second time.
    """
    if "replica_engine.keras" in sys.modules and "keras" in sys.modules:  # for models that the program loads
        importlib.import_module("replica_engine.keras.cross_replica_optimizer")
    keras_hooks.extend_build(_check_batch, explained, has_backend, _watch_metrics, _divides_itself)
    keras_hooks.make_functions(_function_of, _function_of_parts)
    keras_hooks.compile_in_scope(has_backend)
    hide_frames(FOLDERS)
    normalization.synchronize_masked(has_backend)
    keep_attributes()
    added_losses.for_each_replica(lambda: (replica := current_replica()) is not None and replica.index > 0)


def _divides_itself(model: Any, batch: Any = None) -> bool:
    """Whether the functions of a model take whole batches and divide them among the replicas of its scope.

    Not over several workers, and not on GPUs of threads, to which TensorFlow copies the next batch during a step. Nor
    if the model makes its functions itself, or the leaves of a batch have other numbers of samples. An only replica has
    nothing to divide.
    """
    strategy = keras_trainer.strategy_of(model)
    if strategy is None or not has_backend(strategy) or keras_trainer.makes_functions(model):
        return False
    backend = strategy.extended.backend
    on_gpus = not backend.compiles and any("GPU" in device.upper() for device in strategy.extended.worker_devices)
    alike = len({tuple(rows) for rows in _shares(batch) if None not in rows}) <= 1
    return alike and backend.saving is None and not on_gpus and strategy.num_replicas_in_sync > 1


def _function_of(model: Any, name: str) -> Callable[..., Any] | None:
    """What Keras calls to run a step of a model in its scope; None if Keras' own function does."""
    if not _divides_itself(model):
        return None
    made = importlib.import_module("replica_engine.keras.scoped_model").function_of(model, name)
    return made.predict if name == "predict_step" else made


def _function_of_parts(own: Callable[..., Any], model: Any, step_function: Callable[..., Any]) -> Callable[..., Any]:
    strategy = keras_trainer.strategy_of(model)
    if strategy is None or not compiles(strategy):
        return own(model, step_function)
    loops = importlib.import_module("replica_engine.strategies.tpu.keras_steps")  # it needs jax
    return loops.device_loop(own, model, step_function)


def check_distribution(strategy: tf.distribute.Strategy) -> None:
    """Checks that no distribution of Keras is set, or only the one that the strategy has: it would be ignored.

    Raises:
        DistributionError: another one is set.
    """
    given, backend = layouts.current_distribution(), strategy.extended.backend
    if given is not None and given is not getattr(getattr(backend, "distribution", None), "given", None):
        name = type(strategy).__name__
        how = (
            f"{name}(distribution=...)"
            if backend.compiles
            else f"replica_engine.TPUStrategy(distribution=...), since {name} has whole variables on each replica"
        )
        raise DistributionError(
            "keras.distribution.set_distribution(...), or a scope() of a distribution, is in effect. The strategies of "
            f"replica_engine do not read it: pass the distribution to the strategy, {how}. If it is meant for another "
            "model, end it first: keras.distribution.set_distribution(None)."
        )


def _check_batch(model: Any, strategy: tf.distribute.Strategy, batch: Any, rest: int | None, is_fit: bool) -> None:
    """Checks that the replicas have equal shares of a batch; `fit` averages over replicas, not over samples.

    On threads, a smaller last batch of `fit` gets a warning only, because it is a single step. Compiled replicas cannot
    train on such a batch, and it may come after hours. If the model has its own `train_step`, that step may have no
    collective; if it has one, the batch is refused when it comes.

    Evaluations take batches of any size: Keras' `test_step` counts samples. A `test_step` of the model may not. It gets
    a warning and no error, because validation comes when an epoch has been trained.

    Workers tell each other their shares, since each has only its own; the error comes on all, the warning on the chief.

    Raises:
        BatchError: `fit` gives the replicas unequal shares.
    """
    size, backend = strategy.num_replicas_in_sync, strategy.extended.backend
    if not is_fit and keras_trainer.has_keras_step(model, "test_step"):
        return
    known: list[Any] = [[_shares(batch), rest]]
    if backend.saving is not None:
        known = backend.saving.exchange(f"the first batch of `{'fit' if is_fit else 'evaluate'}`", known[0])
    rows = _unequal([shares for shares, _ in known])
    rest = next((rest for _, rest in known if rest and rest % size), None)
    warns = backend.saving is None or backend.saving.is_chief
    if not is_fit:
        uneven = sum(rows) or rest
        if uneven and warns:
            text = warn_uneven_evaluation(model.name, uneven, size)
            warn_once(strategy, ("evaluation", model.name), text)
        return
    if rows:
        total, fits = sum(rows), -(-sum(rows) // size) * size
        raise BatchError(
            f"A batch of {total} samples does not divide by {size} replicas: they get "
            f"{', '.join(map(str, rows[:-1]))} and {rows[-1]}, and Keras would average over replicas, not over "
            f"samples. Pass a batch size that is a multiple of {size}, such as batch_size={fits}. Or let "
            "replicate_model(model) divide batches of any size, with the results of one device."
        )
    if rest is None:
        return
    if not backend.compiles:
        if warns:
            warn_once(strategy, "rest", warn_uneven_rest(rest, size))
    elif keras_trainer.has_keras_step(model, "train_step"):
        most = rest % size
        raise BatchError(
            f"The last batch, of {count_of(rest, 'sample')}, does not divide by {size} replicas, and a compiled step "
            f"has one shape on all of them. Leave out {count_of(most, 'sample')}: fit(x[:-{most}], y[:-{most}]), or of "
            "a dataset the rest, dataset.batch(n, drop_remainder=True). Or let replicate_model(model) divide batches "
            "of any size, with the results of one device."
        )


def _shares(batch: Any) -> list[list[int | None]]:
    """For each leaf of a batch, how many samples each replica of this worker gets; None for what has no samples."""
    parts = (
        leaf.values if isinstance(leaf, distribute.DistributedValues) else [leaf] for leaf in tf.nest.flatten(batch)
    )
    shapes = ([getattr(each, "shape", None) for each in leaf] for leaf in parts)
    return [[shape[0] if shape is not None and shape.rank else None for shape in leaf] for leaf in shapes]


def _unequal(shares: list[list[list[int | None]]]) -> list[int]:
    """What all replicas get of the first leaf of which they get unequal numbers of samples, from what each worker has.

    An empty list if there is none.
    """
    for leaf in zip(*shares, strict=False):  # workers with other inputs fail later, at a collective
        rows = [each for worker in leaf for each in worker if each is not None]
        if len(rows) == sum(map(len, leaf)) and len(set(rows)) > 1:
            return rows
    return []


def _watch_metrics(model: Any) -> None:
    """Looks at the first update of each metric of the user's own, in a replica; such an update may do more than add."""
    if keras_trainer.strategy_of(model).num_replicas_in_sync == 1:
        return
    from replica_engine._tf.keras import sums  # not at module level: it imports Keras

    for metric in sums.own_metrics_of(model):
        # An attribute that copies with the metric: a partial object has the metric as its argument.
        vars(metric).setdefault("update_state", functools.partial(_first_update, metric))


def _first_update(metric: Any, *args: Any, **kwargs: Any) -> Any:
    """Updates a metric; warns if the values of replicas do not add up, and is then gone.

    Where the graph of the update does not show that it is wrong, there is no warning.
    """
    update = functools.partial(type(metric).update_state, metric, *args, **kwargs)
    result = update()
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return result
    if vars(metric).pop("update_state", None) is None:  # another replica looks at it
        return result
    from replica_engine._tf.keras import sums

    updates = held_off_once().around(lambda: sums.updates_of(metric, update, here))
    wrong = next((each for each in updates if each.kind == sums.OTHER), None)
    if wrong is not None:
        text = warn_metric_not_a_sum(
            metric.name, type(metric).__name__, wrong.variable, wrong.place, context.num_replicas_in_sync
        )
        warn_once(context.strategy, ("metric", metric.name, wrong.place), text)
    return result
