"""How long a training stands still for a checkpoint: until an asynchronous save returns, beside a plain save.

    python -m benchmarks.checkpoints [--megabytes 128] [--repeats 5] [--quick] [--json out.json]

16 weights of a strategy on two CPU devices. "A plain save" is `tf.train.Checkpoint.write` without options, under
`tf.distribute.MirroredStrategy`. The save before has ended when the next one begins. "and the next step" has what the
step after the call takes longer than others: TensorFlow copies a value in that step, if something still holds it.
Orbax, if it is installed, saves as many JAX arrays.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import command
from benchmarks.measure import Row, interleaved, seconds

COUNT = 16
PLAIN, THEIRS, ORBAX = "a plain save", "tf.distribute, asynchronous", "Orbax"
MADE = {
    "MirroredStrategy": lambda: _ours().MirroredStrategy(["CPU:0", "CPU:1"]),
    "TPUStrategy": lambda: _ours().TPUStrategy(num_cores=2),
    "TPUStrategy, fsdp": lambda: _ours().TPUStrategy(num_cores=2, distribution="fsdp"),
}


def _ours() -> Any:
    import replica_engine

    return replica_engine


class Saves:
    """Weights of a strategy that are saved again and again.

    Args:
        strategy: the strategy.
        folder: where to save.
        megabytes: the size of all weights.
    """

    def __init__(self, strategy: Any, folder: str, megabytes: int):
        import tensorflow as tf

        self.folder = folder
        with strategy.scope():
            shape = [megabytes * 256 // COUNT, 1024]
            kind = tf.VariableAggregation.MEAN
            weights = [tf.Variable(tf.random.uniform(shape), aggregation=kind) for _ in range(COUNT)]
        self._checkpoint = tf.train.Checkpoint(weights=weights)
        self._asynchronous = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)

        def on_replica() -> None:
            for weight in weights:
                weight.assign_sub(weight * 1e-3)

        @tf.function
        def step() -> None:
            strategy.run(on_replica)

        self._step = step
        self._step()
        self.returns()

    def plain(self) -> float:
        """Milliseconds of a plain save."""
        return self._save(None)

    def returns(self, step: bool = False) -> float:
        """Milliseconds until an asynchronous save returns, and if asked for what the next step takes longer."""
        usual = statistics.median(seconds(self._step)[0] for _ in range(3)) * 1e3 if step else 0.0
        took = self._save(self._asynchronous)
        if step:
            took += max(0.0, seconds(self._step)[0] * 1e3 - usual)
        self._checkpoint.sync()
        return took

    def _save(self, options: Any) -> float:
        return seconds(lambda: self._checkpoint.write(os.path.join(self.folder, "ckpt"), options))[0] * 1e3


def _orbax(folder: str, megabytes: int) -> Callable[[], float]:
    """Measures how long Orbax takes to return, with as many arrays."""
    import jax
    import orbax.checkpoint

    saver = orbax.checkpoint.AsyncCheckpointer(orbax.checkpoint.StandardCheckpointHandler())
    arrays = {
        f"w{index}": jax.random.uniform(jax.random.key(index), (megabytes * 256 // COUNT, 1024))
        for index in range(COUNT)
    }

    def returns() -> float:
        arguments = orbax.checkpoint.args.StandardSave(arrays)
        took, _ = seconds(lambda: saver.save(os.path.join(folder, "orbax"), args=arguments, force=True))
        saver.wait_until_finished()
        return took * 1e3

    returns()
    return returns


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    devices = _ours().logical_devices(2)
    import tensorflow as tf

    for name, make in MADE.items():
        with tempfile.TemporaryDirectory() as folder:
            folders = [os.path.join(folder, each) for each in ("ours", "theirs")]
            ours = Saves(make(), folders[0], flags.megabytes)
            theirs = Saves(tf.distribute.MirroredStrategy(devices), folders[1], flags.megabytes)
            for what, contenders, target in (
                ("until it returns", {name: ours.returns, THEIRS: theirs.returns}, 0.1),
                (
                    "until it returns, and the next step",
                    {name: functools.partial(ours.returns, True), THEIRS: functools.partial(theirs.returns, True)},
                    None,
                ),
                ("a plain save", {name: ours.plain}, None),
            ):
                every: dict[str, Callable[[], float]] = {**contenders, PLAIN: theirs.plain}
                if target and importlib.util.find_spec("orbax"):
                    every[ORBAX] = _orbax(folder, flags.megabytes)
                targets = {} if target is None else {PLAIN: target}
                figures = interleaved(every, flags.repeats)
                yield Row("checkpoints", f"{flags.megabytes} MiB, {what}", figures, "ms", 2, targets=targets)


if __name__ == "__main__":
    command.main(__doc__, measure, command.Option("megabytes", "128", "8", "the size of the weights", command.positive))
