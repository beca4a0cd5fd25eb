"""Rows of ragged batches in compiled bodies: for TensorFlow XLA would have to know the longest row."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla

ROWS = tf.ragged.constant([[1.0, 2.0], [3.0], [], [4.0, 5.0, 6.0], []])
NESTED = tf.ragged.constant([[[1.0, 2.0], [3.0]], [], [[4.0, 5.0, 6.0], []]])
TABLE = tf.reshape(tf.range(20.0), [10, 2])

BODIES = {
    "sum": lambda x: tf.reduce_sum(x, axis=1),
    "mean": lambda x: tf.reduce_mean(x, axis=1),
    "max": lambda x: tf.reduce_max(x, axis=-1, keepdims=True),
    "any": lambda x: tf.reduce_any(x > 2, axis=1),
    "std": lambda x: tf.math.reduce_std(x, axis=1),
    "value_rowids": lambda x: x.value_rowids(),
    "segment ids": lambda x: tf.ragged.row_splits_to_segment_ids(x.row_splits),
    "repeat": lambda x: tf.repeat(TABLE[:5], x.row_lengths(), axis=0) * x.values[:, None],
    "mean of rows of a table": lambda x: tf.reduce_mean(tf.gather(TABLE, tf.cast(x, tf.int32)), axis=1),
    "of other rows": lambda x: tf.reduce_sum(tf.RaggedTensor.from_row_lengths(x.values, x.row_lengths()[::-1]), axis=1),
    "in a branch": lambda x: tf.cond(x.values[0] > 0, lambda: tf.reduce_sum(x, 1), lambda: tf.reduce_max(x, 1)),
    "in a function": lambda x: tf.function(lambda y: tf.reduce_sum(y, axis=1))(x),
    "of a size that depends on data": lambda x: tf.reduce_sum(tf.ragged.boolean_mask(x, x > 2), axis=1),
    "of a slice": lambda x: tf.reduce_sum(x[:, 1:], axis=1),
}
OF_NESTED = {
    "inner": lambda x: tf.reduce_mean(x, axis=2).values,
    "outer": lambda x: tf.reduce_sum(x, axis=1).values,
    "both": lambda x: tf.reduce_mean(x, axis=[1, 2]),
    "rows of rows": lambda x: x.value_rowids(),
}


@pytest.fixture(scope="module")
def compiled():
    return TPUStrategy(num_cores=1)


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        *(pytest.param(body, ROWS, id=name) for name, body in BODIES.items()),
        *(pytest.param(body, NESTED, id=name) for name, body in OF_NESTED.items()),
    ],
)
def test_along_rows(compiled, body, rows):
    @tf.function(input_signature=[tf.RaggedTensorSpec([None] * rows.shape.rank, tf.float32, rows.ragged_rank)])
    def run(x):
        return compiled.run(body, args=(x,))

    np.testing.assert_allclose(run(rows), body(rows), rtol=1e-6)


def test_of_unlike_parts_of_a_batch():
    """One program serves all splits of as many values: also those of other replicas, and of other batches."""
    two = TPUStrategy(num_cores=2)

    def step(x):
        return tf.reduce_sum(x, axis=1), tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(x, axis=1))

    run = tf.function(lambda x: two.run(step, args=(x,)))
    batches = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7], [8, 9], [10, 11, 12], []])
    dataset = tf.data.Dataset.from_tensor_slices(tf.cast(batches, tf.float32)).batch(4)
    found = [two.experimental_local_results(run(x)[1])[1].numpy() for x in two.experimental_distribute_dataset(dataset)]
    np.testing.assert_array_equal(found, [[3, 18], [7 + 33, 17]])


def test_of_gradients(compiled):
    def gradient(table, x):
        with tf.GradientTape() as tape:
            tape.watch(table)
            found = tf.reduce_mean(tf.gather(table, tf.cast(x, tf.int32)), axis=1)
            loss = tf.reduce_sum(tf.where(tf.math.is_nan(found), 0.0, found) ** 2)
        return tf.convert_to_tensor(tape.gradient(loss, table))

    rows = ROWS[:2]
    np.testing.assert_allclose(compiled.run(gradient, args=(TABLE, rows)), gradient(TABLE, rows), rtol=1e-6)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("rows", [[[1.0, 2.0], [3.0]], [[], [4.0]], [[1.0], [2.0, 3.0, 4.0]]])
def test_of_replicate(rows, in_function):
    rows = tf.ragged.constant(rows, dtype=tf.float32)
    run = lambda: xla.replicate(lambda x: tf.reduce_sum(x, axis=1), [[rows], [rows * 2.0]])  # noqa: E731
    first, second = tf.function(run)() if in_function else run()
    np.testing.assert_allclose(first, tf.reduce_sum(rows, axis=1))
    np.testing.assert_allclose(second, tf.reduce_sum(rows, axis=1) * 2.0)
