"""A model's own train_step, test_step and predict_step run on each replica, and give what they give on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import Counted, OneLayer, built, classifier, compiled, crossentropy
from keras import layers

from replica_engine.errors import LogError
from replica_engine.keras import replicate_model

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(18, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=18)
REAL = RANDOM.normal(size=(18, 4)).astype("float32")


def mean_crossentropy(y, outputs):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs))


class Classifier(OneLayer):
    """What follows writes its steps in the ways in which people do."""

    def __init__(self):
        super().__init__(3)


class PlainStep(Classifier):
    """The step that everybody writes, of a loss that `loss_of` computes."""

    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.loss_of(*data)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class ByHand(Classifier):
    """The mean of its batch, a metric of its own, and a number that is not a metric."""

    def __init__(self):
        super().__init__()
        self.tracker = keras.metrics.Mean("own")

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean_crossentropy(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.tracker.update_state(loss)
        return {"own": self.tracker.result(), "raw": loss}

    def test_step(self, data):
        x, y = data
        loss = mean_crossentropy(y, self(x))
        self.tracker.update_state(loss)
        return {"own": self.tracker.result()}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.argmax(self(x), -1)


class OfKeras(Classifier):
    """As in Keras' guide to custom steps: `compute_loss`, and the metrics of `compile`."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        return self.compute_metrics(x, y, self(x), None) | {"double": 2 * self.compute_loss(y=y, y_pred=self(x))}


class Adversaries(keras.Model):
    """Two networks with an optimizer each, which go on from each other's update within a step."""

    def __init__(self):
        super().__init__()
        self.critic = layers.Dense(1)
        self.maker = layers.Dense(4)

    def call(self, x):
        return self.critic(self.maker(x))

    def compile(self, of_critic, of_maker):
        super().compile()
        self.of_critic, self.of_maker = of_critic, of_maker

    def train_step(self, data):
        x, real = data
        with tf.GradientTape() as tape:
            gap = tf.reduce_mean(self.critic(self.maker(x))) - tf.reduce_mean(tf.tanh(self.critic(real)))
        weights = self.critic.trainable_variables
        self.of_critic.apply_gradients(zip(tape.gradient(gap, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - 1.0) ** 2)
        weights = self.maker.trainable_variables
        self.of_maker.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"gap": gap, "loss": loss}


class ByAssignment(Classifier):
    """Without an optimizer: gradients are brought together and applied by hand."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = mean_crossentropy(y, self(x, training=True))
        for variable, gradient in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            context = tf.distribute.get_replica_context()
            gradient = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


def test_a_step_by_hand(trains_alike, batched, agree):
    """Its mean over a share is weighed by the share: of 9 samples replicas have 5 and 4, of 1 both have it."""
    make = lambda: built(ByHand(), X[:2], keras.optimizers.SGD(0.1))  # noqa: E731
    *models, history = trains_alike(make, 2, X[:10], Y[:10], batch_size=9)
    assert {"own", "raw"} <= set(history)
    data = batched(9, X[:9], Y[:9])
    agree(models, lambda each: each.evaluate(data, verbose=0, return_dict=True))
    assert agree(models, lambda each: each.predict(data, verbose=0)).shape == (9,)


@pytest.mark.on("tpu")
def test_a_step_with_the_loss_and_metrics_of_compile(trains_alike, batched, agree):
    options = {"loss": crossentropy(), "metrics": ["accuracy"]}
    make = lambda: built(OfKeras(), X[:2], keras.optimizers.SGD(0.1), **options)  # noqa: E731
    *models, history = trains_alike(make, 2, X, Y, batch_size=9)
    assert {"accuracy", "loss"} == set(history)
    data = batched(9, X[:9], Y[:9])
    agree(models, lambda each: each.evaluate(data, verbose=0, return_dict=True))


@pytest.mark.on("mirrored")
def test_a_step_with_several_optimizers(trains_alike, agree):
    def make():
        optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05, momentum=0.9)
        return built(Adversaries(), X[:2], *optimizers)

    *models, _ = trains_alike(make, 2, X, REAL, batch_size=9)
    agree(models, lambda each: [value.numpy() for value in [*each.of_critic.variables, *each.of_maker.variables]])


def test_a_step_that_brings_gradients_together_itself(both, batched, alike):
    """By the collectives of a replica; with equal shares the mean of all is that of the batch."""
    keras.utils.set_random_seed(1)
    model = built(ByAssignment(), X[:2])
    kernel, bias = (weight.numpy() for weight in model.layer.trainable_variables)
    replicate_model(model, strategy=both(2)).fit(batched(8, X[:8], Y[:8]), verbose=0)
    outputs = X[:8] @ kernel + bias
    error = (np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True) - np.eye(3)[Y[:8]]) / 8
    alike(model.layer.kernel.numpy(), (kernel - 0.1 * X[:8].T @ error).astype("float32"))
    alike(model.layer.bias.numpy(), (bias - 0.1 * error.sum(0)).astype("float32"))


@pytest.mark.on("mirrored")
def test_metrics_of_ones_own(trains_alike):
    """A class that counts, a function, and a mean of one."""

    def confidence(y, outputs):
        return tf.reduce_max(tf.nn.softmax(outputs), -1)

    def make():
        return classifier(metrics=[Counted(), confidence, keras.metrics.MeanMetricWrapper(confidence, "mean")])

    _, _, history = trains_alike(make, 2, X, Y, batch_size=9)
    assert history["counted"] == [18.0]


@pytest.mark.on("tpu")
def test_a_loss_of_ones_own(trains_alike):
    """A function, which Keras reduces, and a class that reduces by itself to the mean of its batch."""

    class Squared(keras.losses.Loss):
        def call(self, y, outputs):
            return tf.reduce_mean((y - outputs) ** 2, -1)

    def make():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, [layers.Dense(4, name="one")(inputs), layers.Dense(4, name="two")(inputs)])
        model.compile(keras.optimizers.SGD(0.1), [Squared(), lambda y, outputs: tf.abs(y - outputs)])
        return model

    trains_alike(make, 2, X, [REAL, REAL], batch_size=9)


@pytest.mark.on("tpu", rest="mirrored")
def test_a_step_may_keep_its_state_in_a_weight(both, batched):
    """Counted once a step, not once for each replica."""

    class Counting(layers.Layer):
        def __init__(self):
            super().__init__()
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.steps.assign_add(1.0)
            return x

    model = compiled([keras.Input((4,)), Counting(), layers.Dense(4)], "sgd", "mse")
    replicated = replicate_model(model, strategy=both(2))
    replicated.fit(batched(8, X[:16], REAL[:16]), verbose=0)
    assert float(model.layers[0].steps.numpy()) == 2.0
    model.fit(batched(9, X, REAL), verbose=0)
    replicated.train_on_batch(X[:8], REAL[:8])
    assert float(model.layers[0].steps.numpy()) == 5.0


class InParts(keras.Model):
    """A body and a head, each with an optimizer."""

    def __init__(self):
        super().__init__()
        self.body, self.head = layers.Dense(3), layers.Dense(1)
        self.other = keras.optimizers.SGD(0.05)
        self.seen = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="seen")

    def call(self, x):
        return self.head(self.body(x))

    def error(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return tf.reduce_mean((self(x, training=True) - y) ** 2)


class OneLossForTwo(InParts):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self.error(data))
        parts = [self.body.trainable_variables, self.head.trainable_variables]
        for optimizer, weights, grads in zip(
            [self.optimizer, self.other], parts, tape.gradient(loss, parts), strict=True
        ):
            optimizer.apply(grads, weights)
        return {"scaled": loss}


class OneOfTwoScaled(InParts):
    def train_step(self, data):
        for scale in (self.optimizer.scale_loss, tf.identity):
            with tf.GradientTape() as tape:
                loss = scale(self.error(data))
            weights = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"second": loss}


class SumOfSamples(InParts):
    """The gradient of a vector is that of its sum."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = self.optimizer.scale_loss(0.05 * tf.reduce_mean((self(x) - y) ** 2, -1))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(losses, weights), weights)
        return {"scaled": tf.reduce_mean(losses)}


class OfTheHead(InParts):
    def train_step(self, data):
        with tf.GradientTape() as tape:
            loss = self.error(data)
        weights = self.head.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def in_parts(model, optimizer=None):
    model = built(model, X[:2], optimizer or keras.optimizers.SGD(0.1))
    model.other.build(model.head.trainable_variables)
    if isinstance(model, OfTheHead):
        model.optimizer.build(model.head.trainable_variables)
    return model


@pytest.mark.parametrize("kind", [OneLossForTwo, OneOfTwoScaled, SumOfSamples, OfTheHead])
def test_a_gradient_counts_with_its_share_once(trains_alike, kind):
    trains_alike(lambda: in_parts(kind()), 2, X[:8], REAL[:8, :1], batch_size=8)


@pytest.mark.on("mirrored")
def test_a_scaled_loss_that_a_step_returns_is_that_of_one_device(trains_alike):
    make = lambda: in_parts(OneLossForTwo(), keras.optimizers.SGD(0.1, loss_scale_factor=8.0))  # noqa: E731
    trains_alike(make, 2, X[:9], REAL[:9, :1], batch_size=9)


LARGE = 33_554_433  # float32 has 33,554,432 and 33,554,436


class Logging(InParts):
    """Returns what each of `values` makes of the model and the samples."""

    def __init__(self, **values):
        super().__init__()
        self.logged = values

    def train_step(self, data):
        loss = self.error(data)
        self.seen.assign(LARGE - 1)
        return {"loss": loss, **{name: value(self, data[0]) for name, value in self.logged.items()}}


def test_logs_keep_their_shape_and_precision(trains_alike):
    values = {
        "vector": lambda model, x: tf.reduce_mean(x, 0)[:3],
        "one number": lambda model, x: tf.reduce_mean(x, 0, keepdims=True)[:, :1, tf.newaxis][0],
        "float64": lambda model, x: LARGE + tf.reduce_mean(tf.cast(x, "float64")),
        "integer": lambda model, x: tf.constant(LARGE),
        "variable": lambda model, x: model.seen,
        "computed": lambda model, x: tf.convert_to_tensor(model.seen) + 1,
        "bool": lambda model, x: tf.convert_to_tensor(model.seen) == LARGE - 1,
        "iterations": lambda model, x: model.optimizer.iterations,
    }
    exact = {"rtol": 1e-9, "atol": 1e-6}
    _, _, found = trains_alike(
        lambda: in_parts(Logging(**values)), 2, X[:10], REAL[:10, :1], batch_size=10, close=exact
    )
    assert found.keys() == {"loss", *values}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (lambda model, x: tf.reduce_sum(x, 1), "each sample"),
        (lambda model, x: tf.shape(x)[0], "count"),
        (lambda model, x: tf.convert_to_tensor(model.seen) + tf.cast(tf.shape(x)[0], "int64"), "count"),
        (lambda model, x: tf.reduce_sum(tf.cast(x > 0, "int32")), "count"),
        (lambda model, x: tf.constant("words"), "dtype string"),
    ],
    ids=["of samples", "length", "length and state", "count", "text"],
)
def test_logs_that_replicas_cannot_combine_are_refused(both, batched, value, text):
    model = replicate_model(in_parts(Logging(value=value)), strategy=both(2))
    with pytest.raises(LogError, match=f"(?s)'value'.*{text}"):
        model.fit(batched(10, X[:10], REAL[:10, :1]), verbose=0)


@pytest.mark.on("mirrored")
def test_a_graph_knows_a_vector_that_is_as_long_as_a_shard_by_chance(both, batched):
    """It is traced for any number of samples, for `fit` and then for a method that gives it other parts of a batch."""
    model = replicate_model(in_parts(Logging(value=lambda model, x: tf.reduce_mean(x, 0)[:3])), strategy=both(2))
    model.fit(batched(6, X[:6], REAL[:6, :1]), verbose=0)
    logs = model.train_on_batch(X[:6], REAL[:6, :1], return_dict=True)
    np.testing.assert_allclose(logs["value"], X[:6].mean(0)[:3], rtol=1e-5)


@pytest.mark.on("mirrored")
def test_logs_of_a_whole_batch_are_those_of_one_device(trains_alike):
    """Of a batch of fewer samples than replicas, which every replica computes."""

    def rows(model, x):
        return tf.reduce_sum(x, 1) * tf.cast(tf.size(x), "float32")

    trains_alike(lambda: in_parts(Logging(rows=rows)), 3, X[:2], REAL[:2, :1], batch_size=2)


@pytest.mark.on("tpu", rest="mirrored")
@pytest.mark.parametrize("is_eager", [False, True], ids=["traced", "eager"])
@pytest.mark.parametrize("rows", [8, 7])
def test_an_output_of_the_length_of_a_shard_is_no_row_of_a_sample(both, alike, rows, is_eager):
    class Outputs(InParts):
        def predict_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return {"y": self(x), "places": tf.range(4), "mean": tf.reduce_mean(x, 0)}

    class OfAWeight(InParts):
        def predict_step(self, data):
            return self.body.kernel.value  # of shape [4, 3]

    for kind in (Outputs, OfAWeight):
        keras.utils.set_random_seed(1)
        model = in_parts(kind())
        model.run_eagerly = is_eager
        expected = model.predict(X[:rows], batch_size=8, verbose=0)
        found = replicate_model(model, strategy=both(2)).predict(X[:rows], batch_size=8, verbose=0)
        alike(found, expected)


@pytest.mark.on("tpu", rest="mirrored")
def test_a_normalization_over_replicas_in_a_step_of_ones_own(trains_alike):
    """Gradients get the weights of the shards, of 2 and 1 samples, after they have gone through its reductions."""

    class Normalized(PlainStep):
        def __init__(self):
            super().__init__()
            self.before, self.normalization = layers.Dense(4), layers.BatchNormalization(synchronized=True)

        def call(self, x, training=False):
            return self.layer(self.normalization(self.before(x), training=training))

        def loss_of(self, x, y):
            return mean_crossentropy(y, self(x, training=True))

    trains_alike(lambda: built(Normalized(), X[:1], keras.optimizers.SGD(0.5)), 2, X[:9], Y[:9], batch_size=3)


@pytest.mark.on("mirrored")
def test_a_reduction_in_a_step_of_ones_own_has_the_gradient_of_one_device(trains_alike):
    """It gives one value for the batch, whose gradient has the weights of the unequal shards."""

    class Reducing(PlainStep):
        def __init__(self):
            super().__init__()
            self.before = layers.Dense(4)

        def loss_of(self, x, y):
            hidden = self.before(x)
            total = tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(hidden, 0))
            return mean_crossentropy(y, self.layer(hidden + total))

    def make():
        model = built(Reducing(), X[:1], keras.optimizers.SGD(0.1))
        model.before.build((None, 4))
        return model

    trains_alike(make, 2, X[:9], Y[:9], batch_size=3)
