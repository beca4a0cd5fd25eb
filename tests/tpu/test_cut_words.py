"""Words that are cut and padded on the host, before a table on the devices.

The padded words have as many rows as there are texts: that follows from the ops, which are never tried.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy, logical_devices
from replica_engine.keras import replicate_model

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
