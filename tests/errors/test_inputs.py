"""What replicated functions are called with, and from where."""

import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.errors import GraphModeError, InputsError, NoMethodError, NotInBodyError, ReplicaMismatchError


@shows(NotInBodyError)
def test_a_replica_id_outside_a_body():
    print(xla.replica_id())


@shows(NotInBodyError, "on_thread")
def test_a_replica_id_on_a_thread():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step():
        return xla.replica_id()

    strategy.run(step)


@shows(NoMethodError)
def test_steps_of_replicas_on_threads():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    strategy.run_steps(tf.square, iter(dataset), iterations=2)


def test_hasattr_tells_which_strategy_has_run_steps():
    assert not hasattr(MirroredStrategy(["CPU:0"]), "run_steps")
    assert hasattr(TPUStrategy(num_cores=1), "run_steps")


@shows(InputsError)
def test_an_iterator_as_an_argument():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)

    def step(iterator):
        return 2.0 * next(iterator)

    strategy.run(step, args=(iter(strategy.experimental_distribute_dataset(dataset)),))


@shows(ReplicaMismatchError.shapes)
def test_a_last_batch_that_cannot_be_shared_evenly():
    strategy = TPUStrategy(num_cores=2)
    batches = tf.data.Dataset.range(7, output_type=tf.float32).batch(4)

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("MEAN", tf.reduce_mean(x))

    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=(batch,))


def test_compiled_replicas_refuse_an_array_in_the_place_of_a_dataset():
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset\.from_tensor_slices\(x\)\.batch\(n\)"):
        TPUStrategy(num_cores=2).experimental_distribute_dataset([tf.zeros([4, 3])])


def test_compiled_replicas_refuse_a_dataset_of_single_samples():
    with pytest.raises(InputsError, match=r"experimental_distribute_dataset\(dataset\.batch\(n\)\)"):
        TPUStrategy(num_cores=2).experimental_distribute_dataset(tf.data.Dataset.range(8))


@shows(ReplicaMismatchError, "at_sync_point")
def test_a_smaller_share_in_an_all_reduce():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    batches = tf.data.Dataset.range(7, output_type=tf.float32).batch(4)

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=(batch,))


@shows(GraphModeError)
def test_a_graph_of_the_past():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return 2.0 * x

    with tf.Graph().as_default():
        strategy.run(step, args=(tf.constant(1.0),))
