"""What is saved is what the devices have, and what is restored is what the next step sees."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

SUM = tf.VariableAggregation.SUM
MEAN = tf.VariableAggregation.MEAN


def variables(replicas):
    """By name: one of each kind, the on-read ones with another value on each replica."""
    made = {
        "weight": replicas.variable([0.0, 0.0]),
        "mean": replicas.variable(0.0, MEAN),
        "sum_on_read": replicas.variable(0.0, SUM, on_read=True),
        "mean_on_read": replicas.variable(0.0, MEAN, on_read=True),
    }
    made["iterations"] = replicas.variable(tf.constant(0, tf.int64), tf.VariableAggregation.ONLY_FIRST_REPLICA)
    return made


def train(replicas, made):
    """A step that changes all of them."""

    def fn(x):
        made["weight"].assign_add([1.0, 2.0])
        made["mean"].assign_add(x)
        made["sum_on_read"].assign_add(x)
        made["mean_on_read"].assign_add(x)
        made["iterations"].assign_add(1)

    replicas.strategy.run(fn, args=(replicas.spread(lambda i: 4.0 * i),))


def plain(made):
    return {name: np.asarray(variable.numpy()).tolist() for name, variable in made.items()}


AFTER_TWO = {"weight": [2.0, 4.0], "mean": 4.0, "sum_on_read": 8.0, "mean_on_read": 4.0, "iterations": 2}
AFTER_THREE = {"weight": [3.0, 6.0], "mean": 6.0, "sum_on_read": 12.0, "mean_on_read": 6.0, "iterations": 3}


@pytest.fixture
def trained(two):
    made = variables(two)
    train(two, made)
    train(two, made)
    return made


@pytest.fixture
def saved(trained, tmp_path):
    """The path of a checkpoint of two steps."""
    return tf.train.Checkpoint(**trained).save(str(tmp_path / "checkpoint"))


def test_a_checkpoint_has_the_values_of_the_last_step(trained, two, tmp_path):
    assert plain(trained) == AFTER_TWO
    train(two, trained)
    path = tf.train.Checkpoint(**trained).save(str(tmp_path / "another"))
    reader = tf.train.load_checkpoint(path)
    assert reader.get_tensor("weight/.ATTRIBUTES/VARIABLE_VALUE").tolist() == [3.0, 6.0]
    assert reader.get_tensor("sum_on_read/.ATTRIBUTES/VARIABLE_VALUE") == 12.0
    assert reader.get_tensor("iterations/.ATTRIBUTES/VARIABLE_VALUE") == 3


def test_the_next_step_goes_on_from_a_restored_checkpoint(trained, two, saved):
    train(two, trained)
    tf.train.Checkpoint(**trained).restore(saved).assert_consumed()
    assert plain(trained) == AFTER_TWO
    train(two, trained)
    assert plain(trained) == AFTER_THREE


@pytest.mark.parametrize("size", [1, 4])
def test_a_checkpoint_goes_to_a_strategy_of_another_size(replicas, saved, size):
    others = replicas(size)
    made = variables(others)
    train(others, made)
    tf.train.Checkpoint(**made).restore(saved).assert_consumed()
    assert plain(made) == AFTER_TWO
    assert others.components(made["weight"]) == [[2.0, 4.0]] * size
    assert others.components(made["sum_on_read"]) == [8.0 / size] * size
    others.strategy.run(lambda: made["weight"].assign_add(made["weight"]))
    assert others.components(made["weight"]) == [[4.0, 8.0]] * size


def test_a_checkpoint_goes_to_plain_variables_and_comes_back(two, trained, saved, tmp_path):
    alone = {name: tf.Variable(tf.zeros_like(variable.numpy())) for name, variable in trained.items()}
    tf.train.Checkpoint(**alone).restore(saved).assert_consumed()
    assert plain(alone) == AFTER_TWO
    for variable in alone.values():
        variable.assign(variable + variable)
    path = tf.train.Checkpoint(**alone).save(str(tmp_path / "alone"))
    tf.train.Checkpoint(**trained).restore(path).assert_consumed()
    expected = {name: (2 * np.asarray(value)).tolist() for name, value in AFTER_TWO.items()}
    assert plain(trained) == expected
    assert two.each(two.strategy.run(lambda: trained["weight"].read_value())) == [[4.0, 8.0]] * 2


def test_a_checkpoint_waits_for_variables_that_the_first_step_makes(two, saved):
    class Model(tf.Module):
        weight = None

        def step(self):
            if self.weight is None:
                self.weight = tf.Variable([0.0, 0.0])
            self.weight.assign_add([10.0, 10.0])

    model = Model()
    tf.train.Checkpoint(root=model).restore(saved).expect_partial()
    two.strategy.run(model.step)
    assert model.weight.numpy().tolist() == [12.0, 14.0]


def test_a_checkpoint_manager_saves_in_a_training_loop(two, trained, tmp_path):
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**trained), tmp_path, max_to_keep=2)
    paths = []
    for _ in range(3):
        paths.append(manager.save())
        train(two, trained)
    assert manager.checkpoints == paths[1:]
    assert [tf.train.load_variable(path, "iterations/.ATTRIBUTES/VARIABLE_VALUE") for path in paths[1:]] == [3, 4]


class Doubler(tf.Module):
    def __init__(self):
        self.weight = tf.Variable([1.0, 1.0])
        self.total = tf.Variable(
            0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=SUM, trainable=False
        )

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def __call__(self, x):
        return x * self.weight

    @tf.function(input_signature=[])
    def grow(self):
        self.weight.assign_add(self.weight)
        return self.weight.read_value()


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("target", ["alone", "in scope"])
def test_a_saved_model_has_the_values_of_the_last_step(two, tmp_path, called, target):
    with two.strategy.scope():
        module = Doubler()
    if called:
        assert module([3.0, 4.0]).numpy().tolist() == [3.0, 4.0]
        assert module.grow().numpy().tolist() == [2.0, 2.0]
        module.weight.assign([1.0, 1.0])
    two.add(module.weight, 9.0)
    tf.saved_model.save(module, str(tmp_path / "model"))
    two.add(module.weight, 1.0)
    assert module([3.0, 4.0]).numpy().tolist() == [33.0, 44.0]  # saving did it no harm
    assert module.grow().numpy().tolist() == [22.0, 22.0]

    with two.strategy.scope() if target == "in scope" else contextlib.nullcontext():
        loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert (getattr(loaded.weight, "distribute_strategy", None) is two.strategy) == (target == "in scope")
    assert loaded(tf.constant([3.0, 4.0])).numpy().tolist() == [30.0, 40.0]
    assert loaded.grow().numpy().tolist() == [20.0, 20.0]
    assert loaded.weight.numpy().tolist() == [20.0, 20.0]
    if target == "in scope":
        two.add(loaded.weight, 1.0)
        assert loaded(tf.constant([3.0, 4.0])).numpy().tolist() == [63.0, 84.0]
        assert two.each(two.strategy.run(loaded, args=(tf.constant([1.0, 2.0]),))) == [[21.0, 42.0]] * 2


@pytest.mark.parametrize("place", ["alone", "in scope"])
def test_a_signature_runs_wherever_it_was_loaded(two, tmp_path, place):
    module = Doubler()
    tf.saved_model.save(module, str(tmp_path), signatures={"double": module.__call__})
    with two.strategy.scope() if place == "in scope" else contextlib.nullcontext():
        loaded = tf.saved_model.load(str(tmp_path))
    signature, args = loaded.signatures["double"], (tf.constant([3.0, 4.0]),)

    @tf.function
    def in_function():
        return two.strategy.run(signature, args=args)

    def ways():
        with two.strategy.scope():
            results = [two.strategy.run(signature, args=args), in_function()]
        results += [two.strategy.run(signature, args=args), in_function()]
        return [each for result in results for each in two.each(result["output_0"])]

    assert ways() == [[3.0, 4.0]] * 8
    two.strategy.run(lambda: loaded.weight.assign([2.0, 3.0]))
    assert ways() == [[6.0, 12.0]] * 8


def test_a_concrete_function_of_a_variable_runs_on_replicas_and_on_the_host(two):
    weight = two.variable(3.0)

    @tf.function
    def scaled(x):
        return x * weight

    @tf.function
    def grow(x):
        weight.assign_add(x)
        return weight.read_value()

    two_args = (tf.constant(2.0),)
    concrete, grown = scaled.get_concrete_function(*two_args), grow.get_concrete_function(*two_args)
    run = two.strategy.run
    assert two.each(run(concrete, args=two_args)) == [6.0, 6.0]
    assert two.each(tf.function(run)(concrete, args=two_args)) == [6.0, 6.0]
    assert two.each(run(lambda x: concrete(x) + 1.0, args=two_args)) == [7.0, 7.0]
    assert two.each(run(grown, args=two_args)) == [5.0, 5.0]
    assert [float(grown(1.0)), float(concrete(1.0)), float(weight)] == [6.0, 6.0, 6.0]
    assert two.each(run(concrete, args=two_args)) == [12.0, 12.0]


# Keras models.


@pytest.fixture
def model(two):
    """A model with weights, slots of its optimizer, and metrics, after one epoch."""
    with two.strategy.scope():
        synchronized = keras.layers.BatchNormalization(synchronized=True)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), synchronized])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 2)).astype("float32")
BATCH = tf.data.Dataset.from_tensors((X, Y))  # of arrays Keras would make a pipeline for each call


def fit(model):
    return model.fit(BATCH, verbose=0).history["loss"][0]


def test_get_weights_and_set_weights_go_past_the_devices(two, model):
    initial = model.get_weights()
    fit(model)
    trained = model.get_weights()
    assert not np.array_equal(initial[0], trained[0])
    model.set_weights(initial)
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), initial, strict=True))
    inside = two.each(two.strategy.run(lambda: model(X, training=False)))
    alone = X @ initial[0] / np.sqrt(1 + 1e-3)
    np.testing.assert_allclose(inside, [alone] * 2, rtol=1e-5, atol=1e-6)


def test_a_keras_model_goes_on_where_it_was_saved(two, model, tmp_path):
    """As a whole, its weights alone, and in a checkpoint."""
    fit(model)
    expected = model.get_weights()
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    next_loss = fit(model)

    def whole():
        with two.strategy.scope():
            return keras.models.load_model(tmp_path / "model.keras")

    def weights():
        model.load_weights(tmp_path / "model.weights.h5")
        return model

    def checkpoint():
        tf.train.Checkpoint(model=model).restore(path)
        return model

    for loaded in (whole, weights, checkpoint):
        again = loaded()
        assert all(np.array_equal(a, b) for a, b in zip(again.get_weights(), expected, strict=True))
        assert fit(again) == pytest.approx(next_loss, rel=1e-6)


def test_a_keras_model_is_exported_with_the_weights_of_the_last_step(model, tmp_path):
    fit(model)
    model.export(tmp_path / "exported", verbose=False)
    expected = model.predict(BATCH, verbose=0)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(loaded.serve(X), expected, rtol=1e-5, atol=1e-6)
    fit(model)
    assert not np.allclose(model.predict(BATCH, verbose=0), expected)
