"""The cost of Python around one launch of a compiled program, beside a call of `jax.jit` in the same process.

    python -m benchmarks.launch [--replicas 2,4,8] [--runs 200] [--iterations 100] [--repeats 5] [--quick]
        [--json out.json]

The body adds 1 to a number and returns it, so almost all of the cost is around the launch. JAX runs the same program:
`shard_map` over the same number of CPU devices, with the number donated, each call finished before the next. With many
steps per launch, a step of `run_steps` should cost a fraction of that.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import command
from benchmarks.measure import Row, interleaved, milliseconds, same

PEER = "jax.jit"

TARGETS = {"run": 1.2, "run_steps": 0.12}
"""What a step may take, times a call of `jax.jit`."""

WARM_UP = 10
"""Launches before the clock starts."""


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to launch the program.

    Attributes:
        launch: makes one launch and waits for its end.
        steps: the number of steps per launch.
        total: the current value of the number: how often 1 was added.
    """

    launch: Callable[[], Any]
    steps: int
    total: Callable[[], float]

    def timed(self, runs: int) -> float:
        """Milliseconds per step."""
        return milliseconds(self.launch, runs) / self.steps

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
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",))
    split, same_on_all = PartitionSpec("replica"), PartitionSpec()

    def add_one(number: Any) -> tuple[Any, Any]:
        number = number + 1.0
        return number, number[None]

    mapped = jax.shard_map(add_one, mesh=mesh, in_specs=same_on_all, out_specs=(same_on_all, split), check_vma=False)
    compiled = jax.jit(mapped, donate_argnums=0)
    number = jax.device_put(np.float32(0), NamedSharding(mesh, same_on_all))

    def launch() -> Any:
        nonlocal number
        number, results = compiled(number)
        return jax.block_until_ready(results)

    return Contender(launch, 1, lambda: float(number))


def _number(replicas: int) -> tuple[Any, Any]:
    """A strategy, and a variable in its scope."""
    import tensorflow as tf

    import replica_engine

    strategy = replica_engine.TPUStrategy(num_cores=replicas)
    with strategy.scope():
        return strategy, tf.Variable(0.0)


def rows(replicas: int, flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for a launch, and one for a step in a launch with many steps."""
    contenders = {
        "run": run(replicas),
        "run_steps": run_steps(replicas, flags.iterations),
        PEER: jax_jit(replicas),
    }
    added = {who: contender.checked() for who, contender in contenders.items()}
    check = same(f"each step's sum over {WARM_UP} launches", added)

    def step(who: str) -> float:
        return contenders[who].timed(max(1, flags.runs // contenders[who].steps))

    figures = interleaved({who: functools.partial(step, who) for who in contenders}, flags.repeats)
    for who, target in TARGETS.items():
        steps = contenders[who].steps
        yield Row(
            "launch",
            "one launch of a tiny body" if steps == 1 else f"a step of {steps} in a launch",
            {f"TPUStrategy.{who}": figures[who], PEER: figures[PEER]},
            replicas=replicas,
            targets={PEER: target},
            check=check,
        )


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows of each number of replicas."""
    from benchmarks.contenders import start

    start(max(flags.replicas))
    for replicas in flags.replicas:
        yield from rows(replicas, flags)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("replicas", "2,4,8", "2", "numbers of replicas", command.numbers),
        command.Option("runs", "200", "20", "steps per repeat"),
        command.Option("iterations", "100", "100", "steps in a launch with many steps"),
    )
