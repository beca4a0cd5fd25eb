"""Calls of replicated functions, device loops and models with arguments that do not fit."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, xla
from replica_engine.errors import (
    BatchError,
    HostAccessError,
    InputsError,
    LogError,
    ReplicaMismatchError,
    ReplicateError,
)
from replica_engine.keras import replicate_model


def test_a_distributed_dataset_for_a_replicated_model(threads):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")
    model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones((8, 2)))).batch(4)
    with pytest.raises(BatchError, match="fit of a replicated model got a DistributedDataset, and"):
        replicate_model(model, strategy=threads).fit(threads.experimental_distribute_dataset(dataset))


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


def _step(context, x, name="loss"):
    context.set_last_step_output(name, tf.reduce_sum(x), "SUM")


def _step_with_a_list(context, x):
    _step(context, x, ["loss"])


def _batches():
    return iter(tf.data.Dataset.range(64).batch(8))


LOOPS = {
    "a number for an iterator": (
        lambda tpu: tpu.run_steps(_step, 100),
        "run_steps takes an iterator, for example iter",
    ),
    "an output named by a list": (
        lambda tpu: tpu.run_steps(_step_with_a_list, _batches(), iterations=8),
        "s output must be a string",
    ),
    "initial values without names": (
        lambda tpu: tpu.run_steps(_step, _batches(), iterations=8, initial_loop_values=[0]),
        "`initial_loop_values` must be a mapping of names to values",
    ),
}


@pytest.mark.parametrize(("call", "words"), LOOPS.values(), ids=LOOPS)
def test_device_loops(tpu, call, words):
    with pytest.raises(InputsError, match=words):
        call(tpu)


def test_inputs_that_look_at_a_variable(tpu):
    with tpu.scope():
        scale = tf.Variable(1.0)

    def batches():
        yield tf.ones([4])
        yield tf.ones([4]) * scale

    with pytest.raises(HostAccessError, match="The iterator of a device loop uses devices: it runs a"):
        tpu.run_steps(lambda context, x: scale.assign_add(tf.reduce_sum(x)), batches(), iterations=2)


def double(x):
    return 2.0 * x


def test_inputs_that_are_no_lists_of_arguments():
    with pytest.raises(InputsError, match="`inputs` must be a list with one argument list for each"):
        xla.replicate(double, inputs=tf.constant([1.0, 2.0]))
    with pytest.raises(InputsError, match="`inputs` must hold a list of arguments for each replica"):
        xla.replicate(double, inputs=[tf.constant(1.0), tf.constant(2.0)])


def test_a_dataset_as_an_argument(tpu):
    dataset = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 3.0, 4.0]).batch(2)
    with pytest.raises(InputsError, match="is a BatchDataset, and a compiled body takes the values of"):
        tpu.run(double, args=(dataset,))
    with pytest.raises(InputsError, match="is a DistributedDataset, and replicas take one batch of it"):
        tpu.run(double, args=(tpu.experimental_distribute_dataset(dataset),))


def test_a_compiled_body_in_a_function():
    inputs = [[tf.constant(1.0)], [tf.constant(2.0)]]
    compiled = xla.lower(double, inputs).compile()
    with pytest.raises(InputsError, match="`double` is compiled and runs in eager mode"):
        tf.function(lambda: compiled(inputs))()


@pytest.mark.parametrize(
    ("shape", "make", "words"),
    [
        ([None], lambda: tf.constant([1, 2]), "but the input_signature has dtype float32 and shape"),
        ([None, 3], lambda: tf.ones([2, 4]), "but the input_signature has the shape"),
        ([None], lambda: [tf.ones([2]), tf.ones([2])], "`step` was called with 2 tensors, but the input_signature"),
    ],
    ids=["dtype", "shape", "structure"],
)
def test_another_argument_than_that_of_the_signature(tpu, shape, make, words):
    @tf.function(input_signature=[tf.TensorSpec(shape, tf.float32)])
    def step(x):
        return 2.0 * x

    with pytest.raises(InputsError, match=words):
        tpu.run(step, args=(make(),))


def test_what_is_no_dataset_of_batches(threads):
    with pytest.raises(InputsError, match="Make a dataset of arrays, with the batch of all replicas"):
        threads.experimental_distribute_dataset(np.zeros([4, 3]))
    dataset = tf.data.Dataset.from_tensor_slices((tf.zeros([8, 3]), tf.zeros([8])))
    with pytest.raises(InputsError, match="The dataset has single samples and no batches: its elements"):
        threads.experimental_distribute_dataset(dataset)


def of_one(*shapes):
    return tf.data.Dataset.from_tensors(tuple(tf.zeros(shape) for shape in shapes)).repeat(4)


@pytest.mark.parametrize("shapes", [([13], [1]), ([1, 3], [4, 3])])
def test_a_dataset_of_elements_that_some_replicas_would_get_only_a_part_of(threads, shapes):
    with pytest.raises(InputsError, match="some parts and none of others"):
        threads.experimental_distribute_dataset(of_one(*shapes))
    threads.experimental_distribute_dataset(of_one(*shapes).batch(4))
    MirroredStrategy(["CPU:0"]).experimental_distribute_dataset(of_one(*shapes))


def test_a_dataset_of_two_batches_of_different_sizes(threads):
    """As for training with samples that have labels and others that have none."""
    few, many = next(iter(threads.experimental_distribute_dataset(of_one([2, 3], [16, 3]))))
    assert [each.shape[0] for each in few.values] == [1, 1]
    assert [each.shape[0] for each in many.values] == [8, 8]


def test_inputs_that_differ_between_replicas():
    with pytest.raises(ReplicaMismatchError, match="has dtype float32 on replica 0 and int32 on replica 1"):
        xla.replicate(lambda batch: 2 * batch["x"], [[{"x": tf.constant([1.0])}], [{"x": tf.constant([1])}]])
    weights = [[tf.Variable(1.0)], [tf.Variable(2.0)]]
    with pytest.raises(ReplicaMismatchError, match="is another variable on each replica, but one program runs"):
        xla.replicate(lambda weight: weight.assign_add(1.0), weights)


def test_another_backend(monkeypatch):
    """With KERAS_BACKEND=jax."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ReplicateError, match="Set KERAS_BACKEND=tensorflow in the environment before"):
        replicate_model(model, replicas=2)


def test_a_batch_size_that_is_part_of_the_model():
    model = keras.Sequential([keras.Input(batch_shape=(8, 4), name="pixels"), keras.layers.Dense(1)])
    with pytest.raises(ReplicateError, match="has a fixed batch size of 8, but each of 4 replicas would"):
        replicate_model(model, replicas=4)


def test_a_step_that_returns_a_count(threads):
    fast = replicate_model(Counting(), strategy=threads)
    with pytest.raises(LogError, match="of dtype int64, which may be a count of the replica"):
        fast.train_on_batch(np.ones([8, 3], "float32"), np.ones([8, 2], "float32"))


def test_a_batch_size_that_does_not_divide_for_a_step_of_ones_own(threads):
    with threads.scope():
        model = Counting()
    with pytest.raises(BatchError, match="A batch of 5 samples does not divide by 2 replicas"):
        model.fit(np.ones((10, 3)), np.ones((10, 2)), batch_size=5, verbose=0)
