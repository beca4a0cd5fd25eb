"""`keras.distribution.ModelParallel`: a transformer over a mesh of 2 x 2, and sizes that do not divide."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.divided import model_parallel
from keras import layers

import replica_engine
from replica_engine.strategies import device_variables

WORDS, WIDTH, LENGTH = 203, 32, 8  # 203 words over 2 devices: 102 and 101
X = np.random.default_rng(0).integers(0, WORDS, (20, LENGTH)).astype("int32")
Y = np.roll(X, -1, axis=1)

TENSOR_PARALLEL = {
    r".*tokens/embeddings": ("model", None),
    r".*places/embeddings": (None, "model"),
    r".*attention/(query|key|value)/kernel": (None, "model", None),
    r".*attention/(query|key|value)/bias": ("model", None),
    r".*attention/attention_output/kernel": ("model", None, None),
    r".*up/kernel": (None, "model"),
    r".*up/bias": ("model",),
    r".*up/output": ("batch", None, "model"),
    r".*down/kernel": ("model", None),
    r".*head/kernel": (None, "model"),
    r".*head/bias": ("model",),
}


class Transformer(keras.Model):
    """Causal language model of one block."""

    def __init__(self):
        super().__init__(name="net")
        self.tokens = layers.Embedding(WORDS, WIDTH, name="tokens")
        self.places = layers.Embedding(LENGTH, WIDTH, name="places")
        self.norms = [layers.LayerNormalization(name=f"norm{index}") for index in range(3)]
        self.attention = layers.MultiHeadAttention(4, WIDTH // 4, dropout=0.1, name="attention")
        self.up = layers.Dense(4 * WIDTH, activation="gelu", name="up")
        self.down = layers.Dense(WIDTH, name="down")
        self.head = layers.Dense(WORDS, name="head")

    def call(self, words, training=None):
        x = self.tokens(words) + self.places(keras.ops.arange(LENGTH))
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True, training=training)
        x = x + self.down(self.up(self.norms[1](x)))
        return self.head(self.norms[2](x))


def trained(**how):
    strategy = replica_engine.TPUStrategy(**how)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Transformer()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # A bias of keys changes nothing: its gradient is noise, of which Adam would make steps.
        model.compile(keras.optimizers.Adam(0.003, epsilon=1e-4, name="adam"), loss)
    losses = model.fit(X, Y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]  # the last has 4 samples
    return strategy, model, losses


@pytest.fixture(scope="module")
def one():
    return trained(num_cores=1)


@pytest.fixture(scope="module")
def divided():
    return trained(distribution=model_parallel(TENSOR_PARALLEL))


def test_numbers_are_those_of_one_device(one, divided):
    _, reference, expected = one
    strategy, model, losses = divided
    assert strategy.num_replicas_in_sync == 1
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    for variable, other in zip(model.variables, reference.variables, strict=True):
        assert variable.numpy().shape == other.numpy().shape
        np.testing.assert_allclose(variable.numpy(), other.numpy(), atol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), reference.predict(X, verbose=0), atol=1e-4)


def test_parts_of_a_size_that_does_not_divide_are_padded(divided):
    strategy, _, _ = divided
    rows = {row.path: row for row in strategy.layouts().rows}
    table = rows["net/tokens/embeddings"]
    assert table.bytes == 102 * WIDTH * 4
    assert table.whole == 203 * WIDTH * 4
    assert rows["adam/net_tokens_embeddings_velocity"].bytes == table.bytes


def test_outputs_of_a_layer_are_divided():
    x = tf.ones([4, 6])
    for key, is_divided in (("up/output", True), ("other/output", False)):
        strategy = replica_engine.TPUStrategy(distribution=model_parallel({key: ("batch", "model")}))
        with strategy.scope():
            up = layers.Dense(10, activation=keras.ops.sin, kernel_initializer="ones", name="up")
            up.build([None, 6])

        def step(x, up=up):
            return tf.reduce_sum(up(x) ** 2)

        np.testing.assert_allclose(strategy.run(step, args=(x,)), 40 * np.sin(6.0) ** 2, rtol=1e-6)
        assert ("f32[2,5]" in strategy.plan(step, (x,)).as_text()) == is_divided


@pytest.mark.parametrize(("rows", "parts"), [(13, 4), (3, 4), (1, 2)])
def test_assignments_and_reads_do_not_see_the_padding(rows, parts):
    strategy = replica_engine.TPUStrategy(distribution=model_parallel({"table": ("model",)}, (1, parts)))
    with strategy.scope():
        table = tf.Variable(tf.ones([rows, 2]), name="table")
    first = np.arange(2.0 * rows).reshape(rows, 2)
    table.assign(first)
    total = strategy.run(lambda: tf.reduce_sum(tf.exp(table)))  # not that of zeros behind it
    np.testing.assert_allclose(total, np.exp(first).sum(), rtol=1e-6)
    strategy.run(lambda: table.assign_add(tf.ones([rows, 2])))
    np.testing.assert_array_equal(table.numpy(), first + 1)
    table.assign_add(table.read_value())
    np.testing.assert_array_equal(strategy.run(lambda: table + 0.0), 2 * first + 2)
    assert strategy.memory().variables == [-(-rows // parts) * 8] * parts


def test_initial_values_are_made_in_parts_though_other_layouts_have_not_matched_yet(monkeypatch):
    made, own = [], device_variables.made
    monkeypatch.setattr(device_variables, "LARGE", 1)
    monkeypatch.setattr(device_variables, "made", lambda *args: made.append(own(*args)) or made[-1])
    distribution = model_parallel({"up/kernel": (None, "model"), "out/kernel": ("model",)})
    with replica_engine.TPUStrategy(distribution=distribution).scope():
        for layer in (layers.Dense(8, name="up"), layers.Dense(2, name="out")):
            layer.build([None, 8])
    assert [each is not None for each in made] == [True, True]


def test_fsdp_divides_a_long_dimension_that_does_not_divide_evenly():
    strategy = replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")
    with strategy.scope():
        made = [tf.Variable(tf.ones(shape)) for shape in ([203, 30], [30, 203], [30, 31], [12, 203])]
    assert [row.axes for row in strategy.layouts().rows] == [
        ("batch", None),
        (None, "batch"),
        (None, None),
        ("batch", None),
    ]
    for variable in made:
        assert float(strategy.run(lambda variable=variable: tf.reduce_sum(tf.exp(variable * 0.0)))) == np.prod(
            variable.shape
        )
