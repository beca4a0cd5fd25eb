"""Saves checkpoints until it is killed: `python -m soak.programs.saving`, for `soak/checkpoints.py`.

Each line of the input is a start: a folder, "threads" or "parts", and whether saves are asynchronous, as JSON. It is
made in a fork of this process, which has imported TensorFlow and not started it. The fork reads the checkpoints that
are there, compares every value with the step that the checkpoint names, and prints "found", the step of the newest one
of the manager and the step of the one that is written over and over. Then it saves on, and prints "saved" with the step
once a checkpoint is complete. When it has ended, this process prints "ended" and its status.
"""

from __future__ import annotations

import json
import os
import sys

from soak.programs.common import say

import replica_engine  # isort: skip
import keras  # noqa: F401, isort: skip - imported once for all forks

VALUES = 200_000
"""The size of each of the three weights; their values are the step."""


def train(folder: str, kind: str, asynchronous: bool) -> None:
    """Resumes and saves on until it is killed."""
    import numpy as np
    import tensorflow as tf

    devices = replica_engine.logical_devices(2)
    if kind == "threads":
        strategy = replica_engine.MirroredStrategy(devices)
    else:
        strategy = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")
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


def main() -> None:
    """Serves starts until the input ends."""
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                train(**json.loads(line))
            finally:
                sys.stdout.flush()
                os._exit(1)  # it never ends by itself
        say(f"pid {pid}")
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


if __name__ == "__main__":
    main()
