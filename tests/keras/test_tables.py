"""Gradients of tables are those of one device, for rows that the samples look up and rows that positions look up.

Adam squares each row of a gradient, also where two are of one index. So a table of positions, which has one row for
each on one device, must not get one from each replica; and a table of words must.
"""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import compiled
from helpers.versions import KERAS
from keras import layers, ops

from replica_engine.keras import replicate_model
from replica_engine.values import table_rows

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 12, (16, 6)).astype("int32")
WORDS[4:8] = WORDS[:4]  # replicas with the same words are still two replicas
WORDS[12:] = WORDS[8:12]
SCORES = (RANDOM.normal(size=(16, 1)) * 3).astype("float32")
OFFSETS = np.arange(6)[:, None] - np.arange(6)[None] + 5  # of two places: 36 of 11 different ones

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.05),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.05),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.05),
    "Lion": lambda: keras.optimizers.Lion(0.01),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "clipped": lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.01),
    "averaged": lambda: keras.optimizers.Adam(0.05, use_ema=True, ema_overwrite_frequency=2),
    "accumulating": lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2),
}


class Embedding(layers.Layer):
    """Words and their places, as in the transformers of Keras' examples.

    With `repeats`, indices that are not the samples' are looked up for each sample, as one device does it too.
    """

    def __init__(self, is_shared=False, repeats=False):
        super().__init__()
        self.repeats = repeats
        self.words = layers.Embedding(12, 4)
        self.places = self.words if is_shared else layers.Embedding(6, 4)
        self.offsets, self.kinds = layers.Embedding(11, 4), layers.Embedding(6, 4)

    def build(self, shape):
        for table in dict.fromkeys([self.words, self.places, self.offsets, self.kinds]):
            table.build()

    def call(self, words):
        places = self.places(ops.arange(ops.shape(words)[-1]))
        if self.repeats:
            places = places + self.kinds(ops.zeros_like(words))
            places = places + self.kinds(ops.broadcast_to(ops.arange(ops.shape(words)[-1]), ops.shape(words)))
        if words.shape[-1] is not None:
            places = places + ops.mean(self.offsets(OFFSETS), 1)
        return self.words(words) + places


def model_of(optimizer="Adam", length=6, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((length,), dtype="int32"), Embedding(**options), layers.GlobalAveragePooling1D(), layers.Dense(1)]
    )
    model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def batches(size=8):
    return tf.data.Dataset.from_tensor_slices((WORDS, SCORES)).padded_batch(size)


QUICK = ("SGD", "Adafactor", "clipped", "accumulating")
"""With Adam, below, those that treat rows in ways of their own."""


@pytest.mark.on("mirrored")
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=() if name in QUICK else (pytest.mark.full("it treats rows as Adam or SGD does"),))
        for name in OPTIMIZERS
        if name != "Adam"
    ],
)
def test_of_all_optimizers(trains_alike, optimizer):
    trains_alike(lambda: model_of(optimizer, repeats=True), 2, WORDS, SCORES, batch_size=8, epochs=2)


@pytest.mark.parametrize(
    ("replicas", "size"), [(2, 8), (2, 7), (3, 2), pytest.param(3, 3, marks=pytest.mark.full("another number"))]
)
@pytest.mark.parametrize("is_shared", [False, True], ids=["two tables", "one table"])
def test_of_a_replicated_model(trains_alike, is_tpu, replicas, size, is_shared):
    """With uneven batches too, and with one sample or none for a replica; one table may be looked up in all ways."""
    options = {"is_shared": is_shared, "repeats": not is_tpu}
    trains_alike(lambda: model_of(**options), replicas, WORDS, SCORES, batch_size=size, epochs=2)


@pytest.mark.on("tpu")
@pytest.mark.parametrize("size", [8, 7])
def test_of_constants_that_are_repeated_for_each_sample(trains_alike, size):
    """To the table it is the same sum, also where the shares are not equal and the constants of two replicas differ."""
    trains_alike(lambda: model_of("SGD", repeats=True), 2, WORDS, SCORES, batch_size=size, epochs=2)


@pytest.mark.on("tpu")
@pytest.mark.parametrize("size", [12, 11])
def test_of_as_many_indices_as_samples(trains_alike, size):
    """A shard has six samples, and the table of offsets is looked up by six rows, which are not those of samples."""
    trains_alike(model_of, 2, WORDS, SCORES, batch_size=size, epochs=2)


@pytest.mark.parametrize("length", [6, None], ids=["known length", "unknown length"])
def test_of_a_model_in_a_scope(both, is_tpu, alike, length, agree):
    """Keras 3.16 traces the first step for its batch: what is repeated for a known number of samples is constant."""
    options = {"length": length, "repeats": not is_tpu and KERAS < (3, 16)}
    alone = model_of(**options)
    alone.run_eagerly = length is not None  # which saves the time to trace it; eagerly each batch has a known length
    with both(2).scope():
        model = model_of(**options)
    agree((alone, model), lambda each: each.fit(batches(), epochs=2, verbose=0).history)
    alike(model.get_weights(), alone.get_weights())


class Placed(layers.Layer):
    """Adds a row of a table to each of six columns."""

    def __init__(self):
        super().__init__()
        self.table = layers.Embedding(6, 1)

    def call(self, x):
        return x + ops.squeeze(self.table(ops.arange(6)), -1)


OTHERS = RANDOM.permutation(12)[:7]  # classes that stand for all others, the same for all samples


class Joined(layers.Layer):
    """Looks up indices of the samples and constant ones at once."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def build(self, shape):
        self.table = self.add_weight(shape=(12, 6), initializer=keras.initializers.RandomNormal(seed=4))
        self.bias = self.add_weight(shape=(12,), initializer="zeros")

    def call(self, words):
        hidden = ops.cast(words, "float32") / 12
        if self.how in ("sampled_softmax_loss", "nce_loss"):
            labels = tf.cast(words[:, :1], tf.int64)
            others = tf.constant(OTHERS, tf.int64), tf.fill(tf.shape(labels), 0.5), tf.fill([7], 0.5)
            loss = getattr(tf.nn, self.how)(self.table, self.bias, labels, hidden, 7, 12, sampled_values=others)
            return loss[:, None]
        first, second = words[:, 0], words[:, 1]
        count = ops.shape(words)[0]
        if self.how == "negative":
            own, shared = tf.split(self.rows(tf.concat([first - 12, OTHERS], 0)), [count, 7])
        elif self.how == "first":
            joined = tf.minimum(tf.concat([OTHERS, first], 0)[:, None] + 1, 11)
            shared, own = tf.split(self.rows(tf.squeeze(joined, 1)), [7, count])
        else:
            joined = tf.concat([OTHERS, tf.concat([second, OTHERS[:3], first], 0)], 0)
            shared, own, more, last = tf.split(self.rows(joined), [7, count, 3, count])
            shared, own = tf.concat([shared, more], 0), own * last
        return ops.sum(own * hidden, -1, keepdims=True) + ops.mean(shared)

    def rows(self, indices):
        return ops.take(self.table, indices, axis=0)


def joined_model(how, optimizer):
    keras.utils.set_random_seed(1)
    return compiled([keras.Input((6,), dtype="int32"), Joined(how)], optimizer(), "mse")


@pytest.mark.parametrize(
    ("how", "size", "optimizer"),
    [
        ("sampled_softmax_loss", 8, lambda: keras.optimizers.Adagrad(0.1)),
        ("sampled_softmax_loss", 7, lambda: keras.optimizers.SGD(0.1, clipnorm=0.1)),
        ("nce_loss", 8, lambda: keras.optimizers.Adam(0.05)),
        ("negative", 8, lambda: keras.optimizers.Adam(0.05, clipnorm=0.1)),
        ("first", 7, lambda: keras.optimizers.Adagrad(0.1)),
        ("nested", 8, lambda: keras.optimizers.RMSprop(0.05)),
    ],
)
def test_of_one_lookup_of_both_kinds_of_indices(trains_alike, how, size, optimizer):
    trains_alike(lambda: joined_model(how, optimizer), 2, WORDS, SCORES, batch_size=size, epochs=2)


@pytest.mark.parametrize("rows", [6, 8])
def test_of_as_many_positions_as_a_shard_has_samples(both, alike, rows):
    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = compiled([keras.Input((6,)), Placed(), layers.Dense(1)], keras.optimizers.Adam(0.05), "mse")
        data = tf.data.Dataset.from_tensor_slices((WORDS.astype("float32"), SCORES)).batch(
            2 * rows, drop_remainder=True
        )
        model.fit(data, epochs=3, verbose=0)
        return model.get_weights()

    alike(trained(both(2).scope()), trained(contextlib.nullcontext()))


@pytest.mark.on("mirrored")
def test_of_indices_from_a_variable_that_replicas_change(both):
    """Each replica reads another value: what is reduced is the same on all, and has the rows of all."""
    strategy = both(2)
    begin = tf.Variable(0)  # made outside the scope
    with strategy.scope():
        table = tf.Variable(tf.zeros([8, 1]))

    @tf.function
    def step():
        def in_replica():
            places = tf.range(2) + begin.assign_add(2, read_value=True) - 2
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, places))
            gradient = tape.gradient(loss, table)
            return tf.convert_to_tensor(tf.distribute.get_replica_context().all_reduce("SUM", gradient))

        return strategy.run(in_replica)

    for gradient in strategy.experimental_local_results(step()):
        np.testing.assert_array_equal(tf.squeeze(gradient), [1.0] * 4 + [0.0] * 4)


@pytest.mark.on("mirrored")
def test_of_an_eager_step(both, alike):
    """Which knows places as a run of indices that all replicas have."""

    def model():
        made = keras.Sequential([keras.Input((6,), dtype="int32"), Places(), layers.Flatten(), layers.Dense(1)])
        made.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=True)
        return made

    class Places(Embedding):
        def call(self, words):
            return self.words(words) + self.places(ops.arange(6))

    keras.utils.set_random_seed(1)
    alone = model()
    keras.utils.set_random_seed(1)
    others = model()
    alone.fit(batches(), verbose=0)
    replicate_model(others, strategy=both(2)).fit(batches(), verbose=0)
    alike(others.get_weights(), alone.get_weights())


def squares(rows):
    """What an optimizer makes of rows that it squares."""
    return 0.001 * tf.convert_to_tensor(tf.IndexedSlices(rows.values**2, rows.indices, rows.dense_shape))


@pytest.mark.parametrize("how", ["optimizer", "all_reduce", "merge_call"])
def test_of_a_loop_of_ones_own(both, alike, how):
    def trained(strategy):
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            words, places = tf.Variable(tf.ones([12, 2])), tf.Variable(tf.ones([6, 2]))
            optimizer = keras.optimizers.Adam(0.1)
            optimizer.build([words, places])

        def step(data):
            tokens, scores = data
            with tf.GradientTape() as tape:
                outputs = tf.gather(words, tokens) + tf.gather(places, tf.range(6))
                loss = tf.reduce_sum((tf.reduce_sum(outputs, [1, 2])[:, None] - scores) ** 2) / 8
            grads = tape.gradient(loss, [words, places])
            if how == "optimizer":
                optimizer.apply_gradients(zip(grads, [words, places], strict=True))
                return
            if strategy is None:
                for table, grad in zip([words, places], grads, strict=True):
                    updated(table, grad)
                return
            context = tf.distribute.get_replica_context()
            if how == "all_reduce":
                for table, grad in zip([words, places], context.all_reduce("SUM", grads), strict=True):
                    table.assign_sub(squares(grad))
                return
            context.merge_call(merged, args=(grads,))

        def merged(strategy, grads):
            reduced = strategy.extended.batch_reduce_to("SUM", list(zip(grads, [words, places], strict=True)))
            for table, grad in zip([words, places], reduced, strict=True):
                strategy.extended.update(table, updated, args=(grad,))

        def updated(table, grad):
            table.assign_sub(squares(grad))

        @tf.function
        def train(data):
            step(data) if strategy is None else strategy.run(step, args=(data,))

        data = batches() if strategy is None else strategy.experimental_distribute_dataset(batches())
        for batch in data:
            train(batch)
        return [words.numpy(), places.numpy()]

    alike(trained(both(2)), trained(None))


@pytest.mark.parametrize("kind", ["id", "random", "stateless"])
def test_rows_of_each_replica_stay_its_own(both, kind):
    """Indices that are not the batch's, and yet differ from replica to replica."""
    strategy = both(2)

    def indices(context):
        if kind == "id":
            return tf.range(3) + 3 * context.replica_id_in_sync_group
        if kind == "random":
            return tf.random.uniform([3], 0, 6, tf.int32)
        return tf.random.stateless_uniform([3], [1, context.replica_id_in_sync_group], 0, 6, tf.int32)

    def step():
        context = tf.distribute.get_replica_context()
        own = tf.IndexedSlices(tf.ones([3, 2]), indices(context), tf.constant([6, 2]))
        return tf.convert_to_tensor(own), tf.convert_to_tensor(context.all_reduce("SUM", own))

    own, total = (strategy.experimental_local_results(each) for each in tf.function(lambda: strategy.run(step))())
    for found in total:
        np.testing.assert_array_equal(found, sum(each.numpy() for each in own))


@pytest.mark.parametrize(
    ("indices", "left"),
    [
        ([0, 1, 0, 1, 0, 1], 2),
        ([0, 1, 0, 1, 0, 2], 4),
        ([0, 0, 0, 0, 0, 0], 2),
        ([0, 0, 0, 0, 0], 3),
        ([0, 1, 2, 3], 4),
        ([3, 3], 2),
        ([], 0),
    ],
    ids=["same", "one another", "unlike numbers by chance", "a rest", "all others", "less than replicas", "none"],
)
@pytest.mark.parametrize("is_static", [False, True])
def test_joined_rows_of_three_replicas_keep_their_sum_when_they_are_compared(indices, left, is_static):
    """Also if replicas have not brought as many: those who look at the joined rows cannot know."""
    size = len(indices)

    @tf.function(input_signature=[tf.TensorSpec([size if is_static else None], tf.int32)])
    def compared(indices):
        values = 1.0 + tf.range(tf.size(indices), dtype=tf.float32)[:, None]
        joined = tf.IndexedSlices(values, indices, tf.constant([4, 1]))
        found = table_rows.compared(joined, 3)
        return found.values, tf.convert_to_tensor(joined), tf.convert_to_tensor(found)

    values, expected, found = compared(tf.constant(indices, tf.int32))
    assert np.count_nonzero(values) == left
    np.testing.assert_allclose(found, expected)
