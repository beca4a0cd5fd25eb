"""What is of the batch as a whole, or of its parts in other ways than a mean over samples: equal to one device too."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import Counted, OneLayer, built, compiled

from replica_engine.keras import CrossReplicaOptimizer, replicate_model

layers = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(23, 4)).astype("float32")
Y = RANDOM.random((23, 3)).astype("float32")
TOKENS = RANDOM.integers(0, 20, size=(23, 3))


def sigmoid(loss="mse", metrics=None):
    return compiled([keras.Input((4,)), layers.Dense(3, "sigmoid")], keras.optimizers.SGD(0.05), loss, metrics=metrics)


def mean_error(y, outputs):
    return tf.reduce_mean(tf.abs(y - outputs))


def embedded(**options):
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), layers.Embedding(20, 4), layers.Flatten(), layers.Dense(3)]
    )
    model.compile(keras.optimizers.Adam(0.05, **options), "mse")
    return model


class Encoder(OneLayer):
    """Its optimizer is in a dictionary, and its logs have names of their own, as in Keras' guide to VAEs."""

    def __init__(self):
        super().__init__(3)
        self.total = keras.metrics.Mean(name="total_loss")
        self.optimizers = {"only": keras.optimizers.SGD(0.05)}
        self.strategy = "greedy"

    def train_step(self, data):
        assert self.strategy == "greedy"  # an attribute of its own, though a replicated model has a strategy
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        weights = self.trainable_variables
        self.optimizers["only"].apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.total.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"loss": self.total.result(), "last": loss}


def measured():
    """A loss that is a sum, and of metrics a number of the batch, a count that is never reset, and a correlation."""
    metrics = [mean_error, Counted(keeps=True), keras.metrics.PearsonCorrelation(axis=0)]
    return sigmoid(keras.losses.MeanSquaredError(reduction=None), metrics)


# Losses and metrics are those of `replica_engine/keras`, whatever the strategy: those are tested on both that the two
# kinds of steps bring together in different ways.


@pytest.fixture
def trains(trains_alike):
    """`trains(make)`, in batches of 9 and 5 samples on 2 replicas."""
    return lambda make: trains_alike(make, 2, X[:14], Y[:14], batch_size=9)[-1]


def test_a_sum_as_the_loss_and_metrics_that_are_no_means(trains):
    assert list(trains(measured)) == ["counted", "loss", "mean_error", "pearson_correlation"]


def test_a_step_with_logs_of_its_own(trains):
    trains(lambda: built(Encoder(), X[:1]))


@pytest.mark.on("mirrored")
def test_a_loss_of_the_batch(trains):
    trains(lambda: sigmoid(keras.losses.Dice()))


@pytest.mark.on("tpu")
def test_fewer_samples_than_replicas_count_once(trains_alike):
    trains_alike(lambda: sigmoid(metrics=["mae", Counted(keeps=True)]), 4, X[:3], Y[:3])


@pytest.mark.on("mirrored")
def test_rows_of_an_embedding_are_clipped(trains_alike):
    trains_alike(lambda: embedded(global_clipnorm=0.1), 2, TOKENS, Y, batch_size=9)


@pytest.mark.on("tpu")
def test_rows_of_an_embedding_are_accumulated(trains_alike):
    trains_alike(lambda: embedded(gradient_accumulation_steps=2), 2, TOKENS, Y, batch_size=9)


@pytest.mark.on("mirrored")
def test_a_model_that_was_compiled_for_a_loop_of_its_own(trains_alike):
    def make():
        model = sigmoid()
        model.compile(CrossReplicaOptimizer(keras.optimizers.SGD(0.05)), "mse")
        return model

    trains_alike(make, 2, X[:9], Y[:9], batch_size=9)


@pytest.mark.parametrize("fn", [lambda x: tf.reshape(x, (-1, 1)), lambda x: tf.reduce_sum(x, 0, keepdims=True)])
def test_predictions_that_are_no_rows_of_samples(alone_and_replicated, batched, agree, fn):
    def make():
        return keras.Sequential([keras.Input((4,)), layers.Dense(2), layers.Lambda(fn)])

    data = batched(9, X[:18])
    agree(alone_and_replicated(make, 2), lambda model: model.predict(data, verbose=0))


def test_tables_of_words_are_built_without_being_called(batched):
    vectorize = layers.TextVectorization(output_sequence_length=4)
    vectorize.adapt(["a b", "c d"])
    words = keras.Input((), dtype="string")
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(20, 4)(vectorize(words)))
    model = keras.Model(words, layers.Dense(1)(embedded))
    model.compile("sgd", "mse")
    text = tf.constant(["a b", "c", "d a"])
    replicated = replicate_model(model, replicas=2)
    replicated.fit(batched(2, text, np.ones((3, 1))), verbose=0)
    np.testing.assert_allclose(replicated.predict_on_batch(text), model(text), rtol=1e-5)


@pytest.mark.on("mirrored")  # XLA has no sparse tensors of unknown size
def test_sparse_inputs(both):
    model = compiled([keras.Input((4,), sparse=True), layers.Dense(3)], "sgd", "mse")
    before = np.mean((X @ model.get_weights()[0] - Y) ** 2)
    replicated = replicate_model(model, strategy=both(2))
    assert replicated.train_on_batch(tf.sparse.from_dense(X), Y) == pytest.approx(before, rel=1e-5)
    predicted = replicated.predict_on_batch(tf.sparse.from_dense(X[:3]))  # and one row that is padding
    kernel, bias = model.get_weights()
    np.testing.assert_allclose(predicted, X[:3] @ kernel + bias, rtol=1e-5, atol=1e-6)
