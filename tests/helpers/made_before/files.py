"""Checkpoints, SavedModels and summaries: objects that have written and read files, and their methods by names."""

import os
import tempfile

import numpy as np
import tensorflow as tf

from helpers.made_before import BOTH, made_before, shares
from helpers.on_mirrored import run

ASYNCHRONOUS = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)


class _Training:
    """A module with a plain weight, and a checkpoint of it, in a folder whose name is a pattern for another one."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.beside, self.folder = (os.path.join(self._folder.name, name) for name in ("lr1", "lr[1]"))
        self.module = tf.Module()
        self.module.weight = tf.Variable(1.0)
        self.checkpoint = tf.train.Checkpoint(module=self.module)
        for folder in (self.beside, self.folder):
            os.mkdir(folder)

    def begin(self, strategy, value):
        """Gives the module a weight of the strategy."""
        with strategy.scope():
            self.module.weight = tf.Variable(value)


@made_before(*BOTH)
def a_manager_of_checkpoints():
    from tensorflow.train import latest_checkpoint, load_variable

    training = _Training()
    manager = tf.train.CheckpointManager(training.checkpoint, training.folder, max_to_keep=1)
    beside = tf.train.CheckpointManager(training.checkpoint, training.beside, max_to_keep=1)
    beside.save(checkpoint_number=100)
    first = manager.save()

    def use(strategy):
        training.begin(strategy, 5.0)
        path = manager.save()
        assert latest_checkpoint(training.folder) == path != first
        assert (
            sorted(each.partition(".")[0] for each in os.listdir(training.beside)) == ["checkpoint"] + ["ckpt-100"] * 2
        )
        assert {each.partition(".")[0] for each in os.listdir(training.folder)} == {
            "checkpoint",
            os.path.basename(path),
        }
        training.module.weight.assign(0.0)
        manager.restore_or_initialize()
        assert float(training.module.weight) == 5.0
        assert load_variable(beside.latest_checkpoint, "module/weight/.ATTRIBUTES/VARIABLE_VALUE") == 1.0

    return use


@made_before(*BOTH)
def methods_of_a_checkpoint():
    training = _Training()
    save, restore = training.checkpoint.save, training.checkpoint.restore
    write, read, sync = training.checkpoint.write, training.checkpoint.read, training.checkpoint.sync
    for folder in (training.beside, training.folder):
        save(os.path.join(folder, "ckpt"))
        write(os.path.join(folder, "written"))

    def use(strategy):
        training.begin(strategy, 3.0)
        for write_to, read_from in ((save, restore), (write, read)):
            path = write_to(os.path.join(training.folder, "later"))
            training.module.weight.assign(0.0)
            read_from(path)
            assert float(training.module.weight) == 3.0
        path = save(os.path.join(training.folder, "asynchronous"), ASYNCHRONOUS)
        training.module.weight.assign(0.0)
        sync()
        restore(path)
        assert float(training.module.weight) == 3.0

    return use


@made_before(*BOTH)
def a_checkpoint_that_was_saved_asynchronously():
    training = _Training()
    training.checkpoint.save(os.path.join(training.folder, "before"), ASYNCHRONOUS)
    training.checkpoint.sync()

    def use(strategy):
        training.begin(strategy, 4.0)
        path = training.checkpoint.save(os.path.join(training.folder, "later"), ASYNCHRONOUS)
        training.module.weight.assign(0.0)
        training.checkpoint.sync()
        training.checkpoint.restore(path, ASYNCHRONOUS)
        assert float(training.module.weight) == 4.0

    return use


@made_before(*BOTH)
def a_saved_model_that_was_loaded():
    from tensorflow.saved_model import load, save

    module = tf.Module()
    module.weight = tf.Variable(2.0)
    module.call = tf.function(lambda x: x * module.weight, input_signature=[tf.TensorSpec([], tf.float32)])
    folder = tempfile.TemporaryDirectory()
    save(module, os.path.join(folder.name, "before"))
    loaded = load(os.path.join(folder.name, "before"))
    assert loaded.call(tf.constant(3.0)) == 6.0

    def use(strategy):
        assert run(strategy, lambda x: loaded.call(x), shares(strategy, [3.0, 4.0])) == [6.0, 8.0]
        path = os.path.join(folder.name, type(strategy).__name__)
        trained = tf.Module()
        with strategy.scope():
            trained.weight = tf.Variable(5.0)
        trained.call = tf.function(lambda x: x * trained.weight, input_signature=[tf.TensorSpec([], tf.float32)])
        save(trained, path)
        one = load(path)
        assert one.call(tf.constant(3.0)) == 15.0
        with strategy.scope():
            again = load(path)
        assert run(strategy, lambda x: again.call(x), shares(strategy, [3.0, 4.0])) == [15.0, 20.0]

    return use


@made_before(*BOTH)
def a_writer_of_summaries():
    from tensorflow.summary import scalar

    folder = tempfile.TemporaryDirectory()
    writer = tf.summary.create_file_writer(folder.name)

    @tf.function
    def noted(x):
        scalar("x", x)
        return x

    with writer.as_default(step=0):
        noted(tf.constant(1.0))
    steps = []

    def use(strategy):
        with writer.as_default(step=1 + len(steps)):
            strategy.run(lambda x: noted(x), args=(shares(strategy, [10.0, 20.0]),))
        steps.append(1 + len(steps))
        writer.flush()
        found = []
        for file in os.listdir(folder.name):
            for record in tf.data.TFRecordDataset(os.path.join(folder.name, file)):
                event = tf.compat.v1.Event.FromString(record.numpy())
                found += [(event.step, float(np.asarray(tf.make_ndarray(each.tensor)))) for each in event.summary.value]
        assert found == [(0, 1.0), *((step, 10.0) for step in steps)]

    return use
