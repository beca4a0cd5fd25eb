"""`xla.constrain`, and the logical devices of `tf.distribute.TPUStrategy`: how values in a step are divided."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import gradient_of

import replica_engine
from replica_engine import xla
from replica_engine.errors import DeviceError, DistributionError


@pytest.fixture(params=[1, 2], ids=["one replica", "two replicas"])
def divided(request):
    return replica_engine.TPUStrategy(num_cores=4 * request.param, cores_per_replica=4, distribution="fsdp")


def hlo(strategy, fn, *args):
    return strategy.plan(fn, args).as_text()


def test_a_constraint_divides_and_changes_nothing(divided):
    x = tf.reshape(tf.range(24.0), [3, 8])
    step = lambda x: tf.reduce_sum(xla.constrain(tf.sin(x), (None, "batch")) ** 2)  # noqa: E731
    expected = tf.reduce_sum(tf.sin(x) ** 2)
    for value in divided.experimental_local_results(divided.run(step, args=(x,))):
        tf.debugging.assert_near(value, expected, rtol=1e-6)
    assert "3,2]" in hlo(divided, step, x)
    assert "3,2]" not in hlo(divided, lambda x: tf.reduce_sum(tf.sin(x) ** 2), x)


def test_the_size_of_a_batch_need_not_be_known(divided):
    step = lambda x: tf.reduce_sum(xla.constrain(tf.sin(x), (None, "batch")) ** 2)  # noqa: E731

    @tf.function(input_signature=[tf.TensorSpec([None, 8])])
    def run(x):
        return divided.experimental_local_results(divided.run(step, args=(x,)))

    for rows in (2, 3):
        x = tf.reshape(tf.range(8.0 * rows), [rows, 8])
        tf.debugging.assert_near(run(x)[0], tf.reduce_sum(tf.sin(x) ** 2), rtol=1e-6)


def test_its_gradient_is_right_and_divided(divided):
    step = gradient_of(lambda x: tf.reduce_sum(xla.constrain(x, (None, "batch")) ** 3))
    x = tf.reshape(tf.range(24.0), [3, 8])
    for value in divided.experimental_local_results(divided.run(step, args=(x,))):
        tf.debugging.assert_near(value, 3 * x**2)


def test_where_a_replica_has_one_device_it_does_nothing():
    one = replica_engine.TPUStrategy(num_cores=1)
    assert float(one.run(lambda x: xla.constrain(x, ("batch",))[0], args=(tf.ones([4]),))) == 1.0


class Constrained(keras.layers.Dense):
    """A layer that Keras calls outside of replicas too, to learn the shape of its output."""

    def call(self, x):
        return xla.constrain(super().call(x), ("batch", None))


@pytest.mark.parametrize("shape", [(8,), None])
def test_a_layer_of_keras_may_constrain_its_values(shape):
    """Built with the model, or by the first `fit`; the model runs without a strategy too."""
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("f")
    losses = []
    for cores in (1, 4):
        keras.utils.set_random_seed(0)
        with replica_engine.TPUStrategy(num_cores=cores, distribution="fsdp").scope():
            head = [] if shape is None else [keras.Input(shape)]
            model = keras.Sequential([*head, Constrained(16, "relu"), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        losses.append(model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    plain = keras.Sequential([keras.Input([8]), Constrained(16, "relu"), keras.layers.Dense(1)])
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(plain(x), model.predict(x, verbose=0), atol=1e-6)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        (("model",), "layout of the value passed to constrain names the axis 'model'"),
        (("batch", None, None), "3 axes, but the value passed to constrain has the shape"),
        (("batch", "batch"), "twice"),
        ("batch", "an entry for each dimension.*got 'batch'"),
        (None, "an entry for each dimension.*got None"),
    ],
)
def test_wrong_axes_are_named(axes, words):
    strategy = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")
    with pytest.raises(DistributionError, match=words):
        strategy.run(lambda x: xla.constrain(x, axes), args=(tf.ones([4, 4]),))


@pytest.mark.parametrize("parts", [[4, 1], [2, 2], [1, 4]])
@pytest.mark.parametrize("rule", [None, "fsdp"])  # a mesh of 2 x 2, and one of 4 whose only axis is split
def test_a_tensor_is_split_to_logical_devices(parts, rule, caplog):
    strategy = replica_engine.TPUStrategy(num_cores=8, cores_per_replica=4, distribution=rule)
    assert strategy.num_replicas_in_sync == 2

    def step(x):
        x = strategy.experimental_split_to_logical_devices(tf.sin(x), parts)
        y = strategy.experimental_replicate_to_logical_devices(tf.cos(x))
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(y))

    x = tf.reshape(tf.range(64.0), [8, 8])
    for value in strategy.experimental_local_results(strategy.run(step, args=(x,))):
        tf.debugging.assert_near(value, 2 * tf.reduce_sum(tf.cos(tf.sin(x))), rtol=1e-6)
    assert f"f32[{8 // parts[0]},{8 // parts[1]}]" in hlo(strategy, step, x)
    assert "AutoGraph" not in caplog.text


@pytest.mark.parametrize("parts", [[4], [3, 1], [2, 1], [1, 3]])
def test_what_is_no_split_is_refused(parts):
    strategy = replica_engine.TPUStrategy(num_cores=3, cores_per_replica=3)
    with pytest.raises(DeviceError, match="partition_dimensions"):
        strategy.run(lambda x: strategy.experimental_split_to_logical_devices(x, parts), args=(tf.ones([4, 4]),))


def test_logical_devices_have_the_numbers_of_a_replicas_devices():
    strategy = replica_engine.TPUStrategy(num_cores=4, cores_per_replica=2)
    assert float(strategy.run(lambda: strategy.experimental_assign_to_logical_device(tf.ones([]), 1)).values[0]) == 1
    with pytest.raises(DeviceError, match="2 devices, numbers 0 to 1"):
        strategy.run(lambda: strategy.experimental_assign_to_logical_device(tf.ones([]), 2))


def test_large_gradients_are_reduced_one_by_one_and_small_ones_and_those_of_several_replicas_together():
    """On CPU devices an all-reduce of many gradients keeps all of them in memory."""

    def reductions(size, replicas):
        strategy = replica_engine.TPUStrategy(num_cores=4, cores_per_replica=4 // replicas, distribution="fsdp")
        with strategy.scope():
            weights = [tf.Variable(tf.ones([size, size])) for _ in range(6)]

        def step(x):
            with tf.GradientTape() as tape:
                value = x
                for weight in weights:
                    value = tf.tanh(value @ weight)
            for weight, grad in zip(weights, tape.gradient(value, weights), strict=True):
                weight.assign_sub(tf.distribute.get_replica_context().all_reduce("SUM", grad))

        return strategy.plan(step, (tf.ones([1024, size]),)).as_text().count(" all-reduce(")

    assert reductions(512, replicas=1) >= 6
    assert reductions(32, replicas=1) == 1
    assert reductions(512, replicas=2) <= 2
