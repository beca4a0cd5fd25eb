"""Keras 3 under a strategy: fit, evaluate, predict and saving, as on one device."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import InputsError, ScopeError

FEATURES = np.random.default_rng(0).normal(size=(16, 4)).astype("float32")
LABELS = (FEATURES @ np.array([[1.0], [-2.0], [0.5], [3.0]], "float32")).astype("float32")


def model_of(*layers, optimizer=None, metrics=None, **compile_options):
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile(optimizer or keras.optimizers.SGD(0.05), "mse", metrics=metrics, **compile_options)
    return model


def dense(units, seed, **options):
    return keras.layers.Dense(units, kernel_initializer=keras.initializers.GlorotUniform(seed), **options)


def small(**options):
    return model_of(dense(4, 1, activation="tanh"), dense(1, 2), **options)


def batches(size=8, count=16):
    """Of arrays Keras would make a pipeline for each call, which takes long."""
    return tf.data.Dataset.from_tensor_slices((FEATURES[:count], LABELS[:count])).batch(size)


def fit(model, epochs=2):
    return model.fit(batches(), epochs=epochs, verbose=0, shuffle=False).history


@pytest.fixture(scope="module")
def alone():
    """What fit makes of the small model without a strategy: its history and weights. Eagerly, which takes less long."""
    model = small(optimizer=keras.optimizers.Adam(0.05), metrics=["mae"], run_eagerly=True)
    return fit(model), model.get_weights()


def components(strategy, variable):
    return [component.numpy() for component in strategy.experimental_local_results(variable.value)]


def assert_trained_alike(strategy, model, history, expected):
    """With the same global batch, unshuffled.

    The sum of a batch's gradients is added up in another order, so each step differs by a few units in the last
    place (6e-8 in float32). Four steps, and Adam's division by a root that may be small, leave it far below 1e-5.
    """
    expected_history, expected_weights = expected
    assert history.keys() == expected_history.keys() == {"loss", "mae"}
    for key in history:
        np.testing.assert_allclose(history[key], expected_history[key], rtol=1e-5)
    assert history["loss"][1] < history["loss"][0]
    for variable, weight in zip(model.trainable_variables, expected_weights, strict=True):
        first, *others = components(strategy, variable)
        np.testing.assert_allclose(first, weight, rtol=1e-5, atol=1e-6)
        assert len(others) == strategy.num_replicas_in_sync - 1
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_fit_equals_fit_on_one_device(strategy, alone):
    with strategy.scope():
        model = small(optimizer=keras.optimizers.Adam(0.05), metrics=["mae"])
    history = model.fit(FEATURES, LABELS, 8, 2, verbose=0, shuffle=False).history
    assert_trained_alike(strategy, model, history, alone)
    assert int(model.optimizer.iterations.numpy()) == 4


def generator():
    for _ in range(2):  # epochs
        yield from [(FEATURES[:8], LABELS[:8]), (FEATURES[8:], LABELS[8:])]


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return FEATURES[8 * index : 8 * index + 8], LABELS[8 * index : 8 * index + 8]


@pytest.mark.parametrize(("data", "steps"), [(generator, 2), (Sequence, None)])
@pytest.mark.replicas(2)
def test_fit_and_evaluate_take_generators_and_sequences(strategy, alone, data, steps):
    with strategy.scope():
        model = small(optimizer=keras.optimizers.Adam(0.05), metrics=["mae"], run_eagerly=True)
    history = model.fit(data(), epochs=2, steps_per_epoch=steps, verbose=0, shuffle=False).history
    assert_trained_alike(strategy, model, history, alone)
    loss, _ = model.evaluate(data(), steps=steps, verbose=0)
    np.testing.assert_allclose(loss, model.evaluate(batches(), verbose=0)[0], rtol=1e-5)


@pytest.mark.replicas(2)
def test_fit_that_runs_eagerly_equals_fit_on_one_device(strategy, alone):
    with strategy.scope():
        model = small(optimizer=keras.optimizers.Adam(0.05), metrics=["mae"], run_eagerly=True)
    assert_trained_alike(strategy, model, fit(model), alone)


@pytest.mark.graphs
@pytest.mark.replicas(2, 4)
def test_batches_of_any_size_train_as_on_one_device(strategy):
    """Of 7, 7 and 2 samples: two are fewer than four replicas."""
    one = small(optimizer=keras.optimizers.Adam(0.05), metrics=["mae"], run_eagerly=True)
    expected = one.fit(batches(7), epochs=2, verbose=0, shuffle=False).history, one.get_weights()
    with strategy.scope():
        model = small(optimizer=keras.optimizers.Adam(0.05), metrics=["mae"])
    history = model.fit(batches(7), epochs=2, verbose=0, shuffle=False).history
    assert_trained_alike(strategy, model, history, expected)
    for count in (1, 5):
        logs, alone = (each.test_on_batch(FEATURES[:count], LABELS[:count]) for each in (model, one))
        np.testing.assert_allclose(logs, alone, rtol=1e-4)
        np.testing.assert_allclose(
            model.predict_on_batch(FEATURES[:count]), one(FEATURES[:count]), rtol=1e-4, atol=1e-6
        )


@pytest.mark.graphs
@pytest.mark.replicas(4)
def test_a_dataset_that_the_user_distributed_trains_as_on_one_device(strategy):
    """TensorFlow deals 13 samples as 4, 4, 4 and 1, and 5 as 2, 2, 1 and 0; 8 are used as they are dealt."""

    def make(**options):
        return small(optimizer=keras.optimizers.Adam(0.05, global_clipnorm=0.5), metrics=["mae"], **options)

    data = batches(13, 13).concatenate(batches(5, 5)).concatenate(batches(8, 8))
    weighted = data.map(lambda x, y: (x, y, tf.abs(x[:, 0]) + 0.5))
    one = make(run_eagerly=True)
    expected = one.fit(weighted, epochs=2, verbose=0).history, one.get_weights()
    with strategy.scope():
        model = make()
    history = model.fit(strategy.experimental_distribute_dataset(weighted), epochs=2, verbose=0).history
    assert_trained_alike(strategy, model, history, expected)
    dealt = strategy.experimental_distribute_dataset(data)
    np.testing.assert_allclose(model.evaluate(dealt, verbose=0), one.evaluate(data, verbose=0), rtol=1e-5)
    dealt = strategy.experimental_distribute_dataset(data.map(lambda x, y: x))
    expected = [one(x) for x, _ in data]
    np.testing.assert_allclose(model.predict(dealt, verbose=0), np.concatenate(expected), rtol=1e-4, atol=1e-6)


class Summed(keras.Sequential):
    """A step that was written for `tf.distribute`: it divides by the batch of all, and gradients are summed."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self(x, training=True) - y) ** 2) / 8
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_a_train_step_of_ones_own_keeps_the_rule_of_tf_distribute(strategy):
    def make():
        model = Summed([keras.Input((4,)), dense(1, 1)])
        model.compile(keras.optimizers.SGD(0.02))
        return model

    one = make()
    one.run_eagerly = True
    losses = fit(one)["loss"]
    with strategy.scope():
        model = make()
    np.testing.assert_allclose(fit(model)["loss"], np.array(losses) / 2, rtol=1e-5)  # the mean of two halves
    for variable, weight in zip(model.trainable_variables, one.get_weights(), strict=True):
        for component in components(strategy, variable):
            np.testing.assert_allclose(component, weight, rtol=1e-5, atol=1e-6)


class Means(Summed):
    """A step that computes a mean over its samples, whose gradients an optimizer averages; it counts large labels."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss, "large": tf.reduce_sum(tf.cast(y > 0.5, tf.int32))}


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_a_step_of_ones_own_keeps_the_optimizer_that_it_was_given(strategy):
    one = Means([keras.Input((4,)), dense(1, 1)])
    one.compile(keras.optimizers.SGD(0.02), run_eagerly=True)
    fit(one)
    with strategy.scope():
        model = Means([keras.Input((4,)), dense(1, 1)])
        model.compile(replica_engine.keras.CrossReplicaOptimizer(keras.optimizers.SGD(0.02), "mean"))
    history = fit(model)
    for variable, weight in zip(model.trainable_variables, one.get_weights(), strict=True):
        for component in components(strategy, variable):
            np.testing.assert_allclose(component, weight, rtol=1e-5, atol=1e-6)
    counts = [(LABELS[:, 0] > 0.5)[part].sum() for part in (slice(8, 12), slice(12, 16))]
    assert history["large"][-1] == sum(counts) // 2  # the mean over replicas of the last batch, an integer


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_sum((y_pred - y) ** 2) / 8


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_a_compute_loss_of_ones_own_is_summed_in_all_steps(strategy):
    def make(**options):
        model = OwnLoss([keras.Input((4,)), dense(1, 1)])
        model.compile(keras.optimizers.SGD(0.02), **options)
        return model

    one = make(run_eagerly=True)
    expected = one.fit(batches(), verbose=0, shuffle=False, validation_data=batches()).history
    with strategy.scope():
        model = make()
    history = model.fit(batches(), verbose=0, shuffle=False, validation_data=batches()).history
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)
    # A batch that does not divide is computed whole, and plain Keras weighs losses by samples too.
    np.testing.assert_allclose(model.evaluate(batches(5), verbose=0), one.evaluate(batches(5), verbose=0), rtol=1e-5)


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_parts_of_two_sizes_are_dealt_apart(strategy):
    class TwoBatches(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = dense(1, 1)

        def call(self, inputs):
            return self.dense(inputs[0] if isinstance(inputs, tuple) else inputs)  # Keras builds it with both

        def train_step(self, data):
            (labelled, more), y = data
            loss = tf.reduce_mean((self(labelled) - y) ** 2) + tf.reduce_mean(self(more) ** 2)
            return {"loss": loss, "more": tf.cast(tf.shape(more)[0], tf.float32)}

    with strategy.scope():
        model = TwoBatches()
        model.build((None, 4))
        model.compile("sgd")
    data = tf.data.Dataset.zip(
        (tf.data.Dataset.from_tensor_slices(FEATURES).batch(4), tf.data.Dataset.from_tensor_slices(FEATURES).batch(8))
    )
    data = tf.data.Dataset.zip((data, tf.data.Dataset.from_tensor_slices(LABELS).batch(4)))
    assert model.fit(data, verbose=0).history["more"] == [4.0]


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_steps_of_two_threads_leave_no_hooks(strategy):
    with strategy.scope():
        model = small()
    optimizer = model.optimizer
    before = {*vars(optimizer)}
    predicted = []

    class Predicts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            thread = threading.Thread(target=lambda: predicted.append(model.predict(FEATURES, verbose=0)))
            thread.start()
            thread.join()

    model.fit(batches(), verbose=0, callbacks=[Predicts()])
    assert len(predicted) == 2
    assert not {"apply", "scale_loss"} & ({*vars(optimizer)} - before)


CLIPPED = {
    "each": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "all, decayed, averaged": lambda: keras.optimizers.AdamW(
        0.1, global_clipnorm=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "values": lambda: keras.optimizers.SGD(0.5, clipvalue=0.02),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5, clipnorm=0.05), 16.0),
    "scaled, across replicas": lambda: keras.optimizers.LossScaleOptimizer(
        replica_engine.keras.CrossReplicaOptimizer(keras.optimizers.SGD(0.5, clipnorm=0.05), "sum"), 16.0
    ),
}


@pytest.mark.graphs  # eagerly: the next test
@pytest.mark.replicas(2)
@pytest.mark.parametrize("name", CLIPPED)
def test_an_optimizer_clips_the_gradient_of_the_whole_batch(strategy, name):
    one = small(optimizer=CLIPPED[name](), metrics=["mae"], run_eagerly=True)
    expected = fit(one), one.get_weights()
    with strategy.scope():
        model = small(optimizer=CLIPPED[name](), metrics=["mae"])
    assert_trained_alike(strategy, model, fit(model), expected)


@pytest.mark.replicas(1, 2)
def test_a_loop_of_ones_own_clips_the_sum_of_the_gradients(strategy, n, per_replica):
    """Of a table each replica has another row."""
    with strategy.scope():
        table, weight = keras.Variable(np.ones([3, 2], "float32")), keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(1.0, global_clipnorm=0.5)

    def step(row, number):
        rows = tf.IndexedSlices(tf.reshape(number * tf.constant([3.0, 4.0]), [1, 2]), tf.reshape(row, [1]), [3, 2])
        optimizer.apply([rows, number * tf.constant([0.0, 12.0])], [table, weight])

    strategy.run(
        step, args=(per_replica(lambda replica: replica), per_replica(lambda replica: np.float32(replica + 1)))
    )
    of_table = np.array([[3.0, 4.0], [6.0, 8.0], [0.0, 0.0]]) * np.array([[1], [n == 2], [0]])
    of_weight = np.array([0.0, 12.0]) * n * (n + 1) / 2
    norm = np.sqrt((of_table**2).sum() + (of_weight**2).sum())
    for component in components(strategy, weight):
        np.testing.assert_allclose(component, [1.0, 2.0] - 0.5 / norm * of_weight, rtol=1e-5)
    for component in components(strategy, table):
        np.testing.assert_allclose(component, 1.0 - 0.5 / norm * of_table, rtol=1e-5)


@pytest.mark.graphs
@pytest.mark.replicas(4)
def test_evaluate_and_predict_take_every_example_once_and_in_order(strategy):
    """The last batch has 5 examples and divides unevenly; one of 4 replicas gets none."""
    alone = small(metrics=["mae"])
    x, y = FEATURES[:13], LABELS[:13]
    with strategy.scope():
        model = small(metrics=["mae"])
    np.testing.assert_allclose(model.predict(x, 8, verbose=0), alone(x), rtol=1e-5, atol=1e-6)
    results = model.evaluate(batches(8, 13), verbose=0, return_dict=True)
    assert results["mae"] == pytest.approx(np.mean(np.abs(alone(x) - y)), rel=1e-5)
    assert results["loss"] == pytest.approx(np.mean((alone(x) - y) ** 2), rel=1e-5)


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_an_only_batch_that_does_not_divide_is_evaluated(strategy):
    """Samples count, also those with weights, and validation does not end a `fit`."""
    x, y, weights = FEATURES[:7], LABELS[:7], np.arange(1.0, 8.0, dtype="float32")
    alone = small(metrics=["mae"], run_eagerly=True)
    expected = [alone.evaluate(x, y, 8, verbose=0), alone.evaluate(x, y, 8, sample_weight=weights, verbose=0)]
    with strategy.scope():
        model = small(metrics=["mae"])
    np.testing.assert_allclose(model.evaluate(x, y, 8, verbose=0), expected[0], rtol=1e-5)
    np.testing.assert_allclose(model.evaluate(x, y, 8, sample_weight=weights, verbose=0), expected[1], rtol=1e-5)
    history = model.fit(batches(), epochs=2, shuffle=False, validation_data=(x, y), verbose=0).history
    expected = alone.fit(batches(), epochs=2, shuffle=False, validation_data=(x, y), verbose=0).history
    np.testing.assert_allclose(history["val_loss"], expected["val_loss"], rtol=1e-4)


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_a_model_may_be_built_by_its_first_batch(strategy, n):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    losses = fit(model)["loss"]
    assert losses[1] < losses[0]
    assert [weight.shape for weight in model.get_weights()] == [(4, 1), (1,)]
    for variable in model.trainable_variables:
        first, *others = components(strategy, variable)
        assert len(others) == n - 1
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.graphs
@pytest.mark.replicas(2)
@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_normalization(strategy, n, synchronized):
    """Each replica keeps the statistics of its own part of the batch; synchronized, all those of the whole."""
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.0, synchronized=synchronized)
        model = model_of(layer)
    data = tf.data.Dataset.from_tensor_slices((FEATURES, FEATURES)).batch(16)
    model.fit(data, verbose=0, shuffle=False)
    parts = [FEATURES] * n if synchronized else np.split(FEATURES, n)
    expected = [(part.mean(0), part.var(0)) for part in parts]
    found = list(zip(components(strategy, layer.moving_mean), components(strategy, layer.moving_variance), strict=True))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_dropout_drops_on_every_replica(strategy):
    """In training half the inputs are dropped and the others doubled; in prediction none."""
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=1)
        model = model_of(layer)
    ones = np.ones((8, 4), "float32")
    outputs = strategy.run(lambda: layer(ones, training=True))
    for one in strategy.experimental_local_results(outputs):
        assert set(one.numpy().ravel()) == {0.0, 2.0}
    np.testing.assert_array_equal(model.predict(ones, 8, verbose=0), ones)


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_a_saved_model_loads_with_and_without_a_strategy(strategy, tmp_path):
    """Weights and the optimizer's state come along."""
    with strategy.scope():
        model = model_of(dense(1, 1), optimizer=keras.optimizers.Adam(0.05))
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    saved = [variable.numpy() for variable in (*model.trainable_variables, *model.optimizer.variables)]
    assert len(saved) == 2 + 6

    loaded = keras.models.load_model(tmp_path / "model.keras")
    with strategy.scope():
        distributed = keras.models.load_model(tmp_path / "model.keras")
    for other, n in ((loaded, 1), (distributed, strategy.num_replicas_in_sync)):
        variables = [*other.trainable_variables, *other.optimizer.variables]
        for variable, expected in zip(variables, saved, strict=True):
            found = components(strategy, variable)
            assert len(found) == n
            assert all(np.array_equal(component, expected) for component in found)


@pytest.mark.graphs
@pytest.mark.replicas(4)
def test_saved_weights_load_on_every_component(strategy, tmp_path):
    alone = small()
    alone.set_weights([weight + 1 for weight in alone.get_weights()])
    alone.save_weights(tmp_path / "w.weights.h5")
    with strategy.scope():
        model = small()
    model.load_weights(tmp_path / "w.weights.h5")
    for variable, expected in zip(model.trainable_variables, alone.get_weights(), strict=True):
        assert all(np.array_equal(component, expected) for component in components(strategy, variable))


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_an_optimizer_by_name_outside_the_scope_trains_as_one_inside(strategy, n):
    def history(compiles_inside):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense(4, 1, activation="tanh"), dense(1, 2)])
            if compiles_inside:
                model.compile("adam", "mse", metrics=["mae"])
        if not compiles_inside:
            model.compile("adam", "mse", metrics=["mae"])
        return fit(model, epochs=1), model.evaluate(batches(), verbose=0), model.get_weights(), model

    *inside, _ = history(compiles_inside=True)
    *outside, model = history(compiles_inside=False)
    for one, other in zip(tf.nest.flatten(inside), tf.nest.flatten(outside), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    for variable in [*model.optimizer.variables, *model.metrics[0].variables]:
        assert len(components(strategy, variable)) == n


@pytest.mark.replicas(2)
def test_an_optimizer_object_that_was_made_outside_the_scope_is_an_error_each_time(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), dense(1, 2)])
    model.compile(keras.optimizers.Adam(), "mse")
    for _ in range(2):
        with pytest.raises(ScopeError, match=r"optimizer 'adam\w*' was made outside `strategy.scope\(\)`"):
            fit(model)


@pytest.mark.replicas(2)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("is_built", [False, True])
def test_a_model_and_an_optimizer_outside_the_scope_are_one_error(strategy, in_graph, is_built):
    weight, optimizer = keras.Variable([1.0, 2.0], name="kernel"), keras.optimizers.Adam(name="adam")
    if is_built:
        optimizer.build([weight])

    def train():
        strategy.run(lambda: optimizer.apply([tf.ones([2])], [weight]))

    with pytest.raises(ScopeError, match=r"The variable '\S*' and the optimizer 'adam'"):
        tf.function(train, autograph=False)() if in_graph else train()


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_data_without_a_batch_is_an_error(strategy, method):
    with strategy.scope():
        model = small()
    weights = model.get_weights()
    with pytest.raises(InputsError, match="The data of `fit` or `evaluate` has no batch"):
        getattr(model, method)(batches(count=0), verbose=0)
    with pytest.raises(InputsError, match="The data of `fit` or `evaluate` has no batch"):
        getattr(model, method)(FEATURES[:0], LABELS[:0], verbose=0)
    assert all(np.array_equal(*both) for both in zip(weights, model.get_weights(), strict=True))
