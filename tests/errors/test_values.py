"""Values that replicas cannot be given, or that cannot be brought together."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.errors import CheckpointError, ReplicaValueError
from replica_engine.errors.value_errors import note_no_value


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch):
    """The working directory of a program that writes files."""
    monkeypatch.chdir(tmp_path)


@shows(ReplicaValueError.other_size)
def test_a_value_of_a_strategy_of_another_size():
    two, three = TPUStrategy(num_cores=2), TPUStrategy(num_cores=3)

    def replica_id(context):
        return tf.constant(context.replica_id_in_sync_group)

    ids = two.experimental_distribute_values_from_function(replica_id)
    three.run(tf.square, args=(ids,))


@shows(ReplicaValueError.several)
def test_the_loss_of_a_run_as_a_number():
    strategy = TPUStrategy(num_cores=2)
    loss = strategy.run(tf.square, args=(tf.constant(2.0),))
    print(f"loss {loss:.3f}")


def test_compiled_replicas_say_that_a_gradient_is_none():
    with pytest.raises(ReplicaValueError, match=r"all_reduce is None\. A tape gives None"):
        TPUStrategy(num_cores=2).run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", [tf.constant(1.0), None])
        )


@shows(ReplicaValueError.no_tensor)
def test_a_number_that_is_too_large():
    strategy = TPUStrategy(num_cores=2)

    def step(batch):
        return batch["x"]

    strategy.run(step, args=({"x": np.array([1.0, "a"], dtype=object)},))


@shows(ReplicaValueError.sum_of_one)
def test_a_sum_of_a_variable():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(1.0, name="weight")
    strategy.reduce("SUM", weight, axis=None)


@shows(ReplicaValueError, "not_added")
def test_a_sum_of_truths():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def is_positive(x):
        return x > 0.0

    strategy.reduce("SUM", strategy.run(is_positive, args=(tf.constant(1.0),)), axis=None)


@shows(note_no_value)
def test_a_function_of_numpy():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return x / np.sum(x)

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(CheckpointError)
def test_a_checkpoint_below_a_file(in_a_folder):
    with MirroredStrategy(["CPU:0"]).scope():
        weight = tf.Variable(1.0)
    open("results", "w").close()
    tf.train.Checkpoint(weight=weight).save("results/ckpt")


@shows(CheckpointError.not_written)
def test_an_asynchronous_checkpoint_whose_name_is_taken(in_a_folder):
    with MirroredStrategy(["CPU:0"]).scope():
        weight = tf.Variable(1.0)
    checkpoint = tf.train.Checkpoint(weight=weight)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    tf.io.gfile.makedirs("ckpt-1.index/a_folder")
    checkpoint.save("ckpt", options)
    checkpoint.save("ckpt", options)
