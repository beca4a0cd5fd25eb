"""What replicated functions are called with, and from where."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.errors import GraphModeError, InputsError, NoMethodError, NotInBodyError, ReplicaMismatchError


@shows(NotInBodyError.outside)
def test_a_replica_id_outside_a_body():
    print(xla.replica_id())


@shows(NotInBodyError.on_thread)
def test_a_replica_id_on_a_thread():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step():
        return xla.replica_id()

    strategy.run(step)


@shows(NotInBodyError.on_host)
def test_a_sum_in_a_host_function():
    def report(loss):
        if xla.replica_id() == 0:
            tf.print("loss", xla.cross_replica_sum(loss))

    def step(x):
        xla.outside_compilation(report, x * x)

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


@shows(NoMethodError.run_steps)
def test_steps_of_replicas_on_threads():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    strategy.run_steps(tf.square, iter(dataset), iterations=2)


def test_hasattr_tells_which_strategy_has_run_steps():
    assert not hasattr(MirroredStrategy(["CPU:0"]), "run_steps")
    assert hasattr(TPUStrategy(num_cores=1), "run_steps")


@shows(InputsError.no_list)
def test_a_tensor_for_all_replicas():
    def double(x):
        return 2.0 * x

    xla.replicate(double, inputs=tf.constant([1.0, 2.0]))


@shows(InputsError.no_argument_list)
def test_arguments_without_lists():
    def double(x):
        return 2.0 * x

    xla.replicate(double, inputs=[tf.constant(1.0), tf.constant(2.0)])


@shows(InputsError.wrong_length)
def test_inputs_for_fewer_replicas():
    def double(x):
        return 2.0 * x

    xla.replicate(double, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]], num_replicas=4)


@shows(InputsError.iterator)
def test_an_iterator_as_an_argument():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)

    def step(iterator):
        return 2.0 * next(iterator)

    strategy.run(step, args=(iter(strategy.experimental_distribute_dataset(dataset)),))


@shows(InputsError.dataset)
def test_a_dataset_as_an_argument():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)

    def step(batch):
        return 2.0 * batch

    strategy.run(step, args=(dataset,))


@shows(InputsError.distributed, "compiled")
def test_a_distributed_dataset_as_an_argument():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)

    def step(batch):
        return 2.0 * batch

    strategy.run(step, args=(strategy.experimental_distribute_dataset(dataset),))


@shows(InputsError.nested)
def test_a_replicated_function_in_another():
    def double(x):
        return 2.0 * x

    def step(x):
        return xla.replicate(double, inputs=[[x], [x]])

    xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


@shows(InputsError.in_function)
def test_a_compiled_body_in_a_function():
    def double(x):
        return 2.0 * x

    inputs = [[tf.constant(1.0)], [tf.constant(2.0)]]
    compiled = xla.lower(double, inputs).compile()

    @tf.function
    def train():
        return compiled(inputs)

    train()


@shows(InputsError.other_program)
def test_a_compiled_body_with_another_shape():
    def double(x):
        return 2.0 * x

    compiled = xla.lower(double, [[tf.zeros([4])], [tf.zeros([4])]]).compile()
    compiled([[tf.zeros([3])], [tf.zeros([3])]])


@shows(InputsError.other_program, "in_structure")
def test_a_compiled_body_with_another_structure():
    def total(batch):
        return batch["x"] + batch["y"]

    one, two = tf.constant(1.0), tf.constant(2.0)
    compiled = xla.lower(total, [[{"x": one, "y": two}], [{"x": two, "y": one}]]).compile()
    compiled([[{"x": one}], [{"x": two}]])


@shows(InputsError.not_of_signature)
def test_another_dtype_than_that_of_the_signature():
    strategy = TPUStrategy(num_cores=2)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x):
        return 2.0 * x

    strategy.run(step, args=(tf.constant([1, 2]),))


@shows(InputsError.not_of_signature, "in_shape")
def test_another_shape_than_that_of_the_signature():
    strategy = TPUStrategy(num_cores=2)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        return 2.0 * x

    strategy.run(step, args=(tf.ones([2, 4]),))


@shows(InputsError.not_as_many)
def test_a_structure_that_is_none_in_the_signature():
    strategy = TPUStrategy(num_cores=2)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        return 2.0 * x

    strategy.run(step, args=([tf.ones([2]), tf.ones([2])],))


@shows(ReplicaMismatchError.shapes)
def test_a_last_batch_that_cannot_be_shared_evenly():
    strategy = TPUStrategy(num_cores=2)
    batches = tf.data.Dataset.range(7, output_type=tf.float32).batch(4)

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("MEAN", tf.reduce_mean(x))

    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=(batch,))


@shows(InputsError.no_dataset)
def test_an_array_in_the_place_of_a_dataset():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.experimental_distribute_dataset(np.zeros([4, 3]))


def test_compiled_replicas_refuse_an_array_in_the_place_of_a_dataset():
    with pytest.raises(TypeError, match=r"tf\.data\.Dataset\.from_tensor_slices\(x\)\.batch\(n\)"):
        TPUStrategy(num_cores=2).experimental_distribute_dataset([tf.zeros([4, 3])])


@shows(InputsError.not_batched)
def test_a_dataset_of_single_samples():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = tf.data.Dataset.from_tensor_slices((tf.zeros([8, 3]), tf.zeros([8])))
    strategy.experimental_distribute_dataset(dataset)


def test_compiled_replicas_refuse_a_dataset_of_single_samples():
    with pytest.raises(InputsError, match=r"experimental_distribute_dataset\(dataset\.batch\(n\)\)"):
        TPUStrategy(num_cores=2).experimental_distribute_dataset(tf.data.Dataset.range(8))


@shows(ReplicaMismatchError.shapes, "of_replicate")
def test_inputs_of_two_shapes():
    def double(x):
        return 2.0 * x

    xla.replicate(double, inputs=[[tf.zeros([4, 3])], [tf.zeros([2, 3])]])


@shows(ReplicaMismatchError.at_sync_point)
def test_a_smaller_share_in_an_all_reduce():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    batches = tf.data.Dataset.range(7, output_type=tf.float32).batch(4)

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=(batch,))


@shows(ReplicaMismatchError.at_sync_point, "gather")
def test_a_gathering_of_two_dtypes():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        return context.all_gather(x if first else tf.cast(x, tf.int32), axis=0)

    strategy.run(step, args=(tf.constant([1.0]),))


@shows(ReplicaMismatchError.at_sync_point, "off_the_axis")
def test_a_gathering_of_two_widths():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    widths = strategy.experimental_distribute_values_from_function(
        lambda context: tf.zeros([2, 3 + context.replica_id_in_sync_group])
    )

    def step(x):
        return tf.distribute.get_replica_context().all_gather(x, axis=0)

    strategy.run(step, args=(widths,))


@shows(ReplicaMismatchError.dtypes)
def test_inputs_of_two_dtypes():
    def double(batch):
        return 2 * batch["x"]

    xla.replicate(double, inputs=[[{"x": tf.constant([1.0])}], [{"x": tf.constant([1])}]])


@shows(ReplicaMismatchError.variables)
def test_a_variable_for_each_replica():
    weights = [tf.Variable(1.0), tf.Variable(2.0)]

    def step(weight):
        weight.assign_add(1.0)

    xla.replicate(step, inputs=[[weights[0]], [weights[1]]])


@shows(ReplicaMismatchError.not_tensors)
def test_text_for_each_replica():
    strategy = TPUStrategy(num_cores=2)
    modes = strategy.experimental_distribute_values_from_function(
        lambda context: "train" if context.replica_id_in_sync_group == 0 else "test"
    )

    def step(mode):
        return 1.0 if mode == "train" else 0.0

    strategy.run(step, args=(modes,))


@shows(GraphModeError.in_graph)
def test_a_graph_of_the_past():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return 2.0 * x

    with tf.Graph().as_default():
        strategy.run(step, args=(tf.constant(1.0),))
