"""The cost of Python around one launch of a compiled program, beside a call of `jax.jit` in the same process.

The body adds 1 to a number and returns it, so almost all of the cost is around the launch. JAX runs the same program:
`shard_map` over the same number of CPU devices, with the number donated, each call finished before the next. With many
steps per launch, a step of `run_steps` should cost a fraction of that.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import tensorflow as tf

from benchmarks import command
from benchmarks.contenders import COMPILED, start, strategy_of
from benchmarks.jax_programs import SAME, SPLIT, mapped, mesh_of, on_devices
from benchmarks.measure import Row, interleaved, milliseconds, same

PEER = "jax.jit"

TARGETS = {"run": 1.2, "run_steps": 0.12}  # what a step may take, times a call of `jax.jit`

WARM_UP = 10  # launches before the clock starts


class Contender(NamedTuple):
    """One way to launch the program."""

    launch: Callable[[], Any]  # makes one launch and waits for its end
    steps: int  # the number of steps per launch
    total: Callable[[], float]  # the current value of the number: how often 1 was added

    def checked(self) -> float:
        """How often each step of `WARM_UP` launches added 1."""
        before = self.total()
        for _ in range(WARM_UP):
            self.launch()
        return (self.total() - before) / self.steps


def run(replicas: int) -> Contender:
    """One step per launch."""
    strategy, number = _number(replicas)

    def add_one() -> Any:
        return number.assign_add(1.0)

    return Contender(lambda: strategy.run(add_one), 1, lambda: float(number.numpy()))


def run_steps(replicas: int, iterations: int) -> Contender:
    """Many steps per launch, without inputs."""
    strategy, number = _number(replicas)
    no_inputs = itertools.repeat(())

    def add_one(context: Any) -> None:
        context.set_last_step_output("number", number.assign_add(1.0))

    return Contender(
        lambda: strategy.run_steps(add_one, no_inputs, iterations), iterations, lambda: float(number.numpy())
    )


def jax_jit(replicas: int) -> Contender:
    """The same program in JAX."""
    mesh = mesh_of(replicas)

    def add_one(number: Any) -> tuple[Any, Any]:
        number = number + 1.0
        return number, number[None]

    compiled = mapped(add_one, mesh, SAME, (SAME, SPLIT), donated=0)
    number = on_devices(mesh, np.float32(0), SAME)

    def launch() -> Any:
        nonlocal number
        number, results = compiled(number)
        return jax.block_until_ready(results)

    return Contender(launch, 1, lambda: float(number))


def _number(replicas: int) -> tuple[Any, Any]:
    """A strategy, and a variable in its scope."""
    strategy = strategy_of(COMPILED, replicas)
    with strategy.scope():
        return strategy, tf.Variable(0.0)


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for a launch, and one for a step in a launch with many steps, of each number of replicas."""
    start(max(flags.replicas))

    def step(contender: Contender) -> float:
        return milliseconds(contender.launch, max(1, flags.runs // contender.steps)) / contender.steps

    for replicas in flags.replicas:
        many = run_steps(replicas, flags.iterations)
        contenders = {"run": run(replicas), "run_steps": many, PEER: jax_jit(replicas)}
        added = {who: contender.checked() for who, contender in contenders.items()}
        check = same(f"each step's sum over {WARM_UP} launches", added)
        figures = interleaved(contenders, flags.repeats, step)
        for who, target in TARGETS.items():
            steps = contenders[who].steps
            name = "one launch of a tiny body" if steps == 1 else f"a step of {steps} in a launch"
            shown = {f"TPUStrategy.{who}": figures[who], PEER: figures[PEER]}
            yield Row("launch", name, shown, replicas=replicas, targets={PEER: target}, check=check)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.replicas("2,4,8"),
        command.Option("runs", "200", "20", "steps per repeat"),
        command.Option("iterations", "100", "100", "steps in a launch with many steps"),
    )
