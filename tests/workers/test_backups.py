"""A signal to one of two workers ends both after the same step, and the job that the launcher starts again goes on.

Here the job trains twice: undisturbed, and with a signal. Both come to the same numbers, bit by bit.
"""

import os
import subprocess
import sys

import pytest

LAUNCH = [sys.executable, "-m", "replica_engine", "launch", "--workers", "2", "--max-restarts", "1"]

PROGRAM = """
import os, signal, sys

folder, kind = sys.argv[1:]
me, restarts = int(os.environ["REPLICA_ENGINE_PROCESS_ID"]), int(os.environ["REPLICA_ENGINE_RESTART"])

import keras, numpy as np, replica_engine, tensorflow as tf
from replica_engine.keras.backup import preemption
from replica_engine.keras import BackupAndRestore, replicate_model

preemption.EVERY = 0.02  # seconds between two comparisons: some steps, of 40

strategy = replica_engine.TPUStrategy(num_cores=2) if kind == "tpu" else replica_engine.MultiWorkerMirroredStrategy()


class Signalled(keras.callbacks.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if me == 1 and restarts == 0 and self.seen == 7:
            os.kill(os.getpid(), signal.SIGUSR1)


def train(name, *callbacks):
    keras.utils.set_random_seed(1)
    data = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((data[:, :4], data[:, 4:])).shuffle(40).batch(8)
    parts = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile("adam", "mse", metrics=["mae"])
    log = [keras.callbacks.CSVLogger(f"{folder}/{name}.csv")] if me == 0 else []
    backup = BackupAndRestore(f"{folder}/{name}", save_freq=100, signals=(signal.SIGUSR1,))
    fitted = replicate_model(model, strategy=strategy).fit(
        dataset, epochs=8, verbose=2 - 2 * min(me, 1), callbacks=[*callbacks, *log, backup]
    )
    state = [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]
    return [*state, *(np.array(values) for values in fitted.history.values())]


if restarts == 0:
    np.savez(f"{folder}/{me}.npz", *train("undisturbed"))
found = train("signalled", Signalled())
with np.load(f"{folder}/{me}.npz") as expected:
    different = [name for name, value in zip(expected.files, found) if not np.array_equal(expected[name], value)]
print("different", different, "after restarts", restarts)
"""


@pytest.mark.parametrize("kind", ["mirrored", "tpu"])
@pytest.mark.full("five jobs, one after the other")
def test_a_signal_to_one_worker(tmp_path, kind):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [*LAUNCH, str(tmp_path / "program.py"), str(tmp_path), kind],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Exit status 138." in done.stdout
    assert "the job was preempted: all workers have ended with the status of SIGUSR1" in done.stderr
    for worker in range(2):
        assert f"[worker {worker}] different [] after restarts 1" in done.stdout, done.stdout + done.stderr
    logs = [(tmp_path / f"{name}.csv").read_text() for name in ("undisturbed", "signalled")]
    assert logs[0] == logs[1]


UNEQUAL = """
import os, sys

me, restarts = int(os.environ["REPLICA_ENGINE_PROCESS_ID"]), int(os.environ["REPLICA_ENGINE_RESTART"])

import keras, replica_engine, tensorflow as tf

strategy = replica_engine.MultiWorkerMirroredStrategy()
seen = []


def stop(batch, logs=None):
    seen.append(batch)
    if restarts == 0 and len(seen) == 6:
        os._exit(3)


x = tf.range(8.0 * (2 + 2 * me))[:, tf.newaxis] / 8
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
backup = replica_engine.keras.BackupAndRestore(sys.argv[1], save_freq=1, asynchronous=False)
stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
model.fit(tf.data.Dataset.from_tensor_slices((x, x)).batch(8), epochs=3, verbose=0, callbacks=[backup, stops])
print("batches", seen)
"""


@pytest.mark.full("a job that starts twice")
def test_workers_with_data_of_other_lengths_go_on_in_an_epoch_without_a_warning(tmp_path):
    """The epoch has the batches that the workers have agreed on, and not those of this worker alone."""
    (tmp_path / "program.py").write_text(UNEQUAL)
    done = subprocess.run(
        [*LAUNCH, str(tmp_path / "program.py"), str(tmp_path / "backup")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("batches [1, 2, 3, 0, 1, 2, 3]") == 2, done.stdout
    assert "The training goes on after batch" not in done.stderr
