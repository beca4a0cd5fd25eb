"""How long a training stands still for a checkpoint: until an asynchronous save returns, beside a plain save.

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

import tensorflow as tf

import replica_engine
from benchmarks import command
from benchmarks.measure import Row, interleaved, milliseconds

COUNT = 16
PLAIN, THEIRS, ORBAX = "a plain save", "tf.distribute, asynchronous", "Orbax"
MADE = {
    "MirroredStrategy": lambda: replica_engine.MirroredStrategy(["CPU:0", "CPU:1"]),
    "TPUStrategy": lambda: replica_engine.TPUStrategy(num_cores=2),
    "TPUStrategy, fsdp": lambda: replica_engine.TPUStrategy(num_cores=2, distribution="fsdp"),
}


class Saves:
    """Weights of a strategy, of so many megabytes, that are saved to a folder again and again."""

    def __init__(self, strategy: Any, folder: str, megabytes: int):
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

        self._step = tf.function(lambda: strategy.run(on_replica))
        self._step()
        self.returns()

    def plain(self) -> float:
        """Milliseconds of a plain save."""
        return self._save(None)

    def returns(self, step: bool = False) -> float:
        """Milliseconds until an asynchronous save returns, and if asked for what the next step takes longer."""
        usual = statistics.median(milliseconds(self._step) for _ in range(3)) if step else 0.0
        took = self._save(self._asynchronous)
        if step:
            took += max(0.0, milliseconds(self._step) - usual)
        self._checkpoint.sync()
        return took

    def _save(self, options: Any) -> float:
        return milliseconds(lambda: self._checkpoint.write(os.path.join(self.folder, "ckpt"), options))


def _orbax(folder: str, megabytes: int) -> Callable[[], float]:
    """Measures how long Orbax takes to return, with as many arrays."""
    import jax
    import orbax.checkpoint

    saver = orbax.checkpoint.AsyncCheckpointer(orbax.checkpoint.StandardCheckpointHandler())
    shape = (megabytes * 256 // COUNT, 1024)
    arrays = {f"w{index}": jax.random.uniform(jax.random.key(index), shape) for index in range(COUNT)}

    def returns() -> float:
        arguments = orbax.checkpoint.args.StandardSave(arrays)
        took = milliseconds(lambda: saver.save(os.path.join(folder, "orbax"), args=arguments, force=True))
        saver.wait_until_finished()
        return took

    returns()
    return returns


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields the rows."""
    devices = replica_engine.logical_devices(2)
    for name, make in MADE.items():
        with tempfile.TemporaryDirectory() as folder:
            ours = Saves(make(), os.path.join(folder, "ours"), flags.megabytes)
            theirs = Saves(tf.distribute.MirroredStrategy(devices), os.path.join(folder, "theirs"), flags.megabytes)
            both = {name: ours, THEIRS: theirs}
            returns: dict[str, Callable[[], float]] = {who: each.returns for who, each in both.items()}
            if importlib.util.find_spec("orbax"):
                returns[ORBAX] = _orbax(folder, flags.megabytes)
            with_step = {who: functools.partial(each.returns, True) for who, each in both.items()}
            for what, contenders, targets in (
                ("until it returns", returns, {PLAIN: 0.1}),
                ("until it returns, and the next step", with_step, {}),
                ("a plain save", {name: ours.plain}, {}),
            ):
                figures = interleaved({**contenders, PLAIN: theirs.plain}, flags.repeats)
                yield Row("checkpoints", f"{flags.megabytes} MiB, {what}", figures, "ms", 2, targets=targets)


if __name__ == "__main__":
    command.main(__doc__, measure, command.Option("megabytes", "128", "8", "the size of the weights"))
