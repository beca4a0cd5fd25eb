"""What a training step costs with many steps in one launch, beside one launch a step, and JAX in the same process.

    python -m benchmarks.device_loop [--models linear,mlp] [--steps 1,10,100] [--replicas 2] [--repeats 7]
        [--seconds 5] [--json out.json]

`run_steps`, and `run` in a Python loop, get the same inputs: NumPy arrays, of which a generator hands out a few in
turn, or batches of a distributed data set. JAX's `fori_loop` goes over batches that lie on the devices before the
clock starts, so it waits for no input: it is the limit. Fed as `run_steps` is, it gets NumPy arrays by an ordered
`io_callback`. All replicas see the same batches, which is what plain arrays mean to a strategy. All start from the
same weights, and after the first launch their losses must agree, or there is nothing to compare. Repeats are
interleaved (A, B, C, A, B, C, ...), so that a change in the machine's speed meets all; ratios are medians over
repeats. After `--seconds` a row begins no more repeats, but it has at least two.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.models import BATCHES, MODELS, JaxOps, Model, Ops, TensorFlowOps
from benchmarks.train_step import TOLERANCE, check_same, ratio

AT_LEAST = 20
"""Steps that are timed together, in as many launches as they take."""

FED, LIMIT = "JAX, NumPy", "JAX"
"""Names of JAX with and without inputs."""

STEPS = {"linear": "1,10,100,1000", "mlp": "1,10,100"}
"""Steps in a launch, of each model, if the command line says nothing."""


def _linear(ops: Ops, weights: Sequence[Any], x: Any, labels: Any) -> Any:
    weight, bias = weights
    return ops.cross_entropy(ops.dense(x, weight) + bias, labels)


TRAINED = {
    # Logistic regression of 10 numbers: what its step costs is all that is around a step.
    "linear": Model("linear", _linear, shapes=((10, 2), (2,)), batch=8, example=(10,), classes=2),
    # With a rate at which 1000 steps do not make the loss so small that it consists of rounding errors.
    "mlp": dataclasses.replace(MODELS["mlp"], rate=0.002),
}
"""The models, by name."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One of them, with its weights at the start of training.

    Attributes:
        name: for the table.
        peer: the name of what gets the same inputs with one launch a step; None for JAX.
        launch: steps in a launch.
        train: makes so many launches, finished when it returns; returns the losses of the last step.
        mean: the mean of the losses that `train` returned.
    """

    name: str
    peer: str | None
    launch: int
    train: Callable[[int], Any]
    mean: Callable[[Any], float]


def contenders(model: Model, replicas: int, launch: int) -> list[Contender]:
    """All of them; those with device loops take `launch` steps in a launch."""
    return [
        *(tpu_strategy(model, replicas, inputs, launch) for inputs in INPUTS),
        *(tpu_strategy(model, replicas, inputs) for inputs in INPUTS),
        jax_fori_loop(model, replicas, launch, fed=True),
        jax_fori_loop(model, replicas, launch),
    ]


def tpu_strategy(model: Model, replicas: int, inputs: str, launch: int | None = None) -> Contender:
    """The library: `run_steps` with `launch` steps in a launch, or `run` for each step."""
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
    """JAX: a loop on the devices, over batches that are there before it begins, or that the host feeds in."""
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

    # Checked, shard_map would sum the gradients by itself, and psum once more.
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
            # With two programs in flight on CPU, their replicas can wait for each other for ever.
            jax.block_until_ready(losses)
        return losses

    return Contender(FED if fed else LIMIT, None, launch, train, lambda losses: float(np.mean(losses)))


def numpy_batches(model: Model, strategy: Any) -> Iterator[Any]:
    """Arrays, which all replicas get."""
    batches = [(x[0], labels[0]) for x, labels in model.data(1)]
    while True:
        yield from batches


def distributed_batches(model: Model, strategy: Any) -> Iterator[Any]:
    """The same, from a distributed data set: its batch is one for each replica, and each gets its share."""
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
"""Where batches come from, by name."""


def milliseconds(contender: Contender, launches: int) -> float:
    """Milliseconds a step."""
    begin = time.perf_counter()
    contender.train(launches)
    return (time.perf_counter() - begin) / (launches * contender.launch) * 1e3


def measure(contenders: Sequence[Contender], repeats: int, limit: float) -> list[dict[str, Any]]:
    """Trains with each, and times them in turn.

    Returns:
        For each its loss after the first steps, and milliseconds a step of each repeat.

    Raises:
        SystemExit: their losses differ.
    """
    most = max(contender.launch for contender in contenders)
    losses = {each.name: each.mean(each.train(most // each.launch)) for each in contenders}
    check_same(losses)
    taken: dict[str, list[float]] = {name: [] for name in losses}
    gc.collect()
    end = time.perf_counter() + limit
    for done in range(repeats):
        if done >= 2 and time.perf_counter() > end:
            break
        for each in contenders:
            taken[each.name].append(milliseconds(each, -(-AT_LEAST // each.launch)))
    return [
        {"contender": each.name, "peer": each.peer, "loss": losses[each.name], "ms": taken[each.name]}
        for each in contenders
    ]


def print_rows(model: str, launch: int, rows: list[dict[str, Any]]) -> None:
    """A part of the table."""
    taken = {row["contender"]: row["ms"] for row in rows}
    for row in rows:
        mine = row["ms"]
        figures = f"{statistics.median(mine):.3f} | {min(mine):.3f}-{max(mine):.3f}"
        ratios = [f"{ratio(mine, taken[peer]):.2f}" if peer else "" for peer in (row["peer"], FED, LIMIT)]
        print(f"| {model} | {launch} | {row['contender']} | {figures} | {' | '.join(ratios)} | {row['loss']:.6f} |")
    sys.stdout.flush()


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="linear,mlp", help="which (default %(default)s)")
    parser.add_argument("--steps", help=f"steps in a launch (default {STEPS})")
    parser.add_argument("--replicas", type=int, default=2, help="how many (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=7, help="interleaved repeats (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="for the repeats of a row (default %(default)s)")
    parser.add_argument("--json", help="write the figures to this file as well")
    flags = parser.parse_args()

    # After the flags are read: importing the frameworks takes seconds.
    from benchmarks.contenders import start

    start(flags.replicas)
    import jax
    import tensorflow as tf

    versions = f"Python {platform.python_version()}, TensorFlow {tf.__version__}, jax {jax.__version__}"
    print(f"{platform.machine()}, {versions}; {flags.replicas} replicas; losses equal to {TOLERANCE:g}")
    print("| model | steps a launch | | ms a step | spread | to run | to JAX, NumPy | to JAX | loss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    table = []
    for name in flags.models.split(","):
        for launch in map(int, (flags.steps or STEPS[name]).split(",")):
            rows = measure(contenders(TRAINED[name], flags.replicas, launch), flags.repeats, flags.seconds)
            print_rows(name, launch, rows)
            table += [{"model": name, "replicas": flags.replicas, "launch": launch, **row} for row in rows]
    if flags.json:
        with open(flags.json, "w") as file:
            json.dump({"versions": versions, "rows": table}, file, indent=1)


if __name__ == "__main__":
    main()
