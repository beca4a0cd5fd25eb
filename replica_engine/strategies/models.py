"""What Keras calls for models that are made in a scope, and the check of Keras' distributions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf.hook import hide_frames
from replica_engine._tf.keras import added_losses, layouts, normalization
from replica_engine._tf.keras import hooks as keras_hooks
from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.backend import has_backend
from replica_engine.diagnostics.misuse import explained
from replica_engine.diagnostics.user_frames import FOLDERS
from replica_engine.engine import current_replica
from replica_engine.errors import DistributionError
from replica_engine.threads.call import keep_attributes


def explain() -> None:
    """Makes `compile` work outside the scope, and Keras' methods train, evaluate and predict on the replicas.

    On threads each replica has its own losses of layers, and its own attributes that a step sets. Synchronized
    normalizations are so with a mask too. A program that has imported `replica_engine.keras`
    can load models with a `CrossReplicaOptimizer`.

    Strategies that do not run on a backend of this library keep what Keras does. Does nothing until Keras is imported,
    or a second time.
    """
    if "replica_engine.keras" in sys.modules and "keras" in sys.modules:  # for models that the program loads
        importlib.import_module("replica_engine.keras.cross_replica_optimizer")
    keras_hooks.extend_build(explained, has_backend, _takes_whole)
    keras_hooks.make_functions(_function_of, _takes_whole)
    keras_hooks.compile_in_scope(has_backend)
    hide_frames(FOLDERS)
    normalization.synchronize_masked(has_backend)
    keep_attributes()
    added_losses.for_each_replica(lambda: (replica := current_replica()) is not None and replica.index > 0)


def _function_of(model: Any, name: str) -> Callable[..., Any] | None:
    """What Keras calls to run a step of a model in its scope; None if Keras' own function does."""
    if not _divides(model, name):
        return None
    made = importlib.import_module("replica_engine.keras.scoped_model").function_of(model, name)
    return made.predict if name == "predict_step" else made


def _divides(model: Any, name: str = "test_step") -> bool:
    """Whether a step of a model divides batches itself.

    Not if the model makes functions itself. Keras joins the predictions of several workers. It also runs an only
    replica, which has nothing to divide, but for compiled steps: many of them are one launch.
    """
    strategy = keras_trainer.strategy_of(model)
    if strategy is None or not has_backend(strategy) or keras_trainer.makes_functions(model):
        return False
    backend, predicts = strategy.extended.backend, name == "predict_step"
    if strategy.num_replicas_in_sync == 1:
        return backend.compiles and not predicts
    return backend.saving is None or not predicts


def _takes_whole(model: Any, batch: Any) -> bool:
    """Whether batches such as one that TensorFlow has dealt come whole, to be divided among the replicas; None: any.

    Not to several workers, or to threads on GPUs, to which TensorFlow copies the next batch during a step; nor if the
    leaves of a batch have other numbers of samples, and are dealt apart.
    """
    strategy = keras_trainer.strategy_of(model)
    backend = strategy.extended.backend
    on_gpus = not backend.compiles and any("GPU" in device.upper() for device in strategy.extended.worker_devices)
    if on_gpus or backend.saving is not None or not _divides(model):
        return False
    parts = map(strategy.experimental_local_results, tf.nest.flatten(batch))
    rows = ([tuple(getattr(part, "shape", None) or ())[:1] for part in leaf] for leaf in parts)
    return len({tuple(leaf) for leaf in rows if all(leaf)}) <= 1


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
