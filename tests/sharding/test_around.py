"""What users do around a model in parts: optimizers' options, steps and loops of their own, host work, kept programs.

Each program runs on replicas of whole variables, and on as many replicas whose variables are divided.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.divided import model_parallel
from keras import layers

import replica_engine
from replica_engine import xla

X = np.random.default_rng(0).normal(size=(48, 20)).astype("f")
WORDS = np.random.default_rng(1).integers(0, 100, (48, 5)).astype("int32")
Y = np.random.default_rng(2).integers(0, 3, 48)


def loss(**how):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **how)


def dense():
    return keras.Sequential([keras.Input([20]), layers.Dense(64, activation="relu"), layers.Dense(3, dtype="float32")])


class OwnStep(keras.Model):
    """A model with its own `train_step`, which reads a norm over all gradients."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(64, activation="relu")
        self.dropout = layers.Dropout(0.2)
        self.outer = layers.Dense(3)

    def call(self, x, training=None):
        return self.outer(self.dropout(self.inner(x), training=training))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            value = self.compute_loss(y=y, y_pred=self(x, training=True))
        grads = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"loss": value, "norm": tf.linalg.global_norm(grads)}


def trained(strategy, make, optimizer, x=X, batch_size=16, validates=False, **how):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
        model.compile(optimizer(), loss(), **how)
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(batch_size)  # of arrays Keras makes a pipeline for each fit
    history = model.fit(data, epochs=2, shuffle=False, verbose=0, validation_data=data if validates else None)
    return {**history.history, "weights": model.get_weights()}


def accumulated_clipped_and_averaged(strategy):
    """In one launch of several steps."""
    how = {"gradient_accumulation_steps": 3, "global_clipnorm": 0.1, "use_ema": True, "ema_momentum": 0.9}
    return trained(strategy, dense, lambda: keras.optimizers.Adam(0.01, **how), batch_size=8, steps_per_execution=3)


def rows_of_a_table(strategy):
    def make():
        table = layers.Embedding(100, 16, mask_zero=True)
        mean = layers.GlobalAveragePooling1D()
        return keras.Sequential([keras.Input([5], dtype="int32"), table, mean, layers.Dense(3)])

    return trained(strategy, make, keras.optimizers.Adagrad, WORDS)


def own_train_step(strategy):
    return trained(strategy, OwnStep, keras.optimizers.AdamW, validates=True)


def single_batches(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = dense()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss(), metrics=["accuracy"])
    losses = [model.train_on_batch(X[:16], Y[:16]) for _ in range(3)]
    return {"losses": losses, "test": model.test_on_batch(X, Y), "weights": model.get_weights()}


def own_loops(strategy):
    """Eagerly, in a tf.function, and as a loop on the devices."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer, mean = dense(), keras.optimizers.Adam(0.01), keras.metrics.Mean()
        optimizer.build(model.trainable_variables)
    of_rows = loss(reduction="none")

    def step(x, y):
        with tf.GradientTape() as tape:
            value = tf.nn.compute_average_loss(of_rows(y, model(x, training=True)), global_batch_size=16)
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
        mean.update_state(value)
        return value

    run = lambda x, y: strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)  # noqa: E731
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)
    batches = iter(strategy.experimental_distribute_dataset(dataset.repeat()))
    losses = [run(*next(batches)) for _ in range(3)]
    in_graph = tf.function(run)
    losses += [in_graph(*next(batches)) for _ in range(3)]

    def looped(context, x, y):
        context.set_last_step_output("loss", step(x, y), "SUM")

    losses.append(strategy.run_steps(looped, batches, iterations=3).last_step_outputs["loss"])
    return {"losses": losses, "mean": mean.result(), "weights": model.get_weights()}


def host_work(strategy):
    """A host call gets the whole value, once on each replica; strings and what is printed are moved to the host."""
    calls = []
    with strategy.scope():
        weights = tf.Variable(np.random.default_rng(0).normal(size=(64, 64)).astype("f"))
        names = tf.Variable(["a", "b"])

    def on_host(y):
        calls.append(y.shape)
        return tf.reduce_sum(y)

    def step(x):
        y = x @ weights
        total = xla.outside_compilation(on_host, y)
        text = tf.strings.join([names, tf.strings.as_string(tf.shape(y))])
        weights.assign_add(weights * tf.ensure_shape(total, []) * 1e-3)
        return total, text

    results = [strategy.run(step, args=(tf.ones([8, 64]),)) for _ in range(2)]
    texts = [each.numpy().tolist() for each in strategy.experimental_local_results(results[0][1])]
    assert texts == [[b"a8", b"b64"]] * strategy.num_replicas_in_sync
    assert set(calls) == {tf.TensorShape([8, 64])}
    values = [strategy.experimental_local_results(total)[-1] for total, _ in results]
    return {"values": values, "calls": len(calls) / strategy.num_replicas_in_sync, "weights": weights}


PROGRAMS = [
    accumulated_clipped_and_averaged,
    rows_of_a_table,
    own_train_step,
    pytest.param(single_batches, marks=pytest.mark.full("as the batches of a fit")),
    own_loops,
    host_work,
]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("replicas", [1, 2])
def test_numbers_are_those_of_whole_variables(program, replicas):
    expected = program(replica_engine.TPUStrategy(num_cores=replicas))
    found = program(replica_engine.TPUStrategy(num_cores=4, cores_per_replica=4 // replicas, distribution="fsdp"))
    assert list(found) == list(expected)
    for name, values in expected.items():
        for value, other in zip(tf.nest.flatten(values), tf.nest.flatten(found[name]), strict=True):
            tolerance = {"atol": 1e-5} if name == "weights" else {"rtol": 2e-6}
            np.testing.assert_allclose(other, value, **tolerance)


def test_a_loss_scale_finds_what_is_not_finite_in_any_part():
    """The first scales overflow in half precision, so the first steps are left out."""

    def scaled(**how):
        strategy = replica_engine.TPUStrategy(**how)
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([keras.Input([20]), layers.Dense(64, dtype="mixed_float16"), layers.Dense(3)])
            sgd = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0**20)
            model.compile(sgd, loss())
        value = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
        return float(sgd.dynamic_scale), int(sgd.iterations), value, model.get_weights()

    expected, found = scaled(num_cores=1), scaled(num_cores=4, distribution="fsdp")
    assert expected[0] < 2.0**20
    assert expected[1] < 6
    assert found[:2] == expected[:2]
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-3)
    for weight, other in zip(found[3], expected[3], strict=True):
        np.testing.assert_allclose(weight, other, atol=1e-3)


def test_kept_programs_are_those_of_one_layout(tmp_path):
    def compiled_and_read(shape, axes):
        strategy = replica_engine.TPUStrategy(distribution=model_parallel({"table": axes}, shape))
        with strategy.scope():
            table = tf.Variable(tf.ones([8, 4]), name="table")
        before = xla.counts()
        assert float(strategy.run(lambda x: tf.reduce_sum(x @ table), args=(tf.ones([4, 8]),))) == 128.0
        made = xla.counts() - before
        return made.compiles, made.cache_hits

    xla.set_cache_dir(tmp_path)
    for shape, axes in (((2, 2), ("model",)), ((2, 2), (None, "model")), ((1, 4), ("model",))):
        assert compiled_and_read(shape, axes) == (1, 0)
    assert compiled_and_read((2, 2), (None, "model")) == (0, 1)
