"""Trains, saves a checkpoint every few steps, and resumes from the last one.

With the strategy "workers" or "compiled workers" it is one of the workers of a job, and with `--kill` that worker gets
kill -9 so many seconds after the beginning of that step, unless the job was started again. It prints a hash of the
variables at the end, which does not depend on how often the training was stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import signal
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from soak.programs.common import SIZE, check, check_works, make_strategy, say

EVERY = 5  # the number of steps from one checkpoint to the next


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy")
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--full-disk", action="store_true", help="no file may grow, for a while")
    parser.add_argument("--kill", type=float, nargs=3, metavar=("WORKER", "STEP", "SECONDS"))
    flags = parser.parse_args()
    say(train(make_strategy(flags.strategy), flags.directory, flags.steps, flags.full_disk, flags.kill))
    say("done")


def train(strategy: Any, directory: str, to: int, full_disk: bool = False, kill: Sequence[float] | None = None) -> str:
    """Trains from the last checkpoint in a directory, or from the beginning, to a step.

    The disk may be full at the second checkpoint. `kill` has the worker that is killed, in which step, and how many
    seconds later. Returns the step where it resumed, and a hash of the variables at the end.
    """
    with strategy.scope():
        weight = tf.Variable(tf.random.stateless_normal([64, 64], [1, 2]))
        momentum = tf.Variable(tf.zeros([64, 64]))
        steps = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    checkpoint = tf.train.Checkpoint(weight=weight, momentum=momentum, steps=steps)
    manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=2)
    manager.restore_or_initialize()
    began = int(steps.numpy())

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ weight) ** 2)
        gradient = tf.distribute.get_replica_context().all_reduce("MEAN", tape.gradient(loss, weight))
        momentum.assign(0.9 * momentum + gradient)
        weight.assign_sub(0.1 * momentum)
        steps.assign_add(1)

    for number in range(began, to):
        if kill is not None and number == kill[1]:
            _kill_soon(int(kill[0]), kill[2])
        x = strategy.experimental_distribute_values_from_function(
            lambda context, step=number: tf.random.stateless_normal([16, 64], [step, context.replica_id_in_sync_group])
        )
        strategy.run(step, args=(x,))
        if (number + 1) % EVERY == 0:
            if full_disk and number + 1 == 2 * EVERY:
                _save_on_full_disk(manager)
                check_works(strategy)
            else:
                manager.save(checkpoint_number=number + 1)
                if number < began + EVERY:
                    say("ready")
    copies = [np.asarray(value) for value in strategy.experimental_local_results(weight)]
    check(all(copy.tobytes() == copies[0].tobytes() for copy in copies), "the replicas' weights differ")
    check(int(steps.numpy()) == to, f"{int(steps.numpy())} steps were made, on {SIZE} replicas")
    hashes = [hashlib.sha256(array.tobytes()).hexdigest()[:16] for array in (copies[0], momentum.numpy())]
    return f"from {began}: {' '.join(hashes)}"


def _kill_soon(worker: int, seconds: float) -> None:
    """Has this process killed, if it is that worker, and if the job is not one that was started again."""
    if os.environ["REPLICA_ENGINE_PROCESS_ID"] == str(worker) and os.environ["REPLICA_ENGINE_RESTART"] == "0":
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _save_on_full_disk(manager: tf.train.CheckpointManager) -> None:
    """Saves with a limit on the size of files: saving fails, and the earlier checkpoint remains."""
    before = manager.latest_checkpoint
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        manager.save(checkpoint_number=2 * EVERY)
        check(False, "a checkpoint was saved on a full disk")
    except (tf.errors.OpError, OSError) as error:
        found = f"{type(error).__name__}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    check(tf.train.latest_checkpoint(manager.directory) == before, "the last good checkpoint is not the latest")
    tf.train.load_checkpoint(before).get_tensor("weight/.ATTRIBUTES/VARIABLE_VALUE")
    say(f"saving raised {found}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        say("interrupted")
        raise
