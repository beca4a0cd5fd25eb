"""Keras models that cannot be replicated, batches that cannot be shared out, optimizers out of place."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy, split_batch
from replica_engine.errors import (
    BatchError,
    LogError,
    OptimizerError,
    ReplicateError,
    many_batch_sizes,
    note_sparse_inputs,
    warn_metric_not_a_sum,
    warn_uneven_evaluation,
    warn_uneven_rest,
)
from replica_engine.keras import CrossReplicaOptimizer, on_xla, replicate_model


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")


@shows(ReplicateError.not_a_model)
def test_a_layer():
    layer = keras.layers.Dense(1, name="hidden")
    replicate_model(layer, replicas=2)


@pytest.fixture
def _on_jax(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")


@pytest.mark.usefixtures("_on_jax")
@shows(ReplicateError.other_backend)
def test_another_backend():
    """With KERAS_BACKEND=jax."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    replicate_model(model, replicas=2)


@shows(ReplicateError.unbuilt)
def test_a_model_that_is_not_built():
    class Mine(keras.Model):
        def __init__(self):
            super().__init__(name="mine")
            self.hidden = keras.layers.Dense(8, name="hidden")

        def call(self, x):
            return self.hidden(x)

    replicate_model(Mine(), replicas=2)


@shows(ReplicateError.own_function)
def test_a_model_that_makes_its_train_function():
    class Mine(keras.Sequential):
        def make_train_function(self, force=False):
            self.train_function = lambda iterator: {"loss": 0.0}

    model = Mine([keras.Input((4,)), keras.layers.Dense(1)], name="mine")
    replicate_model(model, replicas=2)


@shows(ReplicateError.busy)
def test_a_model_on_two_threads():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    model.compile("sgd", "mse")
    x, y = np.ones([8, 4], "float32"), np.ones([8, 1], "float32")
    two, three = replicate_model(model, replicas=2), replicate_model(model, replicas=3)
    failures = []

    def evaluate():
        try:
            three.evaluate(x, y, verbose=0)
        except Exception as error:
            failures.append(error)

    class EvaluateMeanwhile(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()

    two.fit(x, y, verbose=0, callbacks=[EvaluateMeanwhile()])
    raise failures.pop()


@shows(ReplicateError.replicated)
def test_a_replicated_model():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    two = replicate_model(model, replicas=2)
    replicate_model(two, replicas=4)


@shows(ReplicateError.of_strategy)
def test_a_model_of_a_strategy():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    replicate_model(model, strategy=strategy)


@shows(ReplicateError.bad_count)
def test_no_replicas():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    replicate_model(model, replicas=0)


@shows(ReplicateError.bad_strategy)
def test_a_strategy_of_tensorflow():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    replicate_model(model, strategy=tf.distribute.OneDeviceStrategy("CPU:0"))


@shows(ReplicateError.too_many)
def test_more_replicas_than_the_strategy_has():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    replicate_model(model, replicas=4, strategy=strategy)


@shows(ReplicateError.too_few_devices)
def test_more_replicas_than_devices():
    """On 8 CPU devices."""
    words = keras.layers.StringLookup(vocabulary=["a", "b"], name="words")
    model = keras.Sequential([keras.Input((1,), dtype="string"), words, keras.layers.Embedding(4, 2)])
    replicate_model(model, replicas=16)


@shows(ReplicateError.fixed_batch)
def test_a_batch_size_that_is_part_of_the_model():
    model = keras.Sequential([keras.Input(batch_shape=(8, 4), name="pixels"), keras.layers.Dense(1)])
    replicate_model(model, replicas=4)


class Returning(keras.Model):
    """Its step returns what `value` makes of the outputs."""

    def __init__(self, value):
        super().__init__(name="net")
        self.hidden = keras.layers.Dense(2)
        self.value = value
        self(np.ones([1, 3], "float32"))
        self.compile("sgd")

    def call(self, x):
        return self.hidden(x)

    def train_step(self, data):
        return {"value": self.value(self(data[0]))}


def train(value):
    fast = replicate_model(Returning(value), strategy=MirroredStrategy(["CPU:0", "CPU:1"]))
    fast.train_on_batch(np.ones([8, 3], "float32"), np.ones([8, 2], "float32"))


@shows(LogError.not_a_number)
def test_a_step_that_returns_text():
    train(lambda outputs: tf.constant("done"))


@shows(LogError.of_samples)
def test_a_step_that_returns_a_number_for_each_sample():
    train(lambda outputs: tf.reduce_sum(outputs, axis=1))


@shows(LogError.integer)
def test_a_step_that_returns_a_count():
    train(lambda outputs: tf.math.count_nonzero(outputs > 0))


@shows(BatchError.lengths)
def test_arrays_of_two_lengths():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    fast = replicate_model(model, replicas=2)
    fast.train_on_batch(np.ones([8, 4], "float32"), np.ones([6, 1], "float32"))


@shows(BatchError.nothing)
def test_a_batch_without_samples():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    split_batch(strategy, {"rate": 0.1})


@shows(BatchError.too_large)
def test_a_batch_of_more_samples_than_said():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    split_batch(strategy, np.ones([9, 4], "float32"), batch_size=8)


@pytest.fixture
def _few_sizes(monkeypatch):
    monkeypatch.setattr(on_xla, "MANY_SIZES", 2)


@pytest.mark.usefixtures("_few_sizes")
@shows(many_batch_sizes)
def test_batches_of_many_sizes():
    """The warning comes at the second size here, and not at the eighth."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="small")
    fast = replicate_model(model, strategy=TPUStrategy(num_cores=2))
    for size in (2, 8):
        fast.predict_on_batch(np.ones([size, 4], "float32"))


@shows(note_sparse_inputs)
def test_a_sparse_input_of_a_compiled_model():
    words = keras.Input((4,), sparse=True, name="words")
    model = keras.Model({"words": words}, keras.layers.Dense(2, name="score")(words), name="scorer")
    fast = replicate_model(model, strategy=TPUStrategy(num_cores=2, soft_placement=False))
    batch = {"words": tf.sparse.from_dense([[1.0, 0.0, 2.0, 0.0], [0.0, 3.0, 0.0, 0.0]])}
    fast.predict(batch, verbose=0)


@shows(OptimizerError.not_in_replica)
def test_gradients_applied_in_a_merge_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = keras.Variable(1.0)
        optimizer = CrossReplicaOptimizer(keras.optimizers.SGD(0.1))
        optimizer.build([weight])

    def update(strategy, gradient):
        optimizer.apply([gradient], [weight])

    def step(x):
        tf.distribute.get_replica_context().merge_call(update, args=(x,))

    strategy.run(step, args=(tf.constant(1.0),))


@shows(OptimizerError.bad_reduction)
def test_gradients_that_are_to_be_multiplied():
    CrossReplicaOptimizer(keras.optimizers.SGD(0.1), reduction="product")


@shows(OptimizerError.no_optimizer)
def test_the_name_of_an_optimizer():
    CrossReplicaOptimizer("sgd")


@shows(OptimizerError.unknown_weights)
def test_weights_that_become_trainable():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="first"), keras.layers.Dense(1)])
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    fast = replicate_model(model, replicas=2)
    x, y = np.ones([8, 4], "float32"), np.ones([8, 1], "float32")
    fast.train_on_batch(x, y)
    model.layers[0].trainable = True
    fast.train_on_batch(x, y)


@shows(BatchError.uneven)
def test_a_batch_size_that_does_not_divide():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
        model.compile("sgd", "mse")
    model.fit(np.ones((10, 3)), np.ones((10, 2)), batch_size=5, verbose=0)


@shows(warn_uneven_rest)
def test_a_rest_that_does_not_divide():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
        model.compile("sgd", "mse")
    # Not of the evaluation: it counts samples.
    model.evaluate(np.ones((9, 3)), np.ones((9, 2)), batch_size=4, verbose=0)
    for _ in range(2):  # warned of once
        model.fit(np.ones((11, 3)), np.ones((11, 2)), batch_size=4, verbose=0)


@shows(warn_uneven_rest, "dataset")
def test_a_rest_of_a_dataset_that_does_not_divide():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
        model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((11, 3)), np.ones((11, 2))))
    model.fit(dataset.shuffle(11).batch(4).prefetch(1), verbose=0)


class ItsOwnTestStep(keras.Model):
    def build(self, input_shape):
        self.dense = keras.layers.Dense(2)
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x)

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean((self(x) - y) ** 2)}


@shows(warn_uneven_evaluation)
def test_an_evaluation_with_a_step_of_its_own_that_does_not_divide():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = ItsOwnTestStep(name="regression")
        model.compile("sgd", "mse")
    validation = np.ones((7, 3)), np.ones((7, 2))
    model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=8, epochs=2, validation_data=validation, verbose=0)


@shows(warn_metric_not_a_sum)
def test_a_metric_that_is_a_maximum():
    class Biggest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="biggest")
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, y, outputs, sample_weight=None):
            error = tf.reduce_max(tf.abs(y - outputs))
            self.value.assign(tf.maximum(self.value, error))

        def result(self):
            return self.value

    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
        model.compile("sgd", "mse", metrics=[Biggest()])
    model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


@shows(BatchError.uneven_rest)
def test_arrays_whose_last_batch_does_not_divide():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        model = make_model()
        model.compile("sgd", "mse")
    model.fit(np.ones((11, 3)), np.ones((11, 2)), batch_size=4, verbose=0)


@shows(BatchError.uneven_rest, "dataset")
def test_a_dataset_whose_last_batch_does_not_divide():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        model = make_model()
        model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((11, 3)), np.ones((11, 2))))
    model.fit(dataset.batch(4), verbose=0)


@shows(BatchError.uneven_later)
def test_a_last_batch_of_a_dataset_that_does_not_divide():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        model = make_model()
        model.compile("sgd", "mse")

    def samples():
        yield from [(np.ones(3), np.ones(2))] * 11

    specs = tf.TensorSpec([3]), tf.TensorSpec([2])
    dataset = tf.data.Dataset.from_generator(samples, output_signature=specs)  # nobody knows how many
    model.fit(dataset.batch(4), verbose=0)


@shows(BatchError.distributed)
def test_a_distributed_dataset_for_a_replicated_model():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    model.compile("sgd", "mse")
    dataset = tf.data.Dataset.from_tensor_slices((np.ones((8, 3)), np.ones((8, 2)))).batch(4)
    replicate_model(model, strategy=strategy).fit(strategy.experimental_distribute_dataset(dataset))
