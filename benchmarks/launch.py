"""What Python costs around one launch of a compiled program, beside a call of `jax.jit` in the same process.

    python -m benchmarks.launch [--replicas 2,4,8] [--runs 200] [--iterations 100] [--repeats 7] [--quick]
        [--json out.json]

The body adds 1 to a number and returns it, so a launch is nothing but what is around it. JAX runs the same program:
`shard_map` over as many CPU devices, the number donated, and finished before the next. With many steps in a launch,
`run_steps` should cost a fraction of that a step.
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
    """One of them.

    Attributes:
        launch: one launch, finished when it returns.
        steps: of a launch.
        total: how often 1 was added, as it says itself.
    """

    launch: Callable[[], Any]
    steps: int
    total: Callable[[], float]

    def timed(self, runs: int) -> float:
        """Milliseconds a step."""
        return milliseconds(self.launch, runs) / self.steps

    def checked(self) -> float:
        """How often it added 1 in `WARM_UP` launches, a step of each."""
        before = self.total()
        for _ in range(WARM_UP):
            self.launch()
        return (self.total() - before) / self.steps


def run(replicas: int) -> Contender:
    """One step a launch."""
    strategy, number = _number(replicas)

    def add_one() -> Any:
        return number.assign_add(1.0)

    return Contender(lambda: strategy.run(add_one), 1, lambda: float(number.numpy()))


def run_steps(replicas: int, iterations: int) -> Contender:
    """Many steps a launch, without inputs."""
    strategy, number = _number(replicas)
    no_inputs = itertools.repeat(())

    def add_one(context: Any) -> None:
        context.set_last_step_output("number", number.assign_add(1.0))

    return Contender(
        lambda: strategy.run_steps(add_one, no_inputs, iterations), iterations, lambda: float(number.numpy())
    )


def jax_jit(replicas: int) -> Contender:
    """JAX."""
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
    """A strategy, and a variable of it."""
    import tensorflow as tf

    import replica_engine

    strategy = replica_engine.TPUStrategy(num_cores=replicas)
    with strategy.scope():
        return strategy, tf.Variable(0.0)


def rows(replicas: int, flags: argparse.Namespace) -> Iterator[Row]:
    """A row for a launch, and one for a step of many in a launch."""
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
    """The rows of each number of replicas."""
    from benchmarks.contenders import start

    start(max(flags.replicas))
    for replicas in flags.replicas:
        yield from rows(replicas, flags)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("replicas", "2,4,8", "2", "how many", command.numbers),
        command.Option("runs", "200", "20", "steps a repeat"),
        command.Option("iterations", "100", "100", "steps of a launch with many"),
    )
