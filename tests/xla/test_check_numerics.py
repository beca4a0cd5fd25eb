"""`tf.debugging.enable_check_numerics` under TPUStrategy: finite steps pass, and others name the op and the line."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import spread

from replica_engine import TPUStrategy
from replica_engine.errors import LoweringError
from replica_engine.keras import replicate_model


@pytest.fixture(autouse=True)
def checks():
    tf.debugging.enable_check_numerics()
    yield
    tf.debugging.disable_check_numerics()


def in_loop(x):
    for _ in tf.range(2):
        x = tf.math.log(x) + 1.0
    return x


def in_branch(x):
    if tf.reduce_all(x < 100.0):
        return tf.sqrt(x)
    return x


def in_condition(x):
    while tf.reduce_sum(tf.math.log(x)) > 1.0:
        x = x - 1.0
    return x


def gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(tf.sqrt(x))
    return tape.gradient(loss, x)


FUNCTIONS = {
    "log": (lambda x: tf.math.log(x), [1.0, 2.0], [1.0, -1.0], "Log"),
    "exp": (lambda x: tf.exp(x), [1.0, 2.0], [1.0, 1000.0], "Exp"),
    "function": (tf.function(lambda x: tf.math.log(x)), [1.0, 2.0], [1.0, -2.0], "Log"),
    "loop": (in_loop, [2.0, 3.0], [2.0, -1.0], "Log"),
    "branch": (in_branch, [1.0, 2.0], [1.0, -1.0], "Sqrt"),
    "condition": (in_condition, [3.0, 4.0], [2.0, -1.0], "Log"),
    "gradient": (gradient, [1.0, 4.0], [1.0, 0.0], "SqrtGrad|RealDiv|Mul"),
    "unknown length": (
        lambda x: tf.reduce_sum(tf.math.log(tf.boolean_mask(x, x < 100.0))),
        *([1.0, 200.0], [1.0, -1.0], "Log"),
    ),
    "beside random numbers": (
        lambda x: tf.nn.dropout(tf.sqrt(x), 0.5) + tf.random.normal(x.shape),
        *([1.0, 2.0], [1.0, -1.0], "Sqrt"),
    ),
    "over replicas": (
        lambda x: tf.distribute.get_replica_context().all_reduce("SUM", tf.math.log(x)),
        *([1.0, 2.0], [1.0, -1.0], "Log"),
    ),
    "beside strings": (
        lambda x: (tf.strings.length(tf.strings.as_string(x)), tf.math.log(x)),
        *([1.0, 2.0], [1.0, -1.0], "Log"),
    ),
}


@pytest.mark.parametrize(("fn", "finite", "bad", "op"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_verdict_is_that_of_one_device(two, fn, finite, bad, op):
    run = lambda x: two.run(fn, args=(x,))  # noqa: E731
    run(tf.constant(finite))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=f"Detected Infinity or NaN in output 0 of.*({op})"
    ) as found:
        run(tf.constant(bad))
    assert "test_check_numerics.py" in str(found.value)


def test_in_a_function(two):
    run = tf.function(lambda x: two.run(tf.math.log, args=(x,)))
    run(tf.constant([1.0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"Detected Infinity or NaN in output 0 of.*Log"):
        run(tf.constant([-1.0]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_all_floating_dtypes(two, dtype):
    two.run(tf.math.log, args=(tf.constant([1.0], dtype),))
    with pytest.raises(tf.errors.InvalidArgumentError, match="Detected Infinity or NaN"):
        two.run(tf.math.log, args=(tf.constant([-1.0], dtype),))


def test_one_replica_alone():
    strategy = TPUStrategy(num_cores=3)
    values = spread(strategy, lambda i: tf.constant(float(1 - i)))
    with pytest.raises(tf.errors.InvalidArgumentError, match='output 0 of graph op "Log"'):
        strategy.run(tf.math.log, args=(values,))


def test_a_device_loop(two):
    data = tf.data.Dataset.from_tensor_slices([1.0, 2.0, -1.0])

    def step(context, x):
        context.set_last_step_output("log", tf.math.log(x), "SUM")

    # The check of the sum of both replicas, which is not a number either, may be the first to come to the host.
    with pytest.raises(tf.errors.InvalidArgumentError, match=r'output 0 of graph op "(Log|XlaAllReduce)"'):
        two.run_steps(step, iter(two.experimental_distribute_dataset(data.repeat(2).batch(2))), 3)


def test_without_soft_placement_the_error_says_what_added_the_op():
    with pytest.raises(LoweringError, match=r"enable_check_numerics.*disable_check_numerics\(\)"):
        TPUStrategy(num_cores=2, soft_placement=False).run(tf.math.log, args=(tf.constant([1.0]),))


@pytest.mark.parametrize(("layers", "kind"), [(["dropout"], "scope"), (["dropout", "tanh"], "replicated")])
@pytest.mark.full("a step of Keras is a body as those above, with a gradient and dropout")
def test_fit(two, layers, kind):
    x = np.linspace(0.1, 1.0, 24, dtype="float32").reshape(8, 3)

    def build():
        made = {"dropout": keras.layers.Dropout(0.3), "tanh": keras.layers.Activation("tanh")}
        middle = [made[name] for name in layers]
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), *middle])
        model.compile("sgd", "mse")
        return model

    if kind == "scope":
        with two.scope():
            model = build()
    else:
        model = replicate_model(build(), strategy=two)
    assert np.isfinite(model.fit(x, x[:, :1], verbose=0).history["loss"]).all()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Detected Infinity or NaN"):
        model.fit(x * np.inf, x[:, :1], verbose=0)
