"""What XLA's partitioner divides wrongly: values and gradients are those of one device, in each layout and size."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.divided import model_parallel

import replica_engine
from replica_engine import xla

RANDOM = np.random.default_rng(0)


def rows(x):
    return tf.reshape(x, [-1, x.shape[-1]])


def ids(i):
    return tf.reshape(i, [-1])


def of_nan(x):
    """Ones, and NaN where a value is the first one."""
    apart = x - tf.stop_gradient(x[0, 0, 0])
    return apart / apart


# Each takes values (batch, 6, 4), indices (batch, 6) below 10, a table (10, 4) and a kernel (4, 4).
INDEXED = {
    "lookup": lambda x, i, table, kernel: tf.gather(table, i),
    "lookup of columns": lambda x, i, table, kernel: tf.gather(table, i % 4, axis=1),
    "lookup of elements": lambda x, i, table, kernel: tf.gather_nd(table, tf.stack([i, i % 4], -1)),
    "lookup of samples": lambda x, i, table, kernel: tf.gather(x, i[:, 0] % x.shape[0]),
    "sums of segments": lambda x, i, table, kernel: tf.math.unsorted_segment_sum(rows(x), ids(i), 10),
    "largest of segments": lambda x, i, table, kernel: tf.math.unsorted_segment_max(rows(x), ids(i), 10),
    "products of segments": lambda x, i, table, kernel: tf.math.unsorted_segment_prod(rows(x) / 3, ids(i), 10),
    "elements of samples": lambda x, i, table, kernel: tf.gather_nd(
        x,
        tf.stack(
            [tf.range(x.shape[0], dtype="int64"), tf.cast(i[:, 0] % 6, "int64"), tf.cast(i[:, 1] % 4, "int64")], 1
        ),
    ),
    "one element set": lambda x, i, table, kernel: tf.tensor_scatter_nd_update(table, [[2]], x[0, :1]),
    "counts": lambda x, i, table, kernel: tf.math.confusion_matrix(ids(i), ids(i)[::-1], 10, dtype=tf.float32),
}
OTHERS = {
    "largest": lambda x, i, table, kernel: tf.reduce_max(x, [0, 1]),
    "largest with NaN": lambda x, i, table, kernel: tf.reduce_max(x * of_nan(x), [0, 1]),
    "largest of each sample with NaN": lambda x, i, table, kernel: tf.reduce_max(x * of_nan(x), 1),
    "place of the largest": lambda x, i, table, kernel: tf.cast(tf.argmax(x, 1), "float32"),
    "convolution": lambda x, i, table, kernel: tf.nn.conv1d(x, tf.stack([kernel, kernel / 2]), 1, "SAME"),
    "in strides": lambda x, i, table, kernel: tf.nn.conv1d(x, tf.stack([kernel, kernel / 2]), 2, "SAME"),
    "image in strides": lambda x, i, table, kernel: tf.nn.conv2d(
        x[..., tf.newaxis], tf.reshape(kernel, [4, 4, 1, 1])[:3, :3], 2, "SAME"
    ),
    "largest of windows": lambda x, i, table, kernel: tf.nn.max_pool1d(x, 3, 1, "SAME"),
    "transform": lambda x, i, table, kernel: tf.abs(tf.signal.fft(tf.cast(x, "complex64"))),
    "transform along time": lambda x, i, table, kernel: tf.signal.irfft(
        tf.signal.rfft(tf.transpose(x, [0, 2, 1])) * 2.0
    ),
    "eigenvalues": lambda x, i, table, kernel: tf.linalg.eigvalsh(tf.stop_gradient(tf.matmul(x, x, transpose_a=True))),
    "last rows set": lambda x, i, table, kernel: keras.ops.slice_update(
        tf.stop_gradient(table), [9, 0], tf.stop_gradient(x[0, :2])
    ),
}
LAYOUTS = [None, (None, "batch", None), ("batch", None, None), (None, "batch", "model"), ("batch", "model", None)]


def on_one_axis():
    return replica_engine.TPUStrategy(num_cores=4, cores_per_replica=4, distribution="fsdp")


def on_two_axes(replicas=1):
    distribution = model_parallel({"table": ("model", None)})
    return replica_engine.TPUStrategy(num_cores=4 * replicas, distribution=distribution)


CASES = [
    pytest.param(on_one_axis, INDEXED, None, 5, id="one axis-indexed-odd"),
    pytest.param(on_one_axis, INDEXED, (None, "batch", None), 8, id="one axis-indexed-length"),
    pytest.param(on_one_axis, OTHERS, (None, "batch", None), 8, id="one axis-others-length"),
    *(
        pytest.param(on_two_axes, kinds, layout, batch, id=f"two axes-{name}-{layout}-{batch}")
        for name, kinds in (("indexed", INDEXED), ("others", OTHERS))
        for layout, batch in zip(LAYOUTS, (5, 8, 1, 8, 5), strict=True)
    ),
    pytest.param(lambda: on_two_axes(2), INDEXED, None, 5, id="replicas of two axes-indexed-odd"),
    pytest.param(lambda: on_two_axes(2), INDEXED, ("batch", None, "model"), 8, id="replicas of two axes-indexed-even"),
    pytest.param(lambda: on_two_axes(2), OTHERS, (None, "model", None), 8, id="replicas of two axes-others-length"),
]


@pytest.mark.parametrize(("make", "kinds", "layout", "batch"), CASES)
def test_values_and_gradients_are_those_of_one_device(make, kinds, layout, batch):
    """All in one program, which lists what differs."""
    values, table, kernel = (RANDOM.normal(size=shape).astype("float32") for shape in ((batch, 6, 4), (10, 4), (4, 4)))
    indices = RANDOM.integers(0, 10, (batch, 6), dtype=np.int32)

    def computed(x, i, *weights, lay_out=lambda x: x):
        found = {}
        for name, fn in kinds.items():
            given = [x, *map(tf.convert_to_tensor, weights)]
            with tf.GradientTape() as tape:
                tape.watch(given)
                value = fn(lay_out(given[0]), i, *given[1:])
                total = tf.reduce_sum(tf.sin(value))
            gradients = tape.gradient(total, given, unconnected_gradients="zero")
            found[name] = [value, *map(tf.convert_to_tensor, gradients)]
        return found

    expected = computed(tf.constant(values), tf.constant(indices), table, kernel)
    strategy = make()
    with strategy.scope():
        weights = tf.Variable(table, name="table"), tf.Variable(kernel, name="kernel")
    step = lambda x, i: computed(x, i, *weights, lay_out=lambda x: xla.constrain(x, layout) if layout else x)  # noqa: E731
    found = strategy.run(step, (tf.constant(values), tf.constant(indices)))
    found = tf.nest.map_structure(lambda each: strategy.experimental_local_results(each)[-1].numpy(), found)
    different = [
        name
        for name in kinds
        if not all(
            np.allclose(one, other, rtol=1e-4, atol=1e-4, equal_nan=True)
            for one, other in zip(expected[name], found[name], strict=True)
        )
    ]
    assert not different


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_a_row_is_set_at_an_index_cut_out_of_divided_ones(dtype):
    """They are fewer than the devices, and shapes are changed into themselves, which stops Shardy and not XLA."""

    def step(numbers, rows):
        index = tf.cast(xla.constrain(numbers, (None, "batch"))[:1, :1], dtype)
        return tf.tensor_scatter_nd_update(rows, index, rows[2:] * 2.0)

    strategy, table = on_one_axis(), tf.reshape(tf.range(6.0), [3, 2])
    (found,) = strategy.experimental_local_results(strategy.run(step, (tf.constant([[1, 0, 2]]), table)))
    np.testing.assert_array_equal(found, [[0, 1], [8, 10], [4, 5]])
