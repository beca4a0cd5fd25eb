"""Sums of losses and gradients that a step changes: as on one device, in parts of the batch where that is the same."""

import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import OneLayer, built, dense
from helpers.versions import KERAS
from keras import layers

from replica_engine.keras import replicate_model

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
X[:4] *= 3  # so that the gradients of shards are of different sizes
Y = RANDOM.normal(size=(16, 2)).astype("float32")
SUM = keras.losses.MeanSquaredError(reduction="sum")
MEAN = keras.losses.MeanSquaredError()
AVERAGE, REGULARIZATION = tf.nn.compute_average_loss, tf.nn.scale_regularization_loss  # before the first model


def size(x):
    return tf.cast(tf.shape(x)[0], "float32")


class Own(OneLayer):
    """Its weight `rows` is the number of samples that a replica was given last."""

    def __init__(self, loss_of=None, changed=None, step=None):
        super().__init__()
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, name="rows")
        self.loss_of, self.changed, self.step = loss_of, changed, step
        self.tracker = keras.metrics.Mean(name="tracker")

    def train_step(self, data):
        x, y = data
        self.rows.assign(size(x))
        if self.step is not None:
            return self.step(self, x, y)
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        if self.changed is not None:
            gradients = self.changed(gradients, weights, loss, x)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": loss, "tracker": self.tracker.result()}

    def test_step(self, data):
        x, y = data
        return {"loss": self.loss_of(self, x, y)}


def mean(model, x, y):
    return tf.reduce_mean((model(x) - y) ** 2)


def of_inputs(model, x, y):
    """A penalty on the gradients of the samples, each of which is that of its sample."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        outputs = model(x)
        loss = tf.reduce_sum(outputs**2)
    norms = tf.norm(tape.gradient(loss, x), axis=1)
    return tf.reduce_mean((outputs - y) ** 2) + tf.reduce_mean((norms - 1.0) ** 2)


def of_weights(model, x, y):
    """A penalty on the gradient of the batch."""
    with tf.GradientTape() as tape:
        loss = mean(model, x, y)
    return loss + 0.1 * tf.reduce_sum(tape.gradient(loss, model.layer.kernel.value) ** 2)


def in_a_function(model, x, y):
    loss = tf.function(lambda outputs: SUM(y, outputs) / size(y))
    return loss(model(x))


def by_compute_loss(model, x, y):
    return model.compute_loss(x=x, y=y, y_pred=model(x))


def decayed(gradients, weights, loss, x):
    return [0.5 * (gradient + 0.01 * weight) for gradient, weight in zip(gradients, weights, strict=True)]


def centered(gradients, weights, loss, x):
    return [gradient - tf.reduce_mean(gradient, 0, keepdims=True) for gradient in gradients]


def of_each_sample(model, x, y):
    """Clips the gradient of each sample."""

    def one(sample):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(sample[0][None]) - sample[1]) ** 2)
        return [tf.clip_by_norm(each, 0.5) for each in tape.gradient(loss, model.trainable_variables)]

    gradients = [tf.reduce_mean(each, 0) for each in tf.vectorized_map(one, (x, y))]
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": mean(model, x, y)}


def of_two_losses(model, x, y):
    with tf.GradientTape(persistent=True) as tape:
        losses = [mean(model, x, y), tf.reduce_mean(tf.abs(model(x)))]
    parts = [tape.gradient(loss, model.trainable_variables) for loss in losses]
    gradients = [0.7 * one + 0.3 * two for one, two in zip(*parts, strict=True)]
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": losses[0]}


def of_two_updates(model, x, y):
    """The second loss is one of weights that have a gradient in them, which is that of all replicas."""
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = mean(model, x, y)
        weights = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    return {"loss": loss}


def by_hand(model, x, y, changed=lambda gradient: gradient):
    with tf.GradientTape() as tape:
        loss = mean(model, x, y)
    weights = model.trainable_variables
    for gradient, weight in zip(tape.gradient(loss, weights), weights, strict=True):
        weight.assign_sub(0.05 * changed(gradient))
    return {"loss": loss}


def in_a_function_by_hand(model, x, y):
    with tf.GradientTape() as tape:
        loss = mean(model, x, y)
    gradient = tape.gradient(loss, model.layer.bias)

    @tf.function
    def update(gradient):
        model.layer.bias.assign(model.layer.bias - 0.05 * gradient)

    update(gradient)
    return {"loss": loss}


def decayed_by_hand(model, x, y):
    """What it assigns itself has no gradient in it, so it is the same on all replicas."""
    with tf.GradientTape() as tape:
        loss = mean(model, x, y)
    weights = model.trainable_variables
    model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
    for weight in weights:
        weight.assign(0.99 * weight)
    return {"loss": loss}


IN_PARTS = {
    "a mean": {"loss_of": mean},
    "a mean of Keras": {"loss_of": lambda model, x, y: MEAN(y, model(x))},
    "a sum as it is": {"loss_of": lambda model, x, y: SUM(y, model(x))},
    "a sum and a mean": {"loss_of": lambda model, x, y: 0.3 * SUM(y, model(x)) + mean(model, x, y)},
    "a sum by a weight": {"loss_of": lambda model, x, y: SUM(y, model(x)) / (9.0 + model.layer.bias[0])},
    "the sum of compile": {"loss_of": by_compute_loss},
    "gradients of samples": {"loss_of": of_inputs},
    "decay": {"loss_of": mean, "changed": decayed},
    "centered": {"loss_of": mean, "changed": centered},
    "each sample clipped": {"loss_of": mean, "step": of_each_sample},
    "two losses": {"loss_of": mean, "step": of_two_losses},
    "two updates": {"loss_of": mean, "step": of_two_updates},
    "weights decayed by hand": {"loss_of": mean, "step": decayed_by_hand},
}
WHOLE = {
    "divided": {"loss_of": lambda model, x, y: SUM(y, model(x)) / size(x)},
    "times one over": {"loss_of": lambda model, x, y: SUM(y, model(x)) * (1.0 / tf.cast(tf.size(y), "float32"))},
    "divided by ones": {"loss_of": lambda model, x, y: SUM(y, model(x)) / tf.reduce_sum(tf.ones_like(y[:, 0]))},
    "divided by a variable": {"loss_of": lambda model, x, y: SUM(y, model(x)) / model.rows},
    "in a function": {"loss_of": in_a_function},
    "a root": {"loss_of": lambda model, x, y: tf.sqrt(SUM(y, model(x)))},
    "the sum of compile, divided": {"loss_of": lambda model, x, y: by_compute_loss(model, x, y) / size(x)},
    "gradient divided": {
        "loss_of": lambda model, x, y: SUM(y, model(x)),
        "changed": lambda gradients, weights, loss, x: [gradient / size(x) for gradient in gradients],
    },
    "a penalty on gradients": {"loss_of": of_weights},
    "weights changed by hand": {"loss_of": mean, "step": by_hand},
    "by hand in a function": {"loss_of": mean, "step": in_a_function_by_hand},
    "by hand and clipped": {
        "loss_of": mean,
        "step": lambda model, x, y: by_hand(model, x, y, lambda gradient: tf.clip_by_norm(gradient, 0.3)),
    },
}
CHANGES = {
    "clip_by_value": lambda gradient, loss: tf.clip_by_value(gradient, -0.1, 0.1),
    "clip_by_norm": lambda gradient, loss: tf.clip_by_norm(gradient, 0.3),
    "sign": lambda gradient, loss: 0.1 * tf.sign(gradient),
    "normalized": lambda gradient, loss: gradient / (tf.norm(gradient) + 1e-6),
    "where finite": lambda gradient, loss: tf.where(gradient > 0, gradient, tf.zeros_like(gradient)),
    "rounded": lambda gradient, loss: tf.round(gradient * 8) / 8,
    "by the loss": lambda gradient, loss: gradient * loss,
    "in a branch": lambda gradient, loss: tf.cond(tf.norm(gradient) > 0.1, lambda: gradient / 2, lambda: gradient),
    "in a function": lambda gradient, loss: tf.function(lambda each: tf.clip_by_norm(each, 0.3))(gradient),
}
CHANGED = {
    name: {
        "loss_of": mean,
        "changed": lambda gradients, weights, loss, x, change=change: [change(each, loss) for each in gradients],
    }
    for name, change in CHANGES.items()
}


def made(options, kind=Own, **more):
    return built(kind(**options), X[:1], keras.optimizers.SGD(0.05), SUM, **more)


def of_warnings(caplog):
    return [each.getMessage() for each in caplog.records if "Every replica computes" in each.getMessage()]


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_step_whose_parts_add_up_is_computed_in_parts(alone_and_replicated, batched, alike, caplog, name, agree):
    """Ten steps, of 8 samples 4 on each of 2 replicas."""
    alone, replicated = alone_and_replicated(lambda: made(IN_PARTS[name]), 2)
    agree((alone, replicated), lambda each: each.fit(batched(8, X, Y), verbose=0).history)
    alike(replicated.layer.get_weights(), alone.layer.get_weights())
    assert float(replicated.rows.numpy()) == 4.0
    assert of_warnings(caplog) == []


@pytest.fixture
def is_whole(alone_and_replicated, batched, alike, caplog, agree):
    """`is_whole(options)`: trains as one device, on 8 of 8 samples on each replica, and has logged one warning."""

    def is_whole(options):
        alone, replicated = alone_and_replicated(lambda: made(options), 2)
        agree((alone, replicated), lambda each: each.fit(batched(8, X, Y), epochs=2, verbose=0).history)
        alike(replicated.layer.get_weights(), alone.layer.get_weights())
        assert float(replicated.rows.numpy()) == 8.0
        (text,) = of_warnings(caplog)
        assert "`train_step`" in text
        assert "test_sums_of_losses.py:" in text

    return is_whole


@pytest.mark.parametrize("name", WHOLE)
def test_a_step_that_needs_the_whole_batch_has_it_and_says_so_once(is_whole, name):
    is_whole(WHOLE[name])


OTHER_OPS = ("clip_by_value", "sign", "rounded")


@pytest.mark.on("mirrored")
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in CHANGED if name not in OTHER_OPS),
        *(pytest.param(name, marks=pytest.mark.full("as clip_by_norm: not known to be linear")) for name in OTHER_OPS),
    ],
)
def test_a_step_that_changes_its_gradients_has_the_whole_batch(is_whole, name):
    is_whole(CHANGED[name])


@pytest.mark.on("tpu")
def test_a_compiled_step_that_clips_its_gradients_has_the_whole_batch(is_whole):
    is_whole(CHANGED["clip_by_norm"])


class Halved(keras.losses.Loss):
    def call(self, y, outputs):
        return 0.5 * SUM(y, outputs) / size(y)


class Rooted(keras.losses.Loss):
    """It changes its sum, which is no part of a sum over the batch then."""

    def __call__(self, y, outputs, sample_weight=None):
        return tf.sqrt(super().__call__(y, outputs, sample_weight))

    def call(self, y, outputs):
        return tf.reduce_mean((y - outputs) ** 2, 1)


class Noting(layers.Layer):
    def call(self, x):
        self.add_loss(SUM(tf.zeros_like(x), x) / size(x))
        return x


class Computing(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) / size(y_pred)


def of_samples(y, outputs):
    return tf.reduce_mean((y - outputs) ** 2, 1)


def of_known_size(y, outputs):
    losses = tf.nn.compute_average_loss(of_samples(y, outputs), global_batch_size=8)
    return losses + tf.nn.scale_regularization_loss(tf.constant([0.5, 0.25]))


def of_names_of_ones_own(y, outputs):
    losses = AVERAGE(of_samples(y, outputs), global_batch_size=8)
    return losses + AVERAGE(tf.reduce_mean(outputs**2, 1)) + REGULARIZATION(tf.constant([0.5, 0.25]))


LOSSES = {
    "a function": lambda y, outputs: SUM(y, outputs) / size(y),
    "a function of a sum": lambda y, outputs: SUM(y, outputs),
    "a class": Halved(),
    "a class that sums": Halved(reduction="sum"),
    "a class that changes its sum": Rooted(reduction="sum"),
    "a sum": SUM,
    "an average": lambda y, outputs: tf.nn.compute_average_loss(of_samples(y, outputs)),
    "of a known size": of_known_size,
    "of names of one's own": of_names_of_ones_own,
    "of its own size": lambda y, outputs: tf.nn.compute_average_loss(
        of_samples(y, outputs), global_batch_size=tf.shape(y)[0]
    ),
    "a number": lambda y, outputs: 1.5,
    "numbers": lambda y, outputs: [1.0, 2.0, 3.0],
}


def of_all_outputs(history):
    """What Keras logs of all outputs together, on versions that take the loss of one output of another batch's size.

    3.16 takes each for the mean of a batch of the size that it was traced for, 3.10 in `train_on_batch` after `fit`.
    """
    if (3, 11) <= KERAS < (3, 16):
        return history
    return {key: value for key, value in history.items() if key in ("loss", "val_loss")}


@pytest.mark.parametrize("name", LOSSES)
def test_a_compiled_loss_that_sums_up_itself(alone_and_replicated, batched, alike, name, agree):
    """In `fit` with a smaller last batch, `evaluate`, and by hand."""

    def make():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, [layers.Dense(2, name="one")(inputs), layers.Dense(2, name="two")(inputs)])
        model.compile(keras.optimizers.SGD(0.05), ["mse", LOSSES[name]], loss_weights=[1.0, 0.5])
        return model

    models = alone_and_replicated(make, 2)
    models[0].run_eagerly = False  # an eager Keras counts the loss of an output by samples
    data = batched(8, X[:13], [Y[:13], Y[:13]])
    agree(models, lambda each: of_all_outputs(each.fit(data, validation_data=data, verbose=0).history))
    logs = (each.train_on_batch(X[:5], [Y[:5], Y[:5]], return_dict=True) for each in models)
    expected, found = map(of_all_outputs, logs)
    alike(found, expected)
    alike(*(each.get_weights() for each in models))


@pytest.mark.parametrize("kind", ["add_loss", "compute_loss", "metrics"])
def test_a_sum_of_losses_anywhere_else_in_a_model(trains_alike, kind):
    def make():
        dense = [keras.Input((4,)), layers.Dense(2), *([Noting()] if kind == "add_loss" else [])]
        model = (Computing if kind == "compute_loss" else keras.Sequential)(dense)
        metrics = [SUM, lambda y, outputs: SUM(y, outputs) / size(y), lambda y, outputs: SUM(y, outputs)]
        model.compile(
            keras.optimizers.SGD(0.05),
            SUM if kind == "compute_loss" else "mse",
            metrics=metrics if kind == "metrics" else None,
        )
        return model

    trains_alike(make, 2, X[:13], Y[:13], batch_size=8, validation_data=(X[:8], Y[:8]))


class Accumulating(Own):
    """Adds gradients up in variables of its own, and trains with what is in them."""

    def __init__(self, change, around=lambda fn: fn):
        super().__init__(mean, self.added)
        self.change = change

        def add_up(*gradients):
            for one, gradient in zip(self.sums, gradients, strict=True):
                one.assign(0.5 * one + gradient)

        self.add_up = around(add_up)
        self.sums = [self.add_weight(shape=shape, initializer="zeros", trainable=False) for shape in ((4, 2), (2,))]

    def added(self, gradients, weights, loss, x):
        self.add_up(*gradients)
        return self.change([tf.convert_to_tensor(each) for each in self.sums])


ACCUMULATED = {
    "as they are": lambda sums: [0.5 * each for each in sums],
    "clipped": lambda sums: tf.clip_by_global_norm(sums, 0.3)[0],
    "clipped in a branch": lambda sums: [
        tf.cond(tf.reduce_sum(each) < 100.0, lambda each=each: tf.clip_by_norm(each, 0.3), lambda each=each: each)
        for each in sums
    ],
}


def in_a_branch(add_up):
    def added(*gradients):
        def yes():
            add_up(*gradients)
            return 0

        return tf.cond(tf.reduce_sum(gradients[0]) < 1e6, yes, lambda: 0)

    return added


@pytest.mark.parametrize(
    ("name", "around"), [*((name, None) for name in ACCUMULATED), ("clipped", tf.function), ("clipped", in_a_branch)]
)
def test_gradients_that_a_step_adds_up_in_variables(alone_and_replicated, batched, alike, name, around):
    def make():
        model = Accumulating(ACCUMULATED[name], around or (lambda fn: fn))
        return built(model, X[:1], keras.optimizers.SGD(0.05))

    alone, replicated = alone_and_replicated(make, 2)
    for each in (alone, replicated):
        each.fit(batched(8, X, Y), epochs=2, verbose=0)
    alike(replicated.layer.get_weights(), alone.layer.get_weights())
    assert float(replicated.rows.numpy()) == (4.0 if name == "as they are" else 8.0)


class Summing(keras.metrics.Metric):
    """Adds up what `added` makes of a sum of losses."""

    def __init__(self, added, counted=size, name="summing"):
        super().__init__(name=name)
        self.added, self.counted = added, counted
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y, outputs, sample_weight=None):
        self.total.assign_add(self.added(SUM(y, outputs, sample_weight), y))
        self.count.assign_add(self.counted(y))

    def result(self):
        return self.total / self.count


SUMMING = {
    "a sum": lambda: Summing(lambda loss, y: loss),
    "a mean, times": lambda: Summing(lambda loss, y: size(y) * (loss / size(y))),
    "by batches": lambda: Summing(lambda loss, y: loss, lambda y: tf.constant(1.0)),
    "a mean of batches": lambda: Summing(lambda loss, y: loss / size(y), lambda y: tf.constant(1.0)),
    "a root": lambda: Summing(lambda loss, y: tf.sqrt(loss)),
}


@pytest.mark.parametrize("name", SUMMING)
def test_a_metric_that_calls_a_sum_of_losses(alone_and_replicated, batched, agree, caplog, name):
    caplog.set_level("INFO", "replica_engine")
    models = alone_and_replicated(lambda: dense(4, 2, keras.optimizers.SGD(0.05), "mse", metrics=[SUMMING[name]()]), 2)
    data = batched(8, X[:13], Y[:13])
    agree(models, lambda each: each.evaluate(data, verbose=0, return_dict=True))
    agree(models, lambda each: each.fit(data, verbose=0).history)
    assert ("computes whole batches" in caplog.text) == (name not in ("a sum", "a mean, times"))


@pytest.mark.on("mirrored")
@pytest.mark.parametrize(
    ("name", "late"),
    [*itertools.product(["divided", "clip_by_norm", "a mean"], [False, True]), ("weights changed by hand", False)],
)
def test_an_eager_step_that_needs_the_whole_batch(both, alike, batched, name, late, agree):
    """It has changed variables before it is given up, and they count once, also if it is another one than the first."""

    class Eager(Own):
        def __init__(self, **options):
            super().__init__(**options)
            self.seen = keras.metrics.Sum(name="seen")

        def train_step(self, data):
            self.seen.update_state(size(data[0]))
            self.loss_of, self.changed, self.step = options["loss_of"], options.get("changed"), options.get("step")
            if late and int(tf.convert_to_tensor(self.optimizer.iterations)) == 0:
                self.loss_of, self.changed = mean, None
            return super().train_step(data) | {"seen": self.seen.result()}

    options = (IN_PARTS | WHOLE | CHANGED)[name]

    def make():
        keras.utils.set_random_seed(1)
        return made(options, Eager, run_eagerly=True)

    alone, model = make(), make()
    agree((alone, replicate_model(model, strategy=both(2))), lambda each: each.fit(batched(8, X, Y), verbose=0).history)
    alike(model.layer.get_weights(), alone.layer.get_weights())
    assert float(model.rows.numpy()) == (4.0 if name == "a mean" else 8.0)


@pytest.mark.parametrize("loss", [1.0, 3, np.float32(2.0)])
def test_scale_loss_of_a_number(both, batched, loss):
    class Numbers(Own):
        def train_step(self, data):
            return {"scaled": self.optimizer.scale_loss(loss), "loss": mean(self, *data)}

    model = built(Numbers(), X[:1], keras.optimizers.SGD(0.05, loss_scale_factor=4.0))
    history = replicate_model(model, strategy=both(2)).fit(batched(8, X, Y), verbose=0).history
    assert history["scaled"] == [4.0 * float(loss)]


class Halved(keras.losses.Loss):
    """Not a sum, though it calls one."""

    def call(self, y, outputs):
        return 0.5 * SUM(y, outputs) / size(y)


@pytest.mark.on("mirrored")
def test_a_loss_of_two_models_that_train_at_the_same_time(both, alike):
    """The first model ends before the second one traces its step, which still knows whose sum it sees."""

    def fit(model, begun):
        callback = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: begun())
        return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=[callback]).history

    def make(loss):
        keras.utils.set_random_seed(1)
        return dense(4, 2, keras.optimizers.SGD(0.05), loss)

    loss = Halved()
    expected = fit(make(loss), lambda: None)
    first, second = (replicate_model(make(loss), strategy=both(2)) for _ in range(2))
    for each in (first, second):
        each.evaluate(X, Y, batch_size=8, verbose=0)
    has_begun, may_end = threading.Event(), threading.Event()
    earlier = threading.Thread(target=fit, args=(first, lambda: (has_begun.set(), may_end.wait(300))))
    earlier.start()
    assert has_begun.wait(300)
    found = fit(second, lambda: (may_end.set(), earlier.join(300)))
    alike(found, expected)
    assert "call" not in vars(loss)
