"""`check_parity` of Keras models: right ones are found right, wrong ones by name, and all are left as they were."""

import collections
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.versions import HAS_XLA, WHY_NO_XLA
from keras import layers

from replica_engine import MirroredStrategy
from replica_engine.errors import ParityArgumentError, ParityError, ReplicateError
from replica_engine.keras import replicate_model
from replica_engine.keras.shard import Shard
from replica_engine.testing import ParityReport, check_parity

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = RNG.normal(size=(24, 1)).astype("float32")


def two_inputs_and_outputs():
    keras.utils.set_random_seed(0)
    a, b = keras.Input((4,), name="a"), keras.Input((3,), dtype="int32", name="b")
    words = layers.GlobalAveragePooling1D()(layers.Embedding(10, 3, name="table")(b))
    hidden = layers.BatchNormalization(synchronized=True, name="norm")(layers.Concatenate()([a, words]))
    outputs = {"p": layers.Dense(1, name="p")(hidden), "q": layers.Dense(2, "softmax", name="q")(hidden)}
    model = keras.Model({"a": a, "b": b}, outputs, name="two")
    losses = {"p": "mse", "q": "sparse_categorical_crossentropy"}
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9, clipnorm=0.5)
    model.compile(optimizer, losses, weighted_metrics={"q": ["accuracy"]}, run_eagerly=True)
    x = {"a": X, "b": RNG.integers(0, 10, (24, 3))}
    y = {"p": Y, "q": RNG.integers(0, 2, 24)}
    return model, x, y, {"p": RNG.random(24).astype("float32"), "q": RNG.random(24).astype("float32")}


def test_a_right_model_is_ok_and_left_as_it_was(kinds):
    """Several inputs and outputs, sparse gradients, sample weights, metrics, an optimizer that is not built."""
    model, x, y, weights = two_inputs_and_outputs()
    before = [variable.numpy() for variable in model.variables]
    attributes = dict(vars(model))
    optimizer = dict(vars(model.optimizer))
    keras.utils.set_random_seed(3)
    drawn = tf.random.uniform([2]).numpy(), keras.random.uniform([2]).numpy()
    keras.utils.set_random_seed(3)
    python, numpy = random.getstate(), np.random.get_state()[1].copy()

    report = check_parity(model, x, y, weights, replicas=2, steps=2, batch_size=7, strategies=kinds)

    assert report.ok, str(report)
    report.raise_if_different()
    assert (report.replicas, report.strategies, report.batches) == (2, tuple(kinds), (7, 7))
    for kind in kinds:
        compared = collections.Counter(each.kind for each in report.compared if each.strategy == kind)
        assert set(compared) == {"layer output", "prediction", "loss", "metric", "weight"}
        assert compared["weight"] == 2 * len(model.weights)
    assert all(np.array_equal(value, now.numpy()) for value, now in zip(before, model.variables, strict=True))
    assert list(vars(model)) == list(attributes)
    assert all(vars(model)[name] is value for name, value in attributes.items())
    assert not model.optimizer.built
    assert list(vars(model.optimizer)) == list(optimizer)
    assert len(model.optimizer.variables) == 2  # iterations and learning rate
    assert random.getstate() == python
    assert (np.random.get_state()[1] == numpy).all()
    assert (tf.random.uniform([2]).numpy() == drawn[0]).all()
    assert (keras.random.uniform([2]).numpy() == drawn[1]).all()
    model.train_on_batch(x, y)  # it is a plain model as before
    assert model.optimizer.built


def test_variables_that_it_makes_do_not_wait_for_their_values_afterwards(make, on_threads):
    """Keras gives them when the program leaves its own outermost scope without state, as one was left before."""
    with keras.StatelessScope():
        pass
    model = make(metrics=["mae"])
    assert on_threads(model).ok
    with keras.StatelessScope():
        pass
    model.evaluate(X, Y, verbose=0)


def test_weights_that_were_trained_and_functions_that_were_traced_stay(make, on_threads):
    model = make(eager=False, optimizer=keras.optimizers.SGD(momentum=0.9))
    model.fit(tf.data.Dataset.from_tensors((X, Y)), verbose=0)
    function, optimizer = model.train_function, [each.numpy() for each in model.optimizer.variables]
    weights = model.get_weights()
    assert on_threads(model).ok
    assert model.train_function is function
    assert all(np.array_equal(one, other) for one, other in zip(weights, model.get_weights(), strict=True))
    now = [each.numpy() for each in model.optimizer.variables]
    assert all(np.array_equal(one, other) for one, other in zip(optimizer, now, strict=True))


def test_batch_normalization_is_the_first_to_differ_and_named(make, kinds):
    model = make(layers.BatchNormalization(name="norm"))
    report = check_parity(model, X, Y, steps=1, batch_size=7, strategies=kinds)
    assert not report.ok
    assert {kind: (first.kind, first.name) for kind, first in report.first.items()} == dict.fromkeys(
        kinds, ("layer output", "norm")
    )
    assert report.first_of("prediction") is None  # which use the moving statistics
    assert {difference.name for difference in report.differences if difference.kind == "weight"} >= {
        "small/first/kernel",
        "small/norm/moving_variance",
        "small/last/kernel",
    }
    text = str(report)
    assert "DIFFERENT numbers" in text
    assert "first layer output 'norm', training mode, shares of equal size" in text
    with pytest.raises(ParityError, match="layer output 'norm'") as caught:
        report.raise_if_different()
    assert isinstance(caught.value, AssertionError)


def test_synchronized_batch_normalization_and_adam_are_ok(make, on_threads):
    """The bias before it has a gradient that is 0 but for rounding, which Adam would make large."""
    model = make(layers.Dense(4, name="before"), layers.BatchNormalization(synchronized=True), optimizer="adam")
    report = on_threads(model, steps=3)
    assert report.ok, str(report)


def test_a_wrong_factor_is_found_that_adam_would_hide(make, on_threads):
    class Summed(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return tf.distribute.get_strategy().num_replicas_in_sync * super().compute_loss(*args, **kwargs)

    keras.utils.set_random_seed(0)
    model = Summed([keras.Input((4,)), layers.Dense(1, name="last")], name="small")
    model.compile("adam", "mse", run_eagerly=True)
    report = on_threads(model)
    assert report.first_of("layer output") is None
    found = report.first_of("weight")
    assert found.name == "small/last/kernel"
    assert found.relative == pytest.approx(1.0, rel=1e-3)  # as much again


def test_dropout_is_the_first_to_differ(make, on_threads):
    model = make(layers.Dropout(0.5, name="drop"))
    assert on_threads(model).first["MirroredStrategy"].name == "drop"


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
@pytest.mark.parametrize("alg", ["auto_select", "philox"])
def test_stateless_random_numbers_are_those_of_one_device(alg):
    class Scale(layers.Layer):
        def call(self, x):
            return x * tf.random.stateless_uniform([3], seed=[1, 2], alg=alg)

    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), Scale(name="scale")])
    model.compile("sgd", "mse", run_eagerly=True)
    report = check_parity(model, X, Y, steps=1, batch_size=7, strategies="TPUStrategy")
    assert report.ok, str(report)


def worst(y, outputs):
    return tf.reduce_max(tf.abs(y - outputs))


def of_each_sample(y, outputs):
    return tf.reduce_max(tf.abs(y - outputs), axis=-1)


def test_a_loss_that_is_not_a_mean_is_found(make, on_threads):
    report = on_threads(make(loss=worst))
    assert report.first_of("layer output") is None
    assert report.first_of("loss").name == "loss"
    assert report.first_of("weight").name == "small/first/kernel"


@pytest.mark.parametrize("loss", [of_each_sample, keras.losses.MeanSquaredError(reduction="sum")])
def test_losses_of_samples_and_sums_over_them_are_ok(make, on_threads, loss):
    report = on_threads(make(loss=loss))
    assert report.ok, str(report)


def test_a_loss_that_a_layer_adds_is_found(make, on_threads):
    class Peak(layers.Layer):
        def call(self, x):
            self.add_loss(tf.reduce_max(x))
            return x

    report = on_threads(make(Peak(name="peak")))
    assert report.first_of("layer output") is None
    assert report.first_of("loss").name == "loss"


def test_a_metric_that_is_not_a_mean_is_named(make, on_threads):
    report = on_threads(make(metrics=[worst, of_each_sample]))
    assert {(each.kind, each.name) for each in report.differences} == {("metric", "worst")}


def test_a_weight_that_a_layer_assigns_from_its_rows_is_the_first_to_differ(make, on_threads):
    class Peaks(layers.Layer):
        def build(self, shape):
            self.peak = self.add_weight(name="peak", initializer="zeros", trainable=False)

        def call(self, x):
            self.peak.assign(tf.reduce_max(x))
            return x

    report = on_threads(make(Peaks(name="peaks")))
    assert {(each.kind, each.name) for each in report.differences} == {("weight", "small/peaks/peak")}


def test_half_precision_has_a_tolerance_of_its_own(on_threads):
    keras.utils.set_random_seed(0)
    inside = [layers.Dense(16, "tanh", dtype="mixed_float16"), layers.Dense(1, dtype="float32")]
    model = keras.Sequential([keras.Input((4,)), *inside])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse", run_eagerly=True)
    report = on_threads(model)
    assert report.ok, str(report)
    assert "0.02 of a tensor's largest value" in report.tolerance
    assert not on_threads(model, rtol=1e-8).ok


class Unpacking(keras.Model):
    """Its steps take what `fit`, `evaluate` and `predict` give them, and nothing else."""

    def __init__(self, unpack):
        super().__init__(name="unpacking")
        self.dense = layers.Dense(1, name="dense")
        self.unpack = unpack

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        variables = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.test_step(data)["loss"]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}

    def test_step(self, data):
        x, y, weights = self.unpack(data)
        return {"loss": tf.reduce_mean(weights * (self(x, training=True) - y) ** 2)}

    def predict_step(self, data):
        return self(data[0] if isinstance(data, tuple) and len(data) > 1 else data)


@pytest.mark.parametrize("given", ["x, y", "x", "x, y, weights", "a dataset"])
def test_steps_of_ones_own_get_what_fit_gives(given):
    """Not None for what is not there, as `train_on_batch` gives it, nor a tuple of one, as `predict_on_batch`."""

    def unpack(data):
        if given == "x":
            return data, 0.0, 1.0
        x, y, *weights = data
        assert len(weights) == (given == "x, y, weights")
        return x, y, weights[0][:, tf.newaxis] if weights else 1.0

    keras.utils.set_random_seed(0)
    model = Unpacking(unpack)
    model(X[:2])
    model.compile("sgd", run_eagerly=True)
    data = {
        "x, y": (X, Y),
        "x": (X,),
        "x, y, weights": (X, Y, np.arange(24, dtype="float32")),
        "a dataset": (tf.data.Dataset.from_tensor_slices((X, Y)).batch(8),),
    }[given]
    report = check_parity(model, *data, steps=1, strategies="MirroredStrategy")
    assert report.ok, str(report)


def test_a_train_step_of_its_own_with_an_optimizer_that_it_builds(on_threads):
    class Own(keras.Model):
        def __init__(self):
            super().__init__(name="own")
            self.dense = layers.Dense(1, name="dense")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    keras.utils.set_random_seed(0)
    model = Own()  # which is not built either
    model.compile("adam", run_eagerly=True)
    report = on_threads(model)
    assert report.ok, str(report)
    assert {each.kind for each in report.compared} == {"layer output", "prediction", "loss", "weight"}
    assert not model.optimizer.built


def test_a_mistake_of_the_library_is_found(make, on_threads, monkeypatch):
    """Shares that all count the same, which is wrong for a batch of 7 rows alone."""
    monkeypatch.setattr(Shard, "weight", lambda self, dtype="float32": tf.cast(1 / self.replicas, dtype))
    report = on_threads(make(), steps=2, batch_size=8)
    assert report.first_of("weight").batch == "step 2 of 2, 7 rows"
    assert {difference.step for difference in report.differences} <= {None, 2}


def test_a_model_that_is_not_finite_is_not_ok(make, on_threads):
    report = on_threads(make(layers.Lambda(lambda x: x * float("nan"))))
    assert not report.ok
    assert report.first["MirroredStrategy"].kind == "prediction"
    assert "nan instead of nan" in str(report)


def test_a_model_that_is_not_compiled_and_not_built(on_threads):
    model = keras.Sequential([layers.Dense(2), layers.Dense(1)])
    report = check_parity(model, X, strategies="MirroredStrategy")
    assert report.ok
    assert isinstance(report, ParityReport)
    assert {each.kind for each in report.compared} == {"layer output", "prediction"}
    replicated = replicate_model(model, strategy=None, replicas=2)
    assert check_parity(replicated, X, strategies="MirroredStrategy").ok


def test_batches_of_a_dataset_and_more_replicas_than_two(make):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    report = check_parity(make(), dataset, replicas=4, steps=4, strategies=["MirroredStrategy"])
    assert report.ok, str(report)
    assert report.batches == (8, 8, 8, 7)


def test_a_model_of_a_strategy_is_refused(on_threads):
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    with pytest.raises(ReplicateError, match="outside of the scope"):
        on_threads(model)


def test_an_exception_leaves_the_model_as_it_was(make, on_threads):
    class Fails(layers.Layer):
        def call(self, x, training=False):
            if training and tf.distribute.get_strategy().num_replicas_in_sync > 1:
                raise KeyError("on replicas")
            return x

    model = make(Fails(), optimizer="adam")
    weights = model.get_weights()
    with pytest.raises(KeyError, match="on replicas"):
        on_threads(model)
    assert not model.optimizer.built
    assert "call" not in vars(model.layers[0])
    assert all(np.array_equal(one, other) for one, other in zip(weights, model.get_weights(), strict=True))


class WithoutTargets(keras.Model):
    """Compiled with a loss, and trained to give its own input."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((x - y_pred) ** 2)


def test_a_model_with_a_loss_of_its_own_needs_no_targets():
    model = WithoutTargets()
    model.compile("sgd", "mse", run_eagerly=True)
    report = check_parity(model, X, steps=1, batch_size=8, strategies="MirroredStrategy")
    assert {each.kind for each in report.compared} >= {"loss", "weight"}


def test_a_layer_that_is_called_twice_and_one_with_several_outputs():
    class Both(layers.Layer):
        def call(self, x):
            return x + 1.0, 2.0 * x

    a = keras.Input((4,))
    shared = layers.Dense(4, name="shared")
    one, two = Both(name="both")(shared(shared(a)))
    model = keras.Model(a, one + two, name="twice")
    report = check_parity(model, X, strategies="MirroredStrategy")
    names = [each.name for each in report.compared if each.kind == "layer output"]
    assert names[:4] == ["shared", "shared (2)", "both", "both (2)"]
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda model: check_parity(lambda x: x, X, variables=[]), "takes a Keras model.*function.*two runs.*allclose"),
        (lambda model: check_parity(keras.layers.Dense(1), X), "takes a Keras model.*got Dense.*two runs"),
        (lambda model: check_parity(model, MirroredStrategy(["CPU:0"])), r"is the data; .*strategies=\[strategy\]\)\."),
        (lambda model: check_parity(model, X, tolerance=1e-3), "no argument tolerance.*write rtol for tolerance"),
        (lambda model: check_parity(model, X, seed=1), "takes no argument seed.*leave out seed"),
        (
            lambda model: check_parity(model, X, random_layers=False),
            "no argument random_layers.*a model without",
        ),
        (lambda model: check_parity(model, X, replica=2), "takes no argument replica."),
        (lambda model: check_parity(model, X, steps=0), "steps must be a positive int; got 0"),
        (lambda model: check_parity(model, X, rtol=True), "rtol must be a number that is not negative; got True"),
        (lambda model: check_parity(model, X, atol=np.float32("nan")), "atol must be a number that is not negative"),
        (lambda model: check_parity(model, iter([]), strategies="MirroredStrategy"), "no rows"),
        (
            lambda model: check_parity(model, X, replicas=3, strategies=MirroredStrategy(["CPU:0", "CPU:1"])),
            "with 3 replicas.*got MirroredStrategy.*with 2 replicas, but replicas=3",
        ),
    ],
)
def test_arguments_that_cannot_be_checked(make, call, says):
    with pytest.raises(ParityArgumentError, match=says):
        call(make())


def test_in_the_scope_of_a_strategy_one_device_is_one(make):
    model = make()
    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        assert check_parity(model, X, Y, steps=1, batch_size=8, strategies="MirroredStrategy").ok


def test_strategies_and_tolerances_of_any_kind(make):
    report = check_parity(make(), X, Y, steps=1, batch_size=8, strategies={"MirroredStrategy"}, rtol=np.int64(1))
    assert report.ok
    assert report.strategies == ("MirroredStrategy",)


def test_a_step_that_builds_a_layer_is_refused_with_its_name():
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.late = layers.Dense(1), layers.Dense(1, name="late")

        def call(self, x):
            return self.first(x)

        def train_step(self, data):
            return {"loss": tf.reduce_mean(self.late(data[0]))}

    model = Late()
    model.compile("sgd", "mse")
    with pytest.raises(ReplicateError, match="late"):
        check_parity(model, X, Y, steps=1, batch_size=8, strategies="MirroredStrategy")


def test_a_list_of_inputs():
    a, b = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([a, b], layers.Dense(1)(layers.Add()([a, b])))
    model.compile("sgd", "mse", run_eagerly=True)
    report = check_parity(model, [X, 2 * X], Y, steps=1, batch_size=8, strategies="MirroredStrategy")
    assert report.ok, str(report)


def test_a_model_that_only_trains_other_models(make):
    class Trainer(keras.Model):
        def __init__(self):
            super().__init__(name="trainer")
            self.inner, self.own, self.built = make(), keras.optimizers.Adam(), True

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.inner(x) - y) ** 2)
            self.own.apply(tape.gradient(loss, self.inner.trainable_variables), self.inner.trainable_variables)
            return {"loss": loss}

    model = Trainer()
    model.compile(run_eagerly=True)
    report = check_parity(model, X, Y, steps=2, batch_size=8, strategies="MirroredStrategy")
    assert report.ok, str(report)
    assert {each.kind for each in report.compared} == {"loss", "weight"}
    assert not model.own.built
