"""Saves checkpoints until it is killed: `python -m soak.programs.saving`, for `soak/checkpoints.py`.

A fork reads the checkpoints that are there, compares every value with the step that the checkpoint names, and prints
"found", the step of the newest one of the manager and the step of the one that is written over and over. Then it saves
on, and prints "saved" with the step once a checkpoint is complete.
"""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from soak.programs.common import make_strategy, say, serve

import keras  # noqa: F401, isort: skip - imported once for all forks

VALUES = 200_000  # the size of each of the three weights; their values are the step


def train(folder: str, kind: str, asynchronous: bool) -> None:
    """Resumes and saves on until it is killed."""
    strategy = make_strategy("threads") if kind == "threads" else make_strategy("compiled", distribution="fsdp")
    with strategy.scope():
        weights = [tf.Variable(tf.zeros([VALUES // 100, 100])) for _ in range(3)]
        step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(weights=weights, step=step)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    over = os.path.join(folder, "over")

    def read(path: str | None) -> int:
        if path is None:
            return 0
        checkpoint.read(path).expect_partial()
        for weight in weights:
            values = weight.numpy()
            assert np.all(values == step.numpy()), f"{path}: {values.min()} to {values.max()} at step {int(step)}"
        return int(step.numpy())

    found_over = read(over if os.path.exists(over + ".index") else None)
    newest = tf.train.latest_checkpoint(folder)
    found = read(newest)
    if newest is not None:
        checkpoint.restore(newest)
    say(f"found {found} {found_over}")
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=asynchronous)

    @tf.function
    def train_step() -> None:
        def on_replica() -> None:
            for variable in (*weights, step):
                variable.assign_add(tf.ones_like(variable))

        strategy.run(on_replica)

    for number in range(found + 1, 1_000_000):
        train_step()
        manager.save(options=options)  # returns when the one that is written over and over is complete
        if asynchronous and number > found + 1:
            say(f"saved over {number - 1}")
        say(f"saved {number if not asynchronous else number - 1}")
        checkpoint.write(over, options)
        say(f"saved {number}")
        if not asynchronous:
            say(f"saved over {number}")


if __name__ == "__main__":
    serve(train)
