"""Every dtype that XLA has goes in, comes out, is captured and kept in variables: the same bits, the same width."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.dtypes import EVERY, FLOATS, NARROW, NUMBERS, WITHOUT_VARIABLES, dtype_of

from replica_engine import xla
from replica_engine.pjrt import worker_exchange


def array(name, *values):
    return np.array(values).astype(dtype_of(name).as_numpy_dtype)


def check(results, name, *expected):
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == dtype_of(name)
        got, wanted = result.numpy(), np.asarray(value)
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert got.tobytes() == wanted.tobytes()


class TestEveryDtype:
    """All in one program."""

    def test_goes_in_and_comes_out(self):
        """As a vector, as a scalar and of no elements; a vector is an array, or a tensor."""
        parts = [(array(name, 0, 1, 1, 0, 1), array(name, 1, 1, 0, 0, 1)) for name in EVERY]
        inputs = [
            [[part, tf.constant(part[0]), part[:0].reshape(0, 2), tf.constant(part)] for part in of_replica]
            for of_replica in zip(*parts, strict=True)
        ]
        found = zip(*xla.replicate(lambda *x: x, inputs), strict=True)
        for name, (first, second), of_dtype in zip(EVERY, parts, found, strict=True):
            vectors, scalars, empties, tensors = zip(*of_dtype, strict=True)
            check(vectors, name, first, second)
            check(scalars, name, first[0], second[0])
            check(empties, name, *[first[:0].reshape(0, 2)] * 2)
            check(tensors, name, first, second)

    def test_has_the_name_that_programs_of_workers_give_it(self):
        values = [array(name, 1) for name in EVERY]
        text = xla.lower(lambda *x: x, [values]).as_text()
        kinds = [f"tensor<1x{worker_exchange.element_name(value.dtype)}>" for value in values]
        assert [kind for kind in kinds if kind not in text] == []

    def test_is_captured_and_compiled_in(self):
        values = [array(name, 1, 0, 1) for name in EVERY]
        outside = [tf.constant(value) for value in values]
        results = xla.replicate(lambda: [*outside, *map(tf.constant, values)], num_replicas=2)
        for name, value, column in zip(EVERY * 2, values * 2, zip(*results, strict=True), strict=True):
            check(column, name, value, value)

    def test_inside_a_function(self):
        pairs = [(array(name, 0, 1, 1), array(name, 1, 1, 0)) for name in EVERY]
        # Scalars are cut here: TensorFlow's own slices lack some of the dtypes.
        inputs = [[[tf.constant(part), tf.constant(part[0])] for part in of] for of in zip(*pairs, strict=True)]
        found = zip(*tf.function(lambda parts: xla.replicate(lambda *x: x, parts))(inputs), strict=True)
        for name, (first, second), of_dtype in zip(EVERY, pairs, found, strict=True):
            vectors, scalars = zip(*of_dtype, strict=True)
            check(vectors, name, first, second)
            check(scalars, name, first[0], second[0])


def test_numbers_are_computed_in_their_own_dtype():
    inputs = [[array(name, 1, 2, 3) for name in NUMBERS], [array(name, 2, 4, 6) for name in NUMBERS]]
    found = zip(*xla.replicate(lambda *numbers: [x * x + x for x in numbers], inputs), strict=True)
    for name, of_dtype in zip(NUMBERS, found, strict=True):
        check(of_dtype, name, array(name, 2, 6, 12), array(name, 6, 20, 42))


def test_narrow_numbers_are_cast():
    inputs = [[array(name, 1, 2, 3) for name in NARROW]] * 2
    found = xla.replicate(lambda *xs: [tf.cast(tf.cast(x, tf.float32) * 2.0, x.dtype) for x in xs], inputs)
    for name, of_dtype in zip(NARROW, zip(*found, strict=True), strict=True):
        check(of_dtype, name, array(name, 2, 4, 6), array(name, 2, 4, 6))


def test_integers_of_64_bits_keep_their_width():
    x = np.int64(2**62)
    check(xla.replicate(lambda x: x + 1, [[x], [-x]]), "int64", np.int64(2**62 + 1), np.int64(-(2**62) + 1))
    most = np.uint64(2**64 - 1)
    check(xla.replicate(lambda x: x, [[most], [most - np.uint64(1)]]), "uint64", most, most - np.uint64(1))


def test_floats_of_64_bits_keep_their_width():
    x = np.float64(1) + np.float64(2) ** -50
    check(xla.replicate(lambda x: x - 1.0, [[x], [2 * x - 1]]), "float64", x - 1, 2 * x - 2)
    captured = tf.constant(x)
    check(xla.replicate(lambda: captured - 1.0, num_replicas=2), "float64", x - 1, x - 1)


def test_python_numbers_are_of_the_dtypes_that_tensorflow_gives_them():
    results = xla.replicate(lambda x, y: (x, y, tf.constant(3), tf.constant(0.5)), [[1, 1.5], [2, 2.5]])
    assert [part.dtype for part in results[1]] == [tf.int32, tf.float32, tf.int32, tf.float32]


def test_what_is_no_number_passes_unchanged():
    special = [array(name, float("nan"), float("inf"), -float("inf"), -0.0, 0.0) for name in FLOATS]
    plain = [array(name, 1, 2, 3, 4, 5) for name in FLOATS]
    variables = [tf.Variable(value) for value in special]
    found = xla.replicate(lambda *x: [*x, *(each.read_value() for each in variables)], [special, plain])
    of_replicas = zip([*special, *special], [*plain, *special], strict=True)
    for name, expected, column in zip(FLOATS * 2, of_replicas, zip(*found, strict=True), strict=True):
        check(column, name, *expected)


def test_what_is_no_number_is_no_error():
    """Nobody checks numerics unless asked: a loss may be NaN."""
    results = xla.replicate(lambda x: (x / 0.0, tf.math.log(x), xla.cross_replica_sum(x)), [[0.0], [-1.0]])
    assert [[str(float(part)) for part in result] for result in results] == [
        ["nan", "-inf", "-1.0"],
        ["-inf", "nan", "-1.0"],
    ]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1, 1, 1)])
def test_shapes_of_every_kind_pass(shape):
    x = np.ones(shape, np.float32)
    variable = tf.Variable(x)

    def fn(x):
        variable.assign_add(x)
        return x * 2.0, tf.reduce_sum(x)

    for twice, total in xla.replicate(fn, [[x], [x + 1]]):
        assert twice.shape == shape
        assert total.shape == ()
    np.testing.assert_array_equal(variable.numpy(), 2 * x)


def test_bytes_in_the_other_order_are_put_right():
    other = np.arange(3, dtype=np.dtype(np.int32).newbyteorder())
    check(xla.replicate(lambda x: x + 1, [[other]] * 2), "int32", np.int32([1, 2, 3]), np.int32([1, 2, 3]))


def test_every_dtype_is_kept_in_a_variable():
    names = [name for name in EVERY if name not in WITHOUT_VARIABLES]
    variables = [tf.Variable(array(name, 0, 1, 1)) for name in names]

    def fn(*values):
        read = [tf.identity(variable) for variable in variables]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        return read

    found = xla.replicate(fn, [[array(name, 1, 0, 1) for name in names]] * 2)
    for name, variable, column in zip(names, variables, zip(*found, strict=True), strict=True):
        check(column, name, *[array(name, 0, 1, 1)] * 2)
        check([variable], name, array(name, 1, 0, 1))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_labels_that_are_no_class_are_never_among_the_largest(k, dtype):
    """As in TensorFlow: a loss may ignore a label of -1. So are all labels of a row with an infinity or a NaN."""
    rows = np.random.default_rng(0).permuted(np.tile(np.linspace(-1, 1, 4, dtype="float32"), (24, 1)), axis=1)
    rows[5, 1], rows[6, 2], rows[7] = np.nan, np.inf, 0.5  # and one row of ties
    labels = np.arange(24) % 6 - 1
    found = xla.replicate(lambda: tf.math.in_top_k(tf.constant(labels, dtype), rows, k), num_replicas=2)
    expected = tf.math.in_top_k(tf.constant(labels, dtype), rows, k).numpy()
    assert [each.numpy().tolist() for each in found] == [expected.tolist()] * 2
    assert not expected[labels == -1].any()


def test_a_gradient_through_a_resized_image_of_doubles():
    """TensorFlow's lowering gives it as float32, which no program takes as the gradient of a double."""
    image = np.random.default_rng(0).random((2, 3, 3, 1))

    def gradient():
        x = tf.constant(image)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(tf.image.resize(x * x, (5, 6)) ** 2)
        return tape.gradient(y, x)

    for found in xla.replicate(gradient, num_replicas=2):
        np.testing.assert_allclose(found, gradient(), rtol=1e-5)
