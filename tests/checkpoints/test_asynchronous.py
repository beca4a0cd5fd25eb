"""Asynchronous checkpoints: the values of the step at which `save` was called, and no failed write that stays unknown.

The writer waits at a gate that a test opens, so what happens while a checkpoint is being written is no matter of time.
"""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.checkpoints import checkpoint_files
from replica_engine.errors import CheckpointError

ASYNCHRONOUS = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
MAKE = {
    "threads": lambda: replica_engine.MirroredStrategy(["CPU:0", "CPU:1"]),
    "compiled": lambda: replica_engine.TPUStrategy(num_cores=2),
    "zero1": lambda: replica_engine.TPUStrategy(num_cores=2, distribution="zero1"),
    "fsdp": lambda: replica_engine.TPUStrategy(num_cores=4, distribution="fsdp"),
    "two of two": lambda: replica_engine.TPUStrategy(num_cores=4, cores_per_replica=2, distribution="fsdp"),
}
SUM = {"synchronization": tf.VariableSynchronization.ON_READ, "aggregation": tf.VariableAggregation.SUM}


class Training:
    """A weight and a counter of a strategy, and a step that changes both."""

    def __init__(self, strategy):
        with strategy.scope():
            self.weight = tf.Variable(np.zeros([64, 32], "f"), aggregation=tf.VariableAggregation.MEAN)
            self.seen = tf.Variable(0.0, **SUM)
        self.checkpoint = tf.train.Checkpoint(weight=self.weight, seen=self.seen)
        self._strategy = strategy
        self._step = tf.function(lambda: strategy.run(self._on_replica))

    def _on_replica(self):
        self.weight.assign_add(tf.ones_like(self.weight))
        self.seen.assign_add(1.0)

    def step(self):
        self._step()

    def values(self):
        return float(self.weight.numpy().min()), float(self.seen.numpy())


def written(path):
    keys = (f"{name}/.ATTRIBUTES/VARIABLE_VALUE" for name in ("weight", "seen"))
    return tuple(float(np.min(tf.train.load_variable(path, key))) for key in keys)


@pytest.fixture
def gate(monkeypatch):
    """Holds back whatever writes values to files until it is set."""
    opened, write = threading.Event(), checkpoint_files.write

    def wait_and_write(*args):
        assert opened.wait(60)
        write(*args)

    monkeypatch.setattr(checkpoint_files, "write", wait_and_write)
    yield opened
    opened.set()
    checkpoint_files.join()


@pytest.mark.parametrize("name", MAKE)
def test_a_checkpoint_has_the_values_of_the_step_at_which_it_was_saved(name, gate, tmp_path):
    training = Training(MAKE[name]())
    manager = tf.train.CheckpointManager(training.checkpoint, tmp_path, max_to_keep=2)
    for save in (
        lambda: manager.save(options=ASYNCHRONOUS),
        lambda: training.checkpoint.save(tmp_path / "saved", options=ASYNCHRONOUS),
        lambda: training.checkpoint.write(tmp_path / "written", options=ASYNCHRONOUS),
    ):
        training.step()
        expected = training.values()
        gate.clear()
        path = save()
        for _ in range(2):
            training.step()
        assert training.values() != expected
        assert not tf.io.gfile.glob(f"{path}.*")
        gate.set()
        training.checkpoint.sync()
        assert written(path) == expected
    assert manager.latest_checkpoint == str(tmp_path / "ckpt-1")
    training.checkpoint.read(path, ASYNCHRONOUS).assert_existing_objects_matched()
    assert training.values() == expected


@pytest.mark.parametrize("name", ["threads", "compiled", "fsdp"])
def test_models_of_keras_have_the_values_of_that_step(name, gate, tmp_path):
    """Keras gives TensorFlow its variables to write, and not their values."""
    with MAKE[name]().scope():
        model = keras.Sequential([keras.Input([32]), keras.layers.Dense(64)])
        model.compile("adam", "mse")
    x, y = np.ones([8, 32], "f"), np.ones([8, 64], "f")
    saved = []

    class Saving(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                saved.append([each.numpy() for each in (*model.variables, *model.optimizer.variables)])
                manager.save(options=ASYNCHRONOUS)

    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    manager = tf.train.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Saving()])
    gate.set()
    checkpoint.restore(str(tmp_path / "ckpt-1")).assert_consumed()
    for value, variable in zip(saved[0], (*model.variables, *model.optimizer.variables), strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_second_save_and_a_restore_wait_for_the_first(gate, tmp_path):
    training = Training(MAKE["compiled"]())
    training.step()
    path = training.checkpoint.save(tmp_path / "ckpt", options=ASYNCHRONOUS)
    order = []

    def then(what, call):
        call()
        order.append(what)

    training.step()
    threads = [
        threading.Thread(target=then, args=("restored", lambda: training.checkpoint.restore(path))),
        threading.Thread(target=lambda: (order.append("opened"), gate.set())),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert order == ["opened", "restored"]
    assert training.values()[0] == 1.0


def test_a_restore_before_there_are_variables_waits_too(gate, monkeypatch, tmp_path):
    training = Training(MAKE["compiled"]())
    path = training.checkpoint.write(tmp_path / "ckpt", options=ASYNCHRONOUS)
    join = checkpoint_files.join
    monkeypatch.setattr(checkpoint_files, "join", lambda: (gate.set(), join())[1])
    tf.train.Checkpoint().read(path)  # raises NotFoundError if the files are not there yet


def test_memory_holds_one_snapshot(tmp_path):
    training = Training(MAKE["fsdp"]())
    places = set()
    for number in range(4):
        training.step()
        path = training.checkpoint.write(tmp_path / f"ckpt-{number}", options=ASYNCHRONOUS)
        training.checkpoint.sync()
        places.add(tuple(sorted(block.ctypes.data for block in checkpoint_files._free)))
    assert len(places) == 1
    assert 0 <= sum(block.nbytes for block in checkpoint_files._free) - 64 * 32 * 4 < 1024
    assert written(path)[0] == 4.0


def test_the_next_save_raises_the_error_of_the_last_one_once(tmp_path):
    training = Training(MAKE["threads"]())
    training.step()
    (tmp_path / "ckpt-1.index").mkdir()  # renaming the index to this name fails
    (tmp_path / "ckpt-1.index" / "file").touch()
    training.checkpoint.save(tmp_path / "ckpt", options=ASYNCHRONOUS)
    with pytest.raises(CheckpointError, match=r"ckpt-1' could not be written: .*asynchronously"):
        training.checkpoint.save(tmp_path / "ckpt", options=ASYNCHRONOUS)
    assert tf.train.latest_checkpoint(tmp_path) is None
    path = training.checkpoint.save(tmp_path / "ckpt")
    assert tf.train.latest_checkpoint(tmp_path) == path
    assert written(path) == (1.0, 2.0)


FAILING = """
import sys
import tensorflow as tf
import replica_engine

with replica_engine.MirroredStrategy(["CPU:0"]).scope():
    w = tf.Variable(1.0)
checkpoint = tf.train.Checkpoint(w=w)
options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
checkpoint.save({good!r}, options)
checkpoint.save({bad!r}, options)
print("the program has ended")
"""


def test_an_error_that_no_save_raises_ends_the_process_with_a_failure(programs, tmp_path):
    (tmp_path / "bad-2.index" / "folder").mkdir(parents=True)
    program = programs.start(FAILING.format(good=str(tmp_path / "good"), bad=str(tmp_path / "bad")))
    out, err = program.communicate(timeout=500)
    assert "the program has ended" in out
    assert "CheckpointError: The checkpoint" in err
    assert program.returncode == 1
    assert tf.train.latest_checkpoint(tmp_path) == str(tmp_path / "good-1")


def test_the_exception_that_ends_the_program_is_not_lost_above_an_error_of_a_write(programs, tmp_path):
    (tmp_path / "bad-2.index" / "folder").mkdir(parents=True)
    text = FAILING.format(good=str(tmp_path / "good"), bad=str(tmp_path / "bad"))
    program = programs.start(f"{text}raise ValueError('my mistake')\n")
    _, err = program.communicate(timeout=500)
    seen, last = err.rstrip().splitlines()[-2:]
    assert seen == "ValueError: my mistake"
    assert last.startswith("replica_engine.errors.CheckpointError: The checkpoint")
    assert program.returncode == 1
