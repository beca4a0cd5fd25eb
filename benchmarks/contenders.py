"""Ways to train a model on N replicas of this machine: with this library, with tf.distribute, and with JAX.

Each contender does the same: it sums the gradients of each replica's mean loss over replicas, and applies plain
gradient descent to variables that are equal on all replicas. The batches are converted before the clock starts, for
each contender to the form that it handles fastest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.shared_models import JaxOps, Model, TensorFlowOps


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train, with the initial weights.

    Attributes:
        name: the name in the table.
        step: runs one training step on the batch with the given index, waits for its end, and returns the losses.
        mean: the mean of the losses that `step` returned.
    """

    name: str
    step: Callable[[int], Any]
    mean: Callable[[Any], float]


def start(most: int) -> None:
    """Starts TensorFlow and jax with `most` CPU devices each.

    jax gets more threads than replicas, for safety. TensorFlow starts here, before a `TPUStrategy` gives its pool more
    threads than are best for tf.distribute.
    """
    import jax

    import replica_engine

    replica_engine.logical_devices(most)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", most)
    with _environment("NPROC", str(2 * most)):
        assert len(jax.devices()) == most, "jax had started"


def contenders(model: Model, replicas: int) -> list[Contender]:
    """All contenders. `replicas` must not exceed the number that `start` was given."""
    return [
        tpu_strategy(model, replicas),
        tpu_strategy(model, replicas, in_function=True),
        mirrored_strategy(model, replicas),
        tf_distribute(model, replicas),
        jax_shard_map(model, replicas),
    ]


def tpu_strategy(model: Model, replicas: int, in_function: bool = False) -> Contender:
    """`TPUStrategy`: `run` in eager mode, or in a `tf.function` that also reads the results."""
    import replica_engine

    name = "TPUStrategy in tf.function" if in_function else "TPUStrategy"
    return strategy_contender(name, replica_engine.TPUStrategy(num_cores=replicas), model, in_function)


def mirrored_strategy(model: Model, replicas: int) -> Contender:
    """`MirroredStrategy`, whose replica threads trace the graph of a `tf.function`."""
    import replica_engine
    from replica_engine import logical_devices

    return strategy_contender(
        "MirroredStrategy", replica_engine.MirroredStrategy(logical_devices(replicas)), model, True
    )


def tf_distribute(model: Model, replicas: int) -> Contender:
    """`tf.distribute.MirroredStrategy`, with its fastest all-reduce for CPUs."""
    import tensorflow as tf

    from replica_engine import logical_devices

    strategy = tf.distribute.MirroredStrategy(logical_devices(replicas), tf.distribute.ReductionToOneDevice())
    return strategy_contender("tf.distribute", strategy, model, True)


def strategy_contender(name: str, strategy: Any, model: Model, in_function: bool) -> Contender:
    """Any strategy of `tf.distribute`."""
    import tensorflow as tf

    ops = TensorFlowOps()
    replicas = strategy.num_replicas_in_sync
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

    def distributed(values: np.ndarray) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(values[context.replica_id_in_sync_group])
        )

    batches = [(distributed(x), distributed(labels)) for x, labels in model.data(replicas)]

    def run(x: Any, labels: Any) -> Any:
        return strategy.run(replica_step, args=(x, labels))

    if in_function:
        run = tf.function(run)

    def mean(losses: Any) -> float:
        return float(np.mean([loss.numpy() for loss in strategy.experimental_local_results(losses)]))

    return Contender(name, lambda index: run(*batches[index % len(batches)]), mean)


def jax_shard_map(model: Model, replicas: int) -> Contender:
    """The same program in JAX: each device has its part of the batch, and `psum` sums the gradients."""
    import jax
    from jax.sharding import Mesh, NamedSharding

    mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",))
    return jax_contender(model, mesh, lambda values, spec: jax.device_put(values, NamedSharding(mesh, spec)))


def jax_contender(model: Model, mesh: Any, on_devices: Callable[[Any, Any], Any]) -> Contender:
    """The program in JAX on the devices of a mesh, which may be those of several processes.

    Args:
        model: what is trained.
        mesh: the devices, along one axis, "replica".
        on_devices: puts arrays on them; takes the arrays and how they are partitioned.
    """
    import jax
    from jax.sharding import PartitionSpec

    ops = JaxOps()
    replicas = mesh.devices.size
    split, same = PartitionSpec("replica"), PartitionSpec()

    def replica_step(weights: list[Any], x: Any, labels: Any) -> tuple[list[Any], Any]:
        loss, gradients = jax.value_and_grad(lambda weights: model.loss(ops, weights, x[0], labels[0]))(weights)
        totals = jax.lax.psum(gradients, "replica")
        updated = [weight - model.rate / replicas * total for weight, total in zip(weights, totals, strict=True)]
        return updated, loss[None]

    # With check_vma, shard_map would sum the gradients itself, and psum would sum them again.
    mapped = jax.shard_map(
        replica_step, mesh=mesh, in_specs=(same, split, split), out_specs=(same, split), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    weights = on_devices(model.weights(), same)
    batches = on_devices(model.data(replicas), split)

    def step(index: int) -> Any:
        nonlocal weights
        weights, losses = compiled(weights, *batches[index % len(batches)])
        # The replicas of two programs that run on CPU at once can deadlock.
        return jax.block_until_ready(losses)

    def mean(losses: Any) -> float:
        return float(np.mean([np.asarray(part.data) for part in losses.addressable_shards]))

    return Contender("JAX", step, mean)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = before or value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
