"""Words that are cut and padded on the host, before a table on the devices.

The shape of the padded words is found by trying the host ops with made-up texts. What is known is not made up.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy, logical_devices
from replica_engine.keras import replicate_model
from replica_engine.xla.soft_placement import unknown_shapes

TEXTS = tf.constant([["the cat"], ["dogs run here now a b c d e"]])
SIX, THREE = tf.constant(6), tf.constant([3.0])


def words(texts):
    return tf.strings.split(tf.reshape(texts, [-1]))


def ids(texts):
    return tf.strings.to_hash_bucket_fast(words(texts), 16)


def trimmed(rows):
    lengths = tf.minimum(rows.row_lengths(), 6)
    kept = tf.ragged.range(rows.row_starts(), rows.row_starts() + lengths).values
    return tf.RaggedTensor.from_row_lengths(tf.gather(rows.values, kept), lengths)


PADDED = {
    "first words": lambda texts: ids(texts)[:, :6].to_tensor(shape=(None, 6)),
    "last words": lambda texts: ids(texts)[:, -3:].to_tensor(shape=(None, 3)),
    "a captured number of words": lambda texts: ids(texts)[:, :SIX].to_tensor(shape=(None, 6)),
    "a cast number": lambda texts: ids(texts)[:, : tf.cast(THREE[0] * 2, tf.int64)].to_tensor(shape=(None, 6)),
    "a number from a shape": lambda texts: ids(texts)[:, : tf.shape(texts)[1] * 3].to_tensor(shape=(None, 3)),
    "characters": lambda texts: (
        tf.strings.unicode_decode(tf.reshape(texts, [-1]), "UTF-8")[:, 1:5].to_tensor(shape=(None, 4)) % 16
    ),
    "pairs": lambda texts: tf.strings.to_hash_bucket_fast(tf.strings.ngrams(words(texts), 2)[:, :3], 16).to_tensor(
        shape=(None, 3)
    ),
    "a word before and one after": lambda texts: tf.concat(
        [tf.ones([2, 1], tf.int64), ids(texts)[:, :4], tf.zeros([2, 1], tf.int64)], 1
    ).to_tensor(shape=(None, 6)),
    "by lengths": lambda texts: trimmed(ids(texts)).to_tensor(shape=(None, 6)),
}


@pytest.mark.parametrize("name", PADDED)
def test_before_a_table(name):
    """With a gradient of the table, for which the devices need the shape."""
    strategy = TPUStrategy(num_cores=1)
    table = tf.Variable(tf.reshape(tf.range(32.0), [16, 2]))

    def body(texts):
        padded = PADDED[name](texts)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, padded) ** 2, [1, 2])
        context = tf.distribute.get_replica_context()
        gradient = tf.convert_to_tensor(tape.gradient(loss, table))
        return context.all_reduce("sum", loss), context.all_reduce("sum", gradient)

    for found, expected in zip(strategy.run(body, args=(TEXTS,)), body(TEXTS), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


class Words(keras.layers.Layer):
    def call(self, text):
        return tf.ensure_shape(ids(text)[:, :6].to_tensor(shape=(None, 6)), (None, 6))

    def compute_output_spec(self, text):
        return keras.KerasTensor((None, 6), "int64")


def test_in_a_keras_model():
    def loss(strategy=None):
        keras.utils.set_random_seed(1)
        text = keras.Input((1,), dtype="string")
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(16, 4)(Words()(text)))
        model = keras.Model(text, keras.layers.Dense(1)(hidden))
        model.compile("sgd", "mse")
        used = model if strategy is None else replicate_model(model, strategy=strategy)
        rows = np.array([["the cat"], ["a"], ["dogs run here now"], ["b c"]])
        data = tf.data.Dataset.from_tensor_slices((rows, np.ones((4, 1), "float32"))).batch(4)
        return used.fit(data, epochs=2, verbose=0).history["loss"]

    expected = loss()
    for strategy in (TPUStrategy(num_cores=2), MirroredStrategy(logical_devices(2))):
        np.testing.assert_allclose(loss(strategy), expected, rtol=1e-4)


MODEL = tf.constant(np.arange(100, 400), tf.int64)  # captured as it is; smaller tensors become constants of the graph


@pytest.fixture
def tried(monkeypatch):
    """The op types that were tried, and with which inputs."""
    found = []
    run = unknown_shapes._run

    def recorded(op, columns, *args, **kwargs):
        found.append((op.type, columns))
        return run(op, columns, *args, **kwargs)

    monkeypatch.setattr(unknown_shapes, "_run", recorded)
    return found


def of_model(texts):
    """A tokenizer, in short: rows of its model by words, cut."""
    rows = tf.gather(tf.cast(MODEL, tf.int32), tf.cast(ids(texts), tf.int32))
    return tf.reduce_sum(rows[:, :6].to_tensor(shape=(None, 6)), 1)


def test_what_is_known_is_not_made_up(tried):
    strategy = TPUStrategy(num_cores=2)
    found = strategy.run(lambda x: tf.distribute.get_replica_context().all_reduce("sum", of_model(x)), args=(TEXTS,))
    np.testing.assert_array_equal(strategy.experimental_local_results(found)[0], 2 * of_model(TEXTS))
    models = [columns[0] for kind, columns in tried if kind == "GatherV2" and columns[0][0].shape == MODEL.shape]
    assert models
    for each in (each for column in models for each in column):
        np.testing.assert_array_equal(each, MODEL)


@pytest.mark.parametrize("model", ["an argument", "a variable"])
def test_kernels_of_other_libraries_get_no_made_up_numbers(tried, monkeypatch, model):
    """They may trust the numbers, and end the process. `GatherV2` stands for such an op here."""
    monkeypatch.delattr(tf.raw_ops, "GatherV2")
    strategy = TPUStrategy(num_cores=1)
    table = tf.Variable(MODEL)

    def body(texts, given):
        rows = tf.gather(given, tf.cast(ids(texts), tf.int32))
        return tf.reduce_sum(rows[:, :6].to_tensor(shape=(None, 6)), 1)

    run = body if model == "an argument" else lambda texts, _: body(texts, table + 0)
    np.testing.assert_array_equal(strategy.run(run, args=(TEXTS, MODEL)), body(TEXTS, MODEL))
    assert not any(kind == "GatherV2" and columns[0][0].shape == MODEL.shape for kind, columns in tried)
