"""The cost of a training step with many steps per launch, beside one step per launch and JAX in the same process.

`run_steps`, and `run` in a Python loop, get the same inputs: NumPy arrays from a generator that repeats a few of them,
or batches of a distributed dataset. JAX's `fori_loop` reads batches that are on the devices before the clock starts, so
it never waits for input: it is the lower limit. In another row it gets NumPy arrays through an ordered `io_callback`,
as `run_steps` does. All replicas see the same batches, as with any plain arrays that a strategy is given. All
contenders start from the same weights, and their losses must agree after the first launch.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

from benchmarks import command, jax_programs
from benchmarks.contenders import COMPILED, mean_of, replica_step_of, start, strategy_of
from benchmarks.jax_programs import SAME, SPLIT, mapped, mesh_of, on_devices
from benchmarks.measure import Row, interleaved, milliseconds, same
from benchmarks.shared_models import BATCHES, MODELS, Model, Ops
from benchmarks.train_step import TOLERANCE

AT_LEAST = 20  # the number of steps that are timed together, in one or more launches

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


class Contender(NamedTuple):
    """One way to train, with the initial weights."""

    launch: int  # the number of steps per launch
    # makes the given number of launches, waits for their end, and returns the losses of the last step
    train: Callable[[int], Any]
    mean: Callable[[Any], float]  # the mean of the losses that `train` returned

    def per_step(self) -> float:
        """Milliseconds per step."""
        launches = -(-AT_LEAST // self.launch)
        return milliseconds(lambda: self.train(launches)) / (launches * self.launch)


def contenders(model: Model, replicas: int, launch: int) -> dict[str, Contender]:
    """All contenders. Those with device loops take `launch` steps per launch."""
    return {
        **{f"run_steps, {inputs}": tpu_strategy(model, replicas, inputs, launch) for inputs in INPUTS},
        **{f"run, {inputs}": tpu_strategy(model, replicas, inputs) for inputs in INPUTS},
        FED: jax_fori_loop(model, replicas, launch, fed=True),
        LIMIT: jax_fori_loop(model, replicas, launch),
    }


def tpu_strategy(model: Model, replicas: int, inputs: str, launch: int | None = None) -> Contender:
    """`TPUStrategy`: `run_steps` with `launch` steps per launch, or `run` for each step."""
    strategy = strategy_of(COMPILED, replicas)
    replica_step = replica_step_of(strategy, model)
    batches = INPUTS[inputs](model, strategy)

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

    return Contender(launch or 1, run if launch is None else run_steps, lambda losses: mean_of(strategy, losses))


def jax_fori_loop(model: Model, replicas: int, launch: int, fed: bool = False) -> Contender:
    """JAX: a loop on the devices, over batches that are on the devices before, or that the host feeds in."""
    mesh, stacked = mesh_of(replicas), PartitionSpec(None, "replica")
    replica_step = jax_programs.replica_step_of(model, replicas)
    on_host = _repeated(model)
    described = tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in on_host[0])

    def batch(index: Any, x: Any, labels: Any) -> tuple[Any, Any]:
        if fed:
            return io_callback(lambda index: on_host[int(index)], described, index, ordered=True)
        return x[index, 0], labels[index, 0]

    def replica_loop(weights: list[Any], first: Any, x: Any, labels: Any) -> tuple[list[Any], Any]:
        def step(index: Any, state: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
            return replica_step(state[0], *batch((first + index) % BATCHES, x, labels))

        weights, loss = jax.lax.fori_loop(0, launch, step, (weights, np.float32(0)))
        return weights, loss[None]

    compiled = mapped(replica_loop, mesh, (SAME, SAME, stacked, stacked), (SAME, SPLIT), donated=0)
    weights = on_devices(mesh, model.weights(), SAME)
    columns = [np.repeat(np.stack(column), replicas, axis=1) for column in zip(*model.data(1), strict=True)]
    batches = on_devices(mesh, columns, stacked)
    done = 0

    def train(launches: int) -> Any:
        nonlocal weights, done
        for _ in range(launches):
            weights, losses = compiled(weights, np.int32(done % BATCHES), *batches)
            done += launch
            # The replicas of two programs that run on CPU at once can deadlock.
            jax.block_until_ready(losses)
        return losses

    return Contender(launch, train, lambda losses: float(np.mean(losses)))


def _repeated(model: Model) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches that every replica gets."""
    return [(x[0], labels[0]) for x, labels in model.data(1)]


def distributed_batches(model: Model, strategy: Any) -> Iterator[Any]:
    """The same arrays from a distributed dataset, whose batch has one part for each replica."""
    replicas = strategy.num_replicas_in_sync
    columns = [
        np.concatenate([part for part in column for _ in range(replicas)])
        for column in zip(*_repeated(model), strict=True)
    ]
    data = tf.data.Dataset.from_tensor_slices(tuple(columns)).repeat()
    return iter(strategy.experimental_distribute_dataset(data.batch(model.batch * replicas, drop_remainder=True)))


INPUTS = {
    "NumPy": lambda model, strategy: itertools.cycle(_repeated(model)),
    "tf.data": distributed_batches,
}
"""The sources of batches, by name. Every replica gets the same ones."""


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for `run_steps` with each kind of input, model and number of steps."""
    start(flags.replicas)
    for name in flags.models:
        for launch in [steps for steps in flags.steps if steps <= MOST[name]]:
            every = contenders(TRAINED[name], flags.replicas, launch)
            losses = {who: each.mean(each.train(launch // each.launch)) for who, each in every.items()}
            check = same(f"loss after {launch} steps", losses, TOLERANCE)
            figures = interleaved(every, flags.repeats, Contender.per_step)
            for inputs in INPUTS:
                shown = {who: figures[who] for who in (f"run_steps, {inputs}", f"run, {inputs}", FED, LIMIT)}
                title = f"{name}, {launch} a launch"
                yield Row("device_loop", title, shown, "ms a step", flags.replicas, check=check)


if __name__ == "__main__":
    steps = f"steps in a launch, of a model at most {MOST}"
    command.main(
        __doc__,
        measure,
        command.models(TRAINED, "linear"),
        command.Option("steps", "1,10,100,1000", "1,10", steps, command.numbers),
        command.Option("replicas", "2", "2", "number of replicas"),
    )
