"""Lookups of sparse and ragged ids: the error says what depends on data, and the function that it advises is right."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy
from replica_engine.errors import LoweringError

IDS = tf.sparse.from_dense([[1, 2, 0], [3, 0, 0]])


@pytest.fixture(scope="module")
def table():
    return tf.Variable(tf.reshape(tf.range(20.0), [10, 2]))


def looked_up(table, ids):
    return tf.nn.safe_embedding_lookup_sparse(table, ids, combiner="sum")


def gradient(table, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(looked_up(table, ids) ** 2)
    return tape.gradient(loss, table)


BODIES = {"looked up": looked_up, "gradient": gradient}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("in_function", [False, True])
def test_the_text_says_sparse(two, table, name, in_function):
    run = lambda ids: two.strategy.run(lambda each: BODIES[name](table, each), args=(ids,))  # noqa: E731
    with pytest.raises(LoweringError, match=r"args\[0\] of `lambda` is a sparse tensor.*test_sparse_arguments.py:\d+"):
        (tf.function(run) if in_function else run)(IDS)


def test_what_it_advises():
    table = tf.Variable(tf.reshape(tf.range(20.0), [10, 2]))

    def of_padded(ids):
        ids = tf.sparse.to_dense(ids)
        mask = tf.cast(ids > 0, tf.float32)
        with tf.GradientTape() as tape:
            found = tf.reduce_sum(tf.gather(table, ids) * mask[..., None], axis=1)
            loss = tf.reduce_sum(found**2)
        return found, tf.convert_to_tensor(tape.gradient(loss, table))

    found, slope = TPUStrategy(num_cores=1).run(of_padded, args=(IDS,))
    np.testing.assert_allclose(found, looked_up(table, IDS))
    np.testing.assert_allclose(slope, tf.convert_to_tensor(gradient(table, IDS)))


RAGGED = tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)
LOOKUPS = {
    "ragged": (tf.nn.embedding_lookup_sparse, RAGGED),
    "ragged, safe": (tf.nn.safe_embedding_lookup_sparse, RAGGED),
    "sparse": (tf.nn.embedding_lookup_sparse, IDS),
    "sparse in the body": (
        lambda table, ids, weights, combiner: tf.nn.embedding_lookup_sparse(
            table, tf.sparse.from_dense(ids), weights, combiner=combiner
        ),
        tf.sparse.to_dense(IDS),
    ),
    "sparse in the body, safe": (
        lambda table, ids, weights, combiner: tf.nn.safe_embedding_lookup_sparse(
            table, tf.sparse.from_dense(ids), weights, combiner=combiner
        ),
        tf.sparse.to_dense(IDS),
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_the_text_says_what_to_look_up(table, name):
    look_up, ids = LOOKUPS[name]

    def slope(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up(table, ids, None, combiner="sum") ** 2)
        return tf.convert_to_tensor(tape.gradient(loss, table))

    pattern = (
        r"(?s)test_sparse_arguments.py:\d+.*number of different ids.*tf.gather\(table, ids\), axis=1\) for a ragged"
    )
    with pytest.raises(LoweringError, match=pattern):
        TPUStrategy(num_cores=1).run(slope, args=(ids,))


@pytest.mark.parametrize("rows", [[[1, 2], [3]], [[4, 4, 5], [], [1]], [[], [9]]])
def test_what_it_advises_for_ragged_ids(table, rows):
    ids = tf.ragged.constant(rows, dtype=tf.int64)

    def slope(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.reduce_sum(tf.gather(table, ids), axis=1) ** 2)
        return tf.convert_to_tensor(tape.gradient(loss, table))

    found = TPUStrategy(num_cores=1).run(slope, args=(ids,))
    np.testing.assert_allclose(found, tf.convert_to_tensor(gradient(table, ids.to_sparse())))
