"""The cost of a training step with many steps per launch, beside one step per launch and JAX in the same process.

    python -m benchmarks.device_loop [--models linear,mlp] [--steps 1,10,100] [--replicas 2] [--repeats 5] [--quick]
        [--json out.json]

`run_steps`, and `run` in a Python loop, get the same inputs: NumPy arrays from a generator that repeats a few of them,
or batches of a distributed dataset. JAX's `fori_loop` reads batches that are on the devices before the clock starts, so
it never waits for input: it is the lower limit. In another row it gets NumPy arrays through an ordered `io_callback`,
as `run_steps` does. All replicas see the same batches, as with any plain arrays that a strategy is given. All
contenders start from the same weights, and their losses must agree after the first launch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import command
from benchmarks.measure import Row, interleaved, milliseconds, same
from benchmarks.shared_models import BATCHES, MODELS, JaxOps, Model, Ops, TensorFlowOps
from benchmarks.train_step import TOLERANCE

AT_LEAST = 20
"""The number of steps that are timed together, in one or more launches."""

FED, LIMIT = "JAX, NumPy", "JAX"
"""The names of the two JAX contenders."""

MOST = {"linear": 1000, "mlp": 100}
"""The largest number of steps per launch for each model: more take long and show nothing new."""


def _linear(ops: Ops, weights: Sequence[Any], x: Any, labels: Any) -> Any:
    weight, bias = weights
    return ops.cross_entropy(ops.dense(x, weight) + bias, labels)


TRAINED = {
    # Logistic regression with 10 weights: almost all of the cost is around the step.
    "linear": Model("linear", _linear, shapes=((10, 2), (2,)), batch=8, example=(10,), classes=2),
    # At this learning rate the loss after 1000 steps is still larger than rounding errors.
    "mlp": dataclasses.replace(MODELS["mlp"], rate=0.002),
}
"""The models, by name."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to train, with the initial weights.

    Attributes:
        name: the name in the table.
        peer: the name of the contender that gets the same inputs with one step per launch; None for JAX.
        launch: the number of steps per launch.
        train: makes the given number of launches, waits for their end, and returns the losses of the last step.
        mean: the mean of the losses that `train` returned.
    """

    name: str
    peer: str | None
    launch: int
    train: Callable[[int], Any]
    mean: Callable[[Any], float]


def contenders(model: Model, replicas: int, launch: int) -> list[Contender]:
    """All contenders. Those with device loops take `launch` steps per launch."""
    return [
        *(tpu_strategy(model, replicas, inputs, launch) for inputs in INPUTS),
        *(tpu_strategy(model, replicas, inputs) for inputs in INPUTS),
        jax_fori_loop(model, replicas, launch, fed=True),
        jax_fori_loop(model, replicas, launch),
    ]


def tpu_strategy(model: Model, replicas: int, inputs: str, launch: int | None = None) -> Contender:
    """`TPUStrategy`: `run_steps` with `launch` steps per launch, or `run` for each step."""
    import tensorflow as tf

    import replica_engine

    ops = TensorFlowOps()
    strategy = replica_engine.TPUStrategy(num_cores=replicas)
    with strategy.scope():
        weights = [tf.Variable(value) for value in model.weights()]
    batches = INPUTS[inputs](model, strategy)

    def replica_step(x: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = model.loss(ops, weights, x, labels)
        totals = tf.distribute.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
        for weight, total in zip(weights, totals, strict=True):
            weight.assign_sub(model.rate / replicas * total)
        return loss

    def loop_step(context: Any, x: Any, labels: Any) -> None:
        context.set_last_step_output("loss", replica_step(x, labels))

    def run(launches: int) -> Any:
        for _ in range(launches):
            losses = strategy.run(replica_step, args=next(batches))
        return losses

    def run_steps(launches: int) -> Any:
        for _ in range(launches):
            context = strategy.run_steps(loop_step, batches, launch)
        return context.last_step_outputs["loss"]

    def mean(losses: Any) -> float:
        return float(np.mean([loss.numpy() for loss in strategy.experimental_local_results(losses)]))

    peer = f"run, {inputs}"
    if launch is None:
        return Contender(peer, peer, 1, run, mean)
    return Contender(f"run_steps, {inputs}", peer, launch, run_steps, mean)


def jax_fori_loop(model: Model, replicas: int, launch: int, fed: bool = False) -> Contender:
    """JAX: a loop on the devices, over batches that are on the devices before, or that the host feeds in."""
    import jax
    from jax.experimental import io_callback
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    ops = JaxOps()
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",))
    split, same, stacked = PartitionSpec("replica"), PartitionSpec(), PartitionSpec(None, "replica")
    on_host = [(x[0], labels[0]) for x, labels in model.data(1)]
    described = tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in on_host[0])

    def batch(index: Any, x: Any, labels: Any) -> tuple[Any, Any]:
        if fed:
            return io_callback(lambda index: on_host[int(index)], described, index, ordered=True)
        return x[index, 0], labels[index, 0]

    def replica_step(weights: list[Any], x: Any, labels: Any) -> tuple[list[Any], Any]:
        loss, gradients = jax.value_and_grad(lambda weights: model.loss(ops, weights, x, labels))(weights)
        totals = jax.lax.psum(gradients, "replica")
        return [weight - model.rate / replicas * total for weight, total in zip(weights, totals, strict=True)], loss

    def replica_loop(weights: list[Any], first: Any, x: Any, labels: Any) -> tuple[list[Any], Any]:
        def step(index: Any, state: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
            return replica_step(state[0], *batch((first + index) % BATCHES, x, labels))

        weights, loss = jax.lax.fori_loop(0, launch, step, (weights, np.float32(0)))
        return weights, loss[None]

    # With check_vma, shard_map would sum the gradients itself, and psum would sum them again.
    mapped = jax.shard_map(
        replica_loop, mesh=mesh, in_specs=(same, same, stacked, stacked), out_specs=(same, split), check_vma=False
    )
    compiled = jax.jit(mapped, donate_argnums=0)
    weights = jax.device_put(model.weights(), NamedSharding(mesh, same))
    columns = [np.repeat(np.stack(column), replicas, axis=1) for column in zip(*model.data(1), strict=True)]
    batches = jax.device_put(columns, NamedSharding(mesh, stacked))
    done = 0

    def train(launches: int) -> Any:
        nonlocal weights, done
        for _ in range(launches):
            weights, losses = compiled(weights, np.int32(done % BATCHES), *batches)
            done += launch
            # The replicas of two programs that run on CPU at once can deadlock.
            jax.block_until_ready(losses)
        return losses

    return Contender(FED if fed else LIMIT, None, launch, train, lambda losses: float(np.mean(losses)))


def numpy_batches(model: Model, strategy: Any) -> Iterator[Any]:
    """Arrays; every replica gets the same one."""
    batches = [(x[0], labels[0]) for x, labels in model.data(1)]
    while True:
        yield from batches


def distributed_batches(model: Model, strategy: Any) -> Iterator[Any]:
    """The same arrays from a distributed dataset, whose batch has one part for each replica."""
    import tensorflow as tf

    replicas = strategy.num_replicas_in_sync
    columns = [
        np.concatenate([np.repeat(part, replicas, axis=0).reshape(-1, *part.shape[2:]) for part in column])
        for column in zip(*model.data(1), strict=True)
    ]
    data = (
        tf.data.Dataset.from_tensor_slices(tuple(columns)).repeat().batch(model.batch * replicas, drop_remainder=True)
    )
    return iter(strategy.experimental_distribute_dataset(data))


INPUTS = {"NumPy": numpy_batches, "tf.data": distributed_batches}
"""The sources of batches, by name."""


def per_step(contender: Contender) -> float:
    """Milliseconds per step."""
    launches = -(-AT_LEAST // contender.launch)
    return milliseconds(lambda: contender.train(launches)) / (launches * contender.launch)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for `run_steps` with each kind of input, model and number of steps."""
    from benchmarks.contenders import start

    start(flags.replicas)
    for name in flags.models:
        for launch in [steps for steps in flags.steps if steps <= MOST[name]]:
            every = contenders(TRAINED[name], flags.replicas, launch)
            losses = {each.name: each.mean(each.train(launch // each.launch)) for each in every}
            check = same(f"loss after {launch} steps", losses, TOLERANCE)
            figures = interleaved({each.name: functools.partial(per_step, each) for each in every}, flags.repeats)
            for each in every:
                if each.peer not in (None, each.name):
                    yield Row(
                        "device_loop",
                        f"{name}, {launch} a launch",
                        {who: figures[who] for who in (each.name, each.peer, FED, LIMIT)},
                        unit="ms a step",
                        replicas=flags.replicas,
                        check=check,
                    )


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("models", "linear,mlp", "linear", "models to train", command.choose_some("linear", "mlp")),
        command.Option(
            "steps", "1,10,100,1000", "1,10", f"steps in a launch, of a model at most {MOST}", command.numbers
        ),
        command.Option("replicas", "2", "2", "number of replicas"),
    )
