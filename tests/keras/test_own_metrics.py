"""Metrics of the user's own: their numbers are those of one device, whether or not their variables are sums."""

import functools
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import OneLayer, built, dense

from replica_engine import TPUStrategy
from replica_engine.keras import replicate_model
from replica_engine.testing import check_parity
from replica_engine.upstream.keras import metric_updates

RANDOM = np.random.default_rng(0)
X = RANDOM.random((35, 3)).astype("float32")
Y = X.sum(1, keepdims=True)


class Own(keras.metrics.Metric):
    initial = 0.0

    def __init__(self):
        super().__init__(name=type(self).__name__.lower())
        self.value = self.add_weight(name="value", initializer=keras.initializers.Constant(self.initial))

    def result(self):
        return self.value

    def reset_state(self):
        self.value.assign(self.initial)


class Biggest(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y - outputs))))


class Smallest(Own):
    initial = 1e9

    def update_state(self, y, outputs, sample_weight=None):
        error = tf.reduce_min(tf.abs(y - outputs))
        self.value.assign(tf.where(error < self.value, error, self.value))


class Last(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(tf.reduce_mean(tf.abs(y - outputs)))


class Decaying(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(0.9 * self.value + 0.1 * tf.reduce_mean(tf.abs(y - outputs)))


class Total(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(self.value + tf.reduce_sum(tf.abs(y - outputs)))


class BiggestOfAll(keras.metrics.Metric):
    """Has its variable in another metric of the user's."""

    def __init__(self):
        super().__init__(name="biggest_of_all")
        self.inner = Biggest()

    def update_state(self, y, outputs, sample_weight=None):
        self.inner.update_state(y, outputs)

    def result(self):
        return self.inner.result()


class HelpedByAFunction(Own):
    """Its update is a `tf.function`, whose tensors nobody can look at from outside."""

    @tf.function
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y - outputs))))


class Weighted(Own):
    """A sum if there are no weights, a maximum if there are."""

    def update_state(self, y, outputs, sample_weight=None):
        if sample_weight is None:
            self.value.assign_add(tf.reduce_sum(outputs))
        else:
            self.value.assign(tf.maximum(self.value, tf.reduce_max(sample_weight)))


class Trained(OneLayer):
    """Has its own step, with a metric that gets the errors of the samples."""

    def __init__(self):
        super().__init__(1)
        self.worst = Worst()

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            errors = tf.abs(self(x) - y)
            loss = tf.reduce_mean(errors)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.worst.update_state(errors)
        return {"worst": self.worst.result()}


class Worst(Own):
    def update_state(self, values, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(values)))

    def result(self):
        return 1.0 * self.value


def model_with(*metrics, **options):
    return lambda: dense(3, 1, keras.optimizers.SGD(0.05), "mse", metrics=[kind() for kind in metrics], **options)


KINDS = (Biggest, Smallest, Last, Decaying, Total, BiggestOfAll)


def test_metrics_that_are_no_sums(alone_and_replicated, batched, alike):
    alone, replicated = alone_and_replicated(model_with(*KINDS), 2)
    for data in (batched(9, X, Y), batched(31, X, Y)):  # the rest is 8 and 4 samples
        options = {"verbose": 0, "return_dict": True}
        alike(replicated.evaluate(data, **options), alone.evaluate(data, **options))
    for model in (alone, replicated):
        model.reset_metrics()
    for rows in (35, 12, 1):  # one after the other, without a reset
        expected, found = (model.test_on_batch(X[:rows], Y[:rows], return_dict=True) for model in (alone, replicated))
        alike(found, expected)
    alike([each.result() for each in replicated.metrics], [each.result() for each in alone.metrics])


class Careful(Trained):
    """Goes on if something in its step fails."""

    def train_step(self, data):
        try:
            return super().train_step(data)
        except Exception:
            return {"worst": 0.0}


class LengthOfErrors(Own):
    """A sum of what is no sum over samples."""

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign_add(tf.sqrt(tf.reduce_sum((y - outputs) ** 2)))


def with_step(kind):
    return lambda: built(kind(), X[:1], keras.optimizers.SGD(0.05))


# The model, the number of replicas, and options of `trains_alike`.
ON_TPU_FIRST = {
    "a step of its own": (with_step(Trained), 2, {"batch_size": 9, "epochs": 2}),
    "several steps in one launch": (model_with(Biggest, Total, steps_per_execution=3), 2, {"batch_size": 8}),
}
ON_THREADS_FIRST = {
    "all kinds": (model_with(*KINDS), 3, {"batch_size": 9, "validation_data": (X[:8], Y[:8]), "epochs": 2}),
    "a step that handles exceptions": (with_step(Careful), 2, {"batch_size": 9}),
    "shows nothing before it runs": (model_with(HelpedByAFunction), 2, {"batch_size": 8}),
    "of what is no sum over samples": (model_with(LengthOfErrors), 2, {"batch_size": 8}),
}


@pytest.mark.on("tpu", rest="mirrored")
@pytest.mark.parametrize("name", ON_TPU_FIRST)
def test_compiled_training_with_metrics_that_are_no_sums(trains_alike, name):
    make, size, options = ON_TPU_FIRST[name]
    trains_alike(make, size, X, Y, **options)


@pytest.mark.on("mirrored", rest="tpu")
@pytest.mark.parametrize("name", ON_THREADS_FIRST)
def test_training_with_metrics_that_are_no_sums(trains_alike, name):
    make, size, options = ON_THREADS_FIRST[name]
    trains_alike(make, size, X, Y, **options)


@pytest.mark.on("mirrored")
def test_a_metric_that_is_no_sum_is_named_once_for_all_steps_and_without_a_warning(both, caplog):
    replicated = replicate_model(dense(3, 1, "sgd", "mse", metrics=[Biggest()]), strategy=both(2))
    caplog.set_level("INFO", "replica_engine")
    for run in (replicated.train_on_batch, replicated.test_on_batch):
        run(X[:4], Y[:4])
    (told,) = [each for each in caplog.records if "whole batch" in each.getMessage()]
    assert told.levelname == "INFO"
    assert "because `update_state` of the metric 'biggest' does not only add" in told.getMessage()
    assert "assign_add" in told.getMessage()


@pytest.mark.on("mirrored")
def test_eager_steps_with_a_metric_that_is_no_sum(trains_alike):
    trains_alike(model_with(Biggest, run_eagerly=True), 2, X, Y, batch_size=9)


@pytest.mark.on("tpu", rest="mirrored")
def test_an_update_that_depends_on_its_arguments(alone_and_replicated, alike):
    models = alone_and_replicated(lambda: dense(3, 1, "sgd", "mse", weighted_metrics=[Weighted()]), 2)
    for weights in (None, np.arange(8.0)):
        expected, found = (
            model.evaluate(X[:8], Y[:8], sample_weight=weights, batch_size=4, verbose=0) for model in models
        )
        alike(found, expected)


@pytest.mark.on("mirrored", rest="tpu")
def test_the_result_of_a_sum_that_is_its_variable(alone_and_replicated, alike):
    models = alone_and_replicated(model_with(Total), 2)
    for method in ("test_on_batch", "train_on_batch"):
        expected, found = (getattr(model, method)(X, Y, return_dict=True) for model in models)
        alike(found, expected)


class Parts(Own):
    """Counts updates."""

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign_add(1.0)


@pytest.mark.parametrize(("kinds", "parts"), [((Parts, Total), 2), ((Parts, Total, Biggest), 1)])
def test_a_batch_is_divided_where_metrics_only_add(both, kinds, parts):
    replicated = replicate_model(model_with(*kinds)(), strategy=both(2))
    assert replicated.evaluate(X[:8], Y[:8], batch_size=8, verbose=0, return_dict=True)["parts"] == parts


def test_a_parity_check_of_a_metric_that_is_no_sum(monkeypatch):
    """It also finds one that reads other numbers, as one would that is no sum, and that nobody noticed."""
    report = check_parity(model_with(*KINDS, run_eagerly=True)(), X[:9], Y[:9], replicas=2, steps=1)
    assert report.ok, report
    monkeypatch.setattr("replica_engine.upstream.keras.metric_updates.has_own_update", lambda metric: False)
    report = check_parity(model_with(Biggest, run_eagerly=True)(), X[:9], Y[:9], replicas=2, steps=1)
    assert "biggest" in {each.name for each in report.differences}


class Extreme(Own):
    """As Biggest, in words of Keras."""

    def update_state(self, y, outputs, sample_weight=None):
        values = keras.ops.stack([self.value.value, keras.ops.max(keras.ops.abs(y - outputs))])
        self.value.assign(keras.ops.max(values))


class Limited(Own):
    """A sum that ends at a limit, and survives one that is no number."""

    def update_state(self, y, outputs, sample_weight=None):
        value = tf.where(tf.math.is_nan(self.value), 0.0, self.value)
        self.value.assign(tf.minimum(value + tf.reduce_sum(tf.abs(y - outputs)), 1e6))


class Conditional(Own):
    """A sum over the batches that are worth it."""

    def update_state(self, y, outputs, sample_weight=None):
        error = tf.reduce_sum(tf.abs(y - outputs))
        self.value.assign(tf.cond(error > 0.1, lambda: self.value + error, lambda: self.value.value))


class LastSum(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(tf.reduce_sum(tf.abs(y - outputs)))


class Restarted(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.reset_state()
        self.value.assign_add(tf.reduce_sum(outputs))


class Averaged(Own):
    """A maximum whose variable is not added up."""

    def __init__(self):
        super().__init__()
        self.value = self.add_variable((), "zeros", aggregation="mean", name="mean")

    def update_state(self, y, outputs, sample_weight=None):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y - outputs))))


class Summed(keras.metrics.Mean):
    def update_state(self, y, outputs, sample_weight=None):
        return super().update_state(tf.abs(y - outputs), sample_weight=sample_weight)


@pytest.fixture
def warnings_in_scope(both, batched, caplog):
    """`warnings_in_scope(*metrics)`: the metrics that are warned of in Keras' own `fit` and `evaluate` in a scope."""

    def warnings_in_scope(*metrics, **options):
        with both(2).scope():
            model = model_with(*metrics, **options)()
        data = batched(8, X[:16], Y[:16])
        for _ in range(2):
            model.fit(data, verbose=0, validation_data=data)
            model.evaluate(data, verbose=0)
        found = [each.getMessage() for each in caplog.records if each.name == "replica_engine"]
        assert all(f"{__file__}:" in each for each in found)
        return [each.split("'")[1] for each in found]

    return warnings_in_scope


@pytest.mark.on("mirrored", rest="tpu")
def test_in_a_scope_metrics_that_are_no_sums_are_those_of_one_device(both, batched, caplog):
    data = batched(8, X[:16], Y[:16])
    metrics = Biggest, Smallest, Last, Extreme, Total
    alone = model_with(*metrics, run_eagerly=True)()
    with both(2).scope():
        model = model_with(*metrics)()
    model.set_weights(alone.get_weights())
    for found, expected in zip(model.evaluate(data, verbose=0), alone.evaluate(data, verbose=0), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not caplog.text


@pytest.mark.on("mirrored", rest="tpu")
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_in_a_scope_a_step_of_ones_own_is_warned_of_once(both, batched, caplog, run_eagerly):
    """It has the rule of tf.distribute, by which the values of all metrics are added up."""

    class OwnStep(keras.Model):
        def train_step(self, data):
            x, y = data
            return self.compute_metrics(x, y, self(x, training=True))

    with both(2).scope():
        outputs = keras.layers.Dense(1)(inputs := keras.Input(X.shape[1:]))
        model = OwnStep(inputs, outputs)
        model.compile("sgd", "mse", metrics=[Biggest(), Total()], run_eagerly=run_eagerly)
    for _ in range(2):
        model.fit(batched(8, X[:16], Y[:16]), verbose=0)
    (found,) = [each.getMessage() for each in caplog.records if each.name == "replica_engine"]
    assert "'biggest'" in found
    assert f"{__file__}:" in found


@pytest.mark.on("mirrored", rest="tpu")
def test_in_a_scope_sums_are_not_warned_of(warnings_in_scope):
    assert not warnings_in_scope(Total, Limited, Conditional, LastSum, Restarted, Averaged, Summed, keras.metrics.AUC)


@pytest.mark.on("tpu", rest="mirrored")
def test_in_a_scope_of_one_replica_nothing_is_warned_of(both, batched, caplog):
    with both(1).scope():
        model = model_with(Biggest)()
    model.fit(batched(8, X[:8], Y[:8]), verbose=0)
    assert not caplog.text


ONE_HOT = np.eye(2, dtype="float32")[[0, 1, 1, 0, 1]]
SCORES = RANDOM.random((5, 2)).astype("float32")
PAIRS = {
    "MeanIoU": ({"num_classes": 2}, (ONE_HOT[:, 0], SCORES[:, 0] > 0.5)),
    "IoU": ({"num_classes": 2, "target_class_ids": [0]}, (ONE_HOT[:, 0], SCORES[:, 0] > 0.5)),
    "BinaryIoU": ({}, (ONE_HOT[:, 0], SCORES[:, 0])),
    "OneHotIoU": ({"num_classes": 2, "target_class_ids": [0]}, (ONE_HOT, SCORES)),
    "OneHotMeanIoU": ({"num_classes": 2}, (ONE_HOT, SCORES)),
    "PrecisionAtRecall": ({"recall": 0.5}, (ONE_HOT[:, 0], SCORES[:, 0])),
    "RecallAtPrecision": ({"precision": 0.5}, (ONE_HOT[:, 0], SCORES[:, 0])),
    "SensitivityAtSpecificity": ({"specificity": 0.5}, (ONE_HOT[:, 0], SCORES[:, 0])),
    "SpecificityAtSensitivity": ({"sensitivity": 0.5}, (ONE_HOT[:, 0], SCORES[:, 0])),
    "MeanMetricWrapper": ({"fn": keras.losses.mean_squared_error}, (ONE_HOT, SCORES)),
    "Mean": ({}, (SCORES[:, 0],)),
    "Sum": ({}, (SCORES[:, 0],)),
}
KERAS = [name for name, kind in vars(keras.metrics).items() if isinstance(kind, type) and name != "Metric"]


@pytest.mark.parametrize("name", KERAS)
def test_every_metric_of_keras_is_known_as_a_sum(name):
    """Also where a subclass has its own `update_state`, which calls that of Keras."""
    kind = getattr(keras.metrics, name)
    arguments, values = PAIRS.get(name, ({}, (ONE_HOT.argmax(1) if "Sparse" in name else ONE_HOT, SCORES)))

    class Mine(kind):
        def update_state(self, *args, **kwargs):
            return super().update_state(*args, **kwargs)

    metric = Mine(**arguments)
    metric.update_state(*values)  # makes its variables
    assert metric_updates.has_own_update(metric)
    assert not metric_updates.has_own_update(kind(**arguments))
    update = functools.partial(metric.update_state, *map(tf.constant, values))
    kinds = {each.kind for each in metric_updates.list_updates(metric, update, str)}
    assert kinds == {metric_updates.SUM}


class KeepsItsLast(Own):
    """Its update is a function of TensorFlow, and keeps a tensor."""

    def __init__(self):
        super().__init__()
        self.last = None

    @tf.function
    def added(self, error):
        return tf.reduce_sum(error)

    def update_state(self, y, outputs, sample_weight=None):
        self.last = tf.abs(y - outputs)
        self.value.assign_add(self.added(self.last))


@pytest.mark.on("tpu", rest="mirrored")
def test_looking_at_a_metric_leaves_nothing_in_it_and_in_its_functions(both):
    metric = KeepsItsLast()
    model, alone = model_with(lambda: metric)(), model_with(KeepsItsLast)()
    alone.set_weights(model.get_weights())
    replicated = replicate_model(model, strategy=both(2))
    expected = alone.evaluate(X, Y, batch_size=12, verbose=0, return_dict=True)
    found = replicated.evaluate(X, Y, batch_size=12, verbose=0, return_dict=True)
    np.testing.assert_allclose(found["keepsitslast"], expected["keepsitslast"], rtol=1e-5)
    metric.reset_state()
    metric.update_state(tf.ones([2, 1]), tf.zeros([2, 1]))
    assert float(metric.result()) == 2.0


class Remembering(Total):
    """Keeps the thread of its last update. Ctrl-C comes during an update on another thread than the main one."""

    def update_state(self, y, outputs, sample_weight=None):
        super().update_state(y, outputs)
        self.thread = threading.current_thread()
        if self.thread is not threading.main_thread():
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_ctrl_c_while_a_metric_is_looked_at_leaves_the_metric_as_it_was():
    with TPUStrategy(num_cores=2).scope():
        model = dense(3, 1, "sgd", "mse", metrics=[Remembering()])
    with pytest.raises(KeyboardInterrupt):
        model.fit(X[:32], Y[:32], batch_size=8, verbose=0)
    inner = [inner for metric in model.metrics for inner in getattr(metric, "metrics", [metric])]
    metric = next(each for each in inner if isinstance(each, Remembering))
    assert metric.thread is threading.main_thread()
