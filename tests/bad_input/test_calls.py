"""Calls of replicated functions, device loops and models with arguments that do not fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.errors import (
    BatchError,
    HostAccessError,
    InputsError,
    LogError,
    ReplicaMismatchError,
    ReplicateError,
)
from replica_engine.keras import replicate_model


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")


class Counting(keras.Model):
    """Its training step returns a count."""

    def __init__(self):
        super().__init__()
        self.head = keras.layers.Dense(2)
        self(np.ones([1, 3], "float32"))
        self.compile("sgd")

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        return {"positive": tf.math.count_nonzero(self(data[0]) > 0)}


@pytest.fixture
def _on_jax(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")


def test_a_number_for_an_iterator():
    strategy = TPUStrategy(num_cores=2)

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    with pytest.raises(InputsError, match="run_steps takes an iterator, for example iter"):
        strategy.run_steps(step, 100)


def test_a_first_batch_that_cannot_be_shared_evenly():
    strategy = TPUStrategy(num_cores=2)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(64).batch(9))

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    with pytest.raises(InputsError, match="Batch with drop_remainder=True and a batch size that is a"):
        strategy.run_steps(step, iter(batches), iterations=7)


def test_a_last_batch_that_is_smaller():
    strategy = TPUStrategy(num_cores=2)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(20).batch(8))

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    with pytest.raises(InputsError, match="A device loop runs steps of one shape: batch with"):
        strategy.run_steps(step, iter(batches), iterations=3)


def test_an_output_named_by_a_list():
    strategy = TPUStrategy(num_cores=2)
    batches = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(64).batch(8)))

    def step(context, x):
        context.set_last_step_output(["loss"], tf.reduce_sum(x), "SUM")

    with pytest.raises(InputsError, match="s output must be a string"):
        strategy.run_steps(step, batches, iterations=8)


def test_an_output_that_is_set_in_a_branch():
    strategy = TPUStrategy(num_cores=2)

    def step(context, x):
        if x > 3.0:
            context.set_last_step_output("loss", x, "MEAN")

    with pytest.raises(InputsError, match="Set it in the step itself: give the variable a value before"):
        strategy.run_steps(step, [tf.constant(2.0), tf.constant(4.0)], 2)


def test_initial_values_without_names():
    strategy = TPUStrategy(num_cores=2)
    batches = iter(tf.data.Dataset.range(64).batch(8))

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    with pytest.raises(InputsError, match="`initial_loop_values` must be a mapping of names to values"):
        strategy.run_steps(step, batches, iterations=8, initial_loop_values=[0])


def test_inputs_that_look_at_a_variable():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        scale = tf.Variable(1.0)

    def batches():
        yield tf.ones([4])
        yield tf.ones([4]) * scale

    def step(context, x):
        scale.assign_add(tf.reduce_sum(x))

    with pytest.raises(HostAccessError, match="The iterator of a device loop uses devices: it runs a"):
        strategy.run_steps(step, batches(), iterations=2)


def test_a_tensor_for_all_replicas():
    def double(x):
        return 2.0 * x

    with pytest.raises(InputsError, match="`inputs` must be a list with one argument list for each"):
        xla.replicate(double, inputs=tf.constant([1.0, 2.0]))


def test_arguments_without_lists():
    def double(x):
        return 2.0 * x

    with pytest.raises(InputsError, match="`inputs` must hold a list of arguments for each replica"):
        xla.replicate(double, inputs=[tf.constant(1.0), tf.constant(2.0)])


def test_a_dataset_as_an_argument():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)

    def step(batch):
        return 2.0 * batch

    with pytest.raises(InputsError, match="is a BatchDataset, and a compiled body takes the values of"):
        strategy.run(step, args=(dataset,))


def test_a_distributed_dataset_as_an_argument():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)

    def step(batch):
        return 2.0 * batch

    with pytest.raises(InputsError, match="is a DistributedDataset, and replicas take one batch of it"):
        strategy.run(step, args=(strategy.experimental_distribute_dataset(dataset),))


def test_a_compiled_body_in_a_function():
    def double(x):
        return 2.0 * x

    inputs = [[tf.constant(1.0)], [tf.constant(2.0)]]
    compiled = xla.lower(double, inputs).compile()

    @tf.function
    def train():
        return compiled(inputs)

    with pytest.raises(InputsError, match="`double` is compiled and runs in eager mode"):
        train()


def test_another_dtype_than_that_of_the_signature():
    strategy = TPUStrategy(num_cores=2)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def step(x):
        return 2.0 * x

    with pytest.raises(InputsError, match="but the input_signature has dtype float32 and shape"):
        strategy.run(step, args=(tf.constant([1, 2]),))


def test_another_shape_than_that_of_the_signature():
    strategy = TPUStrategy(num_cores=2)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def step(x):
        return 2.0 * x

    with pytest.raises(InputsError, match="but the input_signature has the shape"):
        strategy.run(step, args=(tf.ones([2, 4]),))


def test_a_structure_that_is_none_in_the_signature():
    strategy = TPUStrategy(num_cores=2)

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        return 2.0 * x

    with pytest.raises(InputsError, match="`step` was called with 2 tensors, but the input_signature"):
        strategy.run(step, args=([tf.ones([2]), tf.ones([2])],))


def test_an_array_in_the_place_of_a_dataset():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(InputsError, match="Make a dataset of arrays, with the batch of all replicas"):
        strategy.experimental_distribute_dataset(np.zeros([4, 3]))


def test_a_dataset_of_single_samples():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = tf.data.Dataset.from_tensor_slices((tf.zeros([8, 3]), tf.zeros([8])))
    with pytest.raises(InputsError, match="The dataset has single samples and no batches: its elements"):
        strategy.experimental_distribute_dataset(dataset)


def of_one(*shapes):
    return tf.data.Dataset.from_tensors(tuple(tf.zeros(shape) for shape in shapes)).repeat(4)


@pytest.mark.parametrize("shapes", [([13], [1]), ([1, 3], [4, 3])])
def test_a_dataset_of_elements_that_some_replicas_would_get_only_a_part_of(shapes):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with pytest.raises(InputsError, match="some parts and none of others"):
        strategy.experimental_distribute_dataset(of_one(*shapes))
    strategy.experimental_distribute_dataset(of_one(*shapes).batch(4))
    MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(of_one(*shapes))


def test_a_dataset_of_two_batches_of_different_sizes():
    """As for training with samples that have labels and others that have none."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    few, many = next(iter(strategy.experimental_distribute_dataset(of_one([2, 3], [16, 3]))))
    assert [each.shape[0] for each in few.values] == [1, 1]
    assert [each.shape[0] for each in many.values] == [8, 8]


def test_inputs_of_two_dtypes():
    def double(batch):
        return 2 * batch["x"]

    with pytest.raises(ReplicaMismatchError, match="has dtype float32 on replica 0 and int32 on replica 1"):
        xla.replicate(double, inputs=[[{"x": tf.constant([1.0])}], [{"x": tf.constant([1])}]])


def test_a_variable_for_each_replica():
    weights = [tf.Variable(1.0), tf.Variable(2.0)]

    def step(weight):
        weight.assign_add(1.0)

    with pytest.raises(ReplicaMismatchError, match="is another variable on each replica, but one program runs"):
        xla.replicate(step, inputs=[[weights[0]], [weights[1]]])


@pytest.mark.usefixtures("_on_jax")
def test_another_backend():
    """With KERAS_BACKEND=jax."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ReplicateError, match="Set KERAS_BACKEND=tensorflow in the environment before"):
        replicate_model(model, replicas=2)


def test_a_batch_size_that_is_part_of_the_model():
    model = keras.Sequential([keras.Input(batch_shape=(8, 4), name="pixels"), keras.layers.Dense(1)])
    with pytest.raises(ReplicateError, match="has a fixed batch size of 8, but each of 4 replicas would"):
        replicate_model(model, replicas=4)


def test_a_step_that_returns_a_count():
    fast = replicate_model(Counting(), strategy=MirroredStrategy(["CPU:0", "CPU:1"]))
    with pytest.raises(LogError, match="of dtype int64, which may be a count of the replica"):
        fast.train_on_batch(np.ones([8, 3], "float32"), np.ones([8, 2], "float32"))


def test_a_batch_size_that_does_not_divide_for_a_step_of_ones_own():
    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = Counting()
    with pytest.raises(BatchError, match="A batch of 5 samples does not divide by 2 replicas"):
        model.fit(np.ones((10, 3)), np.ones((10, 2)), batch_size=5, verbose=0)


def test_a_distributed_dataset_for_a_replicated_model():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones((8, 2)))).batch(4)
    with pytest.raises(BatchError, match="fit of a replicated model got a DistributedDataset, and"):
        replicate_model(model, strategy=strategy).fit(strategy.experimental_distribute_dataset(dataset))
