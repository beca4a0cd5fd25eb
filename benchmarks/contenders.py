"""Ways to train a model on N replicas of this machine: with this library, with tf.distribute, and with JAX.

Each contender does the same: it sums the gradients of each replica's mean loss over replicas, and applies plain
gradient descent to variables that are equal on all replicas. The batches are converted before the clock starts, for
each contender to the form that it handles fastest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import replica_engine
from benchmarks.shared_models import Contender, Model, tensorflow_ops

THREADS, COMPILED, THEIRS = "MirroredStrategy", "TPUStrategy", "tf.distribute"


def start(most: int) -> None:
    """Starts TensorFlow and jax with `most` CPU devices each.

    jax gets more threads than replicas, for safety. TensorFlow starts here, before a `TPUStrategy` gives its pool more
    threads than are best for tf.distribute.
    """
    import jax

    replica_engine.logical_devices(most)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", most)
    with mock.patch.dict(os.environ, {"NPROC": os.environ.get("NPROC", str(2 * most))}):
        assert len(jax.devices()) == most, "jax had started"


def strategy_of(name: str, replicas: int) -> Any:
    """A strategy by its name; TensorFlow's has its fastest all-reduce for CPUs."""
    if name == COMPILED:
        return replica_engine.TPUStrategy(num_cores=replicas)
    devices = replica_engine.logical_devices(replicas)
    if name == THEIRS:
        return tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())
    return replica_engine.MirroredStrategy(devices)


def distributed(strategy: Any, rows: Sequence[Any]) -> Any:
    """A value that has the row of its index on each replica."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(rows[context.replica_id_in_sync_group])
    )


def mean_of(strategy: Any, losses: Any) -> float:
    """The mean of the losses of all replicas."""
    return float(np.mean([loss.numpy() for loss in strategy.experimental_local_results(losses)]))


def contenders(model: Model, replicas: int) -> list[Contender]:
    """All contenders. `replicas` must not exceed the number that `start` was given."""
    from benchmarks.jax_programs import jax_contender, mesh_of, on_devices

    mesh = mesh_of(replicas)
    compiled = strategy_contender(f"{COMPILED} in tf.function", strategy_of(COMPILED, replicas), model, True)
    return [
        made(COMPILED, model, replicas),
        compiled,
        made(THREADS, model, replicas),
        made(THEIRS, model, replicas),
        jax_contender(model, mesh, lambda values, spec: on_devices(mesh, values, spec)),
    ]


def made(name: str, model: Model, replicas: int) -> Contender:
    """A strategy as it is fastest: `TPUStrategy` with `run` in eager mode, the others in a `tf.function`."""
    return strategy_contender(name, strategy_of(name, replicas), model, name != COMPILED)


def replica_step_of(strategy: Any, model: Model) -> Callable[[Any, Any], Any]:
    """The training step of a replica on a batch and its labels; returns the loss."""
    ops, replicas = tensorflow_ops(), strategy.num_replicas_in_sync
    with strategy.scope():
        weights = [tf.Variable(value) for value in model.weights()]

    def replica_step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(ops, weights, x, labels)
        # The gradient of a word table is sparse here, and dense in JAX.
        gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, weights)]
        totals = tf.distribute.get_replica_context().all_reduce("SUM", gradients)
        for weight, total in zip(weights, totals, strict=True):
            weight.assign_sub(model.rate / replicas * total)
        return loss

    return replica_step


def strategy_contender(name: str, strategy: Any, model: Model, in_function: bool) -> Contender:
    """Any strategy of `tf.distribute`."""
    replica_step = replica_step_of(strategy, model)
    batches = [[distributed(strategy, part) for part in batch] for batch in model.data(strategy.num_replicas_in_sync)]

    def run(x: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(x, labels))

    if in_function:
        run = tf.function(run)
    return Contender(name, lambda index: run(*batches[index % len(batches)]), lambda losses: mean_of(strategy, losses))
