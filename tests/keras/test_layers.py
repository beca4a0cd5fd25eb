"""Layers of all kinds train as on one device: masks, recurrence, attention, normalization, dropout, precision."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from replica_engine import MirroredStrategy
from replica_engine.keras import replicate_model

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(18, 4)).astype("float32")
Y = RANDOM.integers(0, 3, size=18)
IMAGES = RANDOM.normal(size=(18, 4, 4, 1)).astype("float32")
LENGTHS = RANDOM.integers(1, 4, size=18)
WORDS = np.where(np.arange(3) < LENGTHS[:, None], RANDOM.integers(1, 20, size=(18, 3)), 0)  # padded with 0


def compiled(model, optimizer=None, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **options)
    return model


def stack(shape, *parts, **options):
    return compiled(keras.Sequential([keras.Input(shape), *parts]), **options)


def transformer():
    inputs = keras.Input((3,), dtype="int32")
    table = layers.Embedding(20, 6, mask_zero=True)(inputs)
    attended = layers.MultiHeadAttention(2, 3)(table, table)
    hidden = layers.LayerNormalization()(layers.Add()([table, attended]))
    return compiled(keras.Model(inputs, layers.Dense(3)(hidden)), metrics=["accuracy"])


def convolutional():
    parts = [
        layers.Conv2D(3, 3, padding="same"),
        layers.BatchNormalization(momentum=0.5, synchronized=True),
        layers.ReLU(),
        layers.MaxPooling2D(),
        layers.DepthwiseConv2D(2, padding="same"),
        layers.Flatten(),
        layers.Dense(3),
    ]
    return stack((4, 4, 1), *parts)


# Batches of 9 have 5 and 4 samples for 2 replicas.


@pytest.mark.on("mirrored")
def test_attention_with_a_mask_and_a_masked_loss_that_counts_each_word_the_same(trains_alike):
    """The replicas have different numbers of words."""
    trains_alike(transformer, 2, WORDS, WORDS % 3, batch_size=9, validation_data=(WORDS[:8], WORDS[:8] % 3))


@pytest.mark.on("tpu")
def test_recurrence_with_a_mask(trains_alike):
    def make():
        parts = [layers.Embedding(20, 6, mask_zero=True), layers.LSTM(3, return_sequences=True), layers.Dense(3)]
        return compiled(keras.Sequential([keras.Input((3,), dtype="int32"), *parts]))

    trains_alike(make, 2, WORDS, WORDS % 3, batch_size=9)


@pytest.mark.on("mirrored")
def test_convolutions_and_a_batch_normalization_with_the_statistics_of_the_whole_batch(trains_alike):
    trains_alike(convolutional, 2, IMAGES, Y, batch_size=9)


def normalized(**options):
    return stack((4,), layers.Dense(4), layers.BatchNormalization(momentum=0.5, **options), layers.Dense(3))


@pytest.fixture(scope="module")
def two(make_pair):
    """With a plain batch normalization."""
    return make_pair(normalized, 2)


def test_a_batch_normalization_has_one_moving_mean_after_training(pair, batched, alike):
    """Each replica normalizes with the statistics of its share; what they keep is the mean of those."""
    model, replicated = pair.original, pair.replicated
    hidden, layer = model.layers[0](X[:8]).numpy(), model.layers[1]
    last = batched(8, X[:8], Y[:8])
    replicated.train_on_batch(X[:8], Y[:8])
    alike(layer.moving_mean.numpy(), 0.5 * (hidden[:4].mean(0) + hidden[4:].mean(0)) / 2)
    alike(layer.moving_variance.numpy(), 0.5 + 0.5 * (hidden[:4].var(0) + hidden[4:].var(0)) / 2)
    alike(replicated.evaluate(last, verbose=0), float(model.loss(Y[:8], model(X[:8]))))
    alike(replicated.predict(X[:8], verbose=0), model(X[:8]).numpy())


@pytest.mark.on("mirrored")
def test_a_batch_normalization_keeps_finite_statistics_on_small_and_uneven_batches(pair):
    for count in (9, 1):
        pair.replicated.train_on_batch(X[:count], Y[:count])
        assert all(np.isfinite(weight).all() for weight in pair.original.get_weights())


@pytest.mark.on("mirrored", rest="tpu")
def test_dropout_drops_while_training_only_and_the_same_for_the_same_seed(both):
    ones, weights = np.ones((2, 50), "float32"), np.linspace(1.0, 2.0, 50, dtype="float32")[None].repeat(2, 0)

    def losses(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5)])
        model.compile(keras.optimizers.SGD(0.0), lambda y, x: tf.reduce_sum(x * y, -1))
        model = replicate_model(model, strategy=both(2))
        found = []
        for _ in range(3):
            model.reset_metrics()
            found.append(float(model.train_on_batch(ones, weights)))
        return found, model

    (first, model), (again, _), (other, _) = losses(1), losses(1), losses(2)
    assert np.array_equal(model.predict(ones, verbose=0), ones)
    assert len(set(first)) == 3
    assert first == again
    assert first != other


def test_replicas_drop_different_units(both):
    """Of a batch of two equal samples each replica has one, and their gradients with respect to the bias differ."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), layers.Dense(60), layers.Dropout(0.5)])
    model.compile(keras.optimizers.SGD(1.0), lambda y, x: tf.reduce_sum(x, -1))
    bias = model.layers[0].bias
    replicate_model(model, strategy=both(2)).train_on_batch(np.ones((2, 1)), np.ones((2, 1)))
    # Kept by none, by one and by both: a kept unit has a gradient of 2, and each replica counts half.
    assert set(np.round(bias.numpy(), 3).tolist()) == {0.0, -1.0, -2.0}


@pytest.mark.on("tpu")
def test_regularizers_constraints_and_penalties_count_as_on_one_device(trains_alike):
    class Penalty(layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * tf.reduce_mean(x**2))
            return x

    def make():
        options = {"kernel_regularizer": "l2", "activity_regularizer": "l1", "activation": "tanh"}
        bounded = layers.Dense(3, kernel_constraint=keras.constraints.MaxNorm(0.4))
        return stack((4,), layers.Dense(5, **options), Penalty(), bounded)

    _, model, _ = trains_alike(make, 2, X, Y, batch_size=9, validation_data=(X[:8], Y[:8]))
    assert np.linalg.norm(model.layers[-1].kernel.numpy(), axis=0).max() <= 0.4 + 1e-5


@pytest.fixture
def trains_mixed(trains_alike):
    """bfloat16 has 8 bits and float16 11, so sums of shares differ in the third digit. Losses of float16 are scaled."""
    return lambda policy: _trains_mixed(trains_alike, policy)


def _trains_mixed(trains_alike, policy):

    def make():
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**10)
        optimizer = scaled if policy == "mixed_float16" else keras.optimizers.SGD(0.1)
        parts = [layers.Dense(5, "tanh", dtype=policy), layers.Dense(3, dtype=policy)]
        return stack((4,), *parts, layers.Activation("linear", dtype="float32"), optimizer=optimizer)

    _, model, history = trains_alike(make, 2, X, Y, close={"rtol": 0.05, "atol": 0.01}, batch_size=9, epochs=2)
    assert history["loss"][1] < history["loss"][0]
    assert {weight.dtype.name for weight in model.get_weights()} == {"float32"}
    assert model.layers[0].compute_dtype == policy.removeprefix("mixed_")


@pytest.mark.on("tpu")
def test_mixed_precision_with_bfloat16_trains(trains_mixed):
    trains_mixed("mixed_bfloat16")


@pytest.mark.on("mirrored")
def test_mixed_precision_with_float16_trains(trains_mixed):
    trains_mixed("mixed_float16")


def test_a_loss_scale_is_halved_when_gradients_overflow(both):
    """On all replicas in the same step, though only one replica's samples are large; no weight changes."""
    keras.utils.set_random_seed(1)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**10)
    model = stack((4,), layers.Dense(3), optimizer=optimizer)
    replicated = replicate_model(model, strategy=both(2))
    before = model.get_weights()
    x = X[:4].copy()
    x[3] = np.inf
    replicated.train_on_batch(x, Y[:4])
    assert all(np.array_equal(one, other) for one, other in zip(model.get_weights(), before, strict=True))
    assert float(optimizer.dynamic_scale.numpy()) == 2.0**9
    replicated.train_on_batch(X[:4], Y[:4])
    assert not np.array_equal(model.get_weights()[0], before[0])


@pytest.mark.on("tpu")  # on threads: test_tables_of_words_are_built_without_being_called in test_whole_batches.py
def test_text_goes_into_a_model_that_looks_it_up(trains_alike):
    """Words that are split and looked up, and letters that are looked up."""
    words = np.array(["a b", "b c", "c", "a a a", "", "d"] * 3)
    letters = np.array([word[:1] for word in words])[:, None]
    batches = tf.data.Dataset.from_tensor_slices(((words, letters), np.arange(18.0))).batch(9)

    def make():
        text, letter = keras.Input((), dtype="string"), keras.Input((1,), dtype="string")
        vocabulary = ["a", "b", "c"]
        split = layers.TextVectorization(output_sequence_length=3, vocabulary=vocabulary)(text)
        found = [split, layers.StringLookup(vocabulary=vocabulary)(letter)]
        pooled = [layers.GlobalAveragePooling1D()(layers.Embedding(8, 4)(indices)) for indices in found]
        model = keras.Model([text, letter], layers.Dense(1)(layers.Concatenate()(pooled)))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    alone, replicated, _ = trains_alike(make, 2, batches)
    expected = alone([tf.constant(words), tf.constant(letters)])
    np.testing.assert_allclose(replicated.predict(batches, verbose=0), expected, rtol=1e-4, atol=1e-6)


def test_a_class_of_the_users_own_may_have_a_table_of_words():
    """The table inside TextVectorization says that it is not built, although the model has been called."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.split = layers.TextVectorization(output_sequence_length=3, vocabulary=["a", "b"])
            self.embedding, self.dense = layers.Embedding(4, 3), layers.Dense(1)

        def call(self, x):
            return self.dense(keras.ops.mean(self.embedding(self.split(x)), axis=1))

    texts, labels = tf.constant([["a b"], ["b"], ["z"]]), np.ones((3, 1))
    weights = []
    for replicas in (None, 2):
        keras.utils.set_random_seed(0)
        model = Model()
        model(texts)
        model.compile("sgd", "mse")
        trained = model if replicas is None else replicate_model(model, replicas)
        trained.fit(texts, labels, batch_size=3, epochs=2, verbose=0)
        weights.append(model.get_weights())
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def with_an_added_loss():
    """Replicas meet in the normalization, between the loss that the first layer adds and the sum of all losses."""
    parts = [
        layers.Dense(3, activity_regularizer=keras.regularizers.L2(0.1)),
        layers.BatchNormalization(synchronized=True),
    ]
    return stack((4,), *parts, layers.Dense(3))


@pytest.mark.on("tpu", rest="mirrored")
def test_losses_that_layers_add_are_those_of_each_replica(trains_alike):
    trains_alike(with_an_added_loss, 2, X, Y, batch_size=9)


@pytest.mark.on("mirrored")
def test_losses_that_layers_add_in_a_scope():
    """As with one device, and not the loss of the replica that called last, twice."""
    data = tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(8)
    weights = []
    for scope in (contextlib.nullcontext(), MirroredStrategy(["CPU:0", "CPU:1"]).scope()):
        keras.utils.set_random_seed(0)
        with scope:
            model = with_an_added_loss()
        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history
        weights.append([history["loss"], *model.get_weights()])
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.on("mirrored")
def test_losses_that_layers_added_can_be_read_after_a_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = with_an_added_loss()
    strategy.run(lambda: model(X[:4]))
    assert len(model.losses) == 1
    assert float(model.losses[0]) > 0


def synchronized(**options):
    return layers.BatchNormalization(momentum=0.5, synchronized=True, **options)


class WithMask(layers.Layer):
    """Gives its normalization a mask of its own."""

    def __init__(self):
        super().__init__()
        self.inner = synchronized()

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x, training=None):
        return self.inner(x, training=training, mask=tf.reduce_sum(x, -1) > 0)


MASKED = {
    "Masking": lambda: [keras.Input((5, 2)), layers.Masking(0.0), synchronized()],
    "Embedding": lambda: [keras.Input((5,), dtype="int32"), layers.Embedding(6, 3, mask_zero=True), synchronized()],
    "a mask of one's own": lambda: [keras.Input((5, 2)), WithMask()],
    "without scale": lambda: [keras.Input((5, 2)), layers.Masking(0.0), synchronized(scale=False, center=False)],
    "two of them": lambda: [keras.Input((5, 2)), layers.Masking(0.0), synchronized(), layers.Dense(3), synchronized()],
}


IN_OTHERS = dict.fromkeys(("Masking", "without scale"), pytest.mark.full("as two of them"))


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=IN_OTHERS.get(kind, ())) for kind in MASKED])
def test_a_synchronized_normalization_is_so_with_a_mask(trains_alike, kind):
    """Also where replicas see unlike numbers of samples."""
    random = np.random.default_rng(0)
    x = random.normal(size=(14, 5, 2)).astype("float32")
    x[:4] *= 5
    x[4:8, 2:] = 0
    if kind == "Embedding":
        x = random.integers(0, 6, (14, 5)) * (np.arange(14)[:, None] > 6)
        x[:, 0] = 1

    def make():
        model = keras.Sequential([*MASKED[kind](), layers.Dense(1), layers.GlobalAveragePooling1D()])
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    trains_alike(make, 2, x, random.normal(size=(14, 1)).astype("float32"), batch_size=8)


def test_a_synchronized_normalization_of_a_single_row(trains_alike):
    """One device has a gradient of exactly 0 before it. Adam would make whole steps of the rounding of a sum."""

    def make():
        parts = [layers.Dense(3), synchronized(), layers.Dense(3)]
        return stack((4,), *parts, optimizer=keras.optimizers.Adam(0.01))

    trains_alike(make, 4, X[:1], Y[:1], close={"rtol": 0, "atol": 1e-6})


@pytest.mark.on("mirrored")
def test_a_masked_normalization_in_a_scope(both, alike):
    layer = synchronized()
    layer.build((None, 3, 2))
    x = np.random.default_rng(0).normal(size=(4, 3, 2)).astype("float32") * np.arange(1, 5)[:, None, None]
    mask = np.arange(12).reshape(4, 3) % 5 > 0
    expected = layer(x, training=True, mask=mask).numpy()
    strategy = both(2)
    with strategy.scope():
        divided = synchronized()
        divided.build((None, 3, 2))
    parts = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(x[2 * context.replica_id_in_sync_group :][:2])
    )
    masks = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(mask[2 * context.replica_id_in_sync_group :][:2])
    )
    found = strategy.run(lambda x, mask: divided(x, training=True, mask=mask), args=(parts, masks))
    alike(np.concatenate([each.numpy() for each in strategy.experimental_local_results(found)]), expected)
    alike(divided.moving_variance.numpy(), layer.moving_variance.numpy())
