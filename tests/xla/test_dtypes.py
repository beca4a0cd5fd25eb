"""Every dtype that XLA has goes in, comes out, is captured and kept in variables: the same bits, the same width."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
NUMBERS = (*INTEGERS, *FLOATS, "complex64", "complex128")
# TensorFlow has hardly any operations for these. XLA moves and casts them.
WITHOUT_VARIABLES = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz")
KNOWN_NARROW = ("int4", "uint4", "float8_e4m3fn", "float8_e5m2", *WITHOUT_VARIABLES)
NARROW = [name for name in KNOWN_NARROW if hasattr(tf.dtypes.experimental, name)]


def dtype_of(name):
    return getattr(tf.dtypes.experimental, name) if name in NARROW else tf.as_dtype(name)


def array(name, *values):
    return np.array(values).astype(dtype_of(name).as_numpy_dtype)


def check(results, name, *expected):
    for result, value in zip(results, expected, strict=True):
        assert result.dtype == dtype_of(name)
        got, wanted = result.numpy(), np.asarray(value)
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["bool", *NUMBERS, *NARROW])
class TestEveryDtype:
    def test_goes_in_and_comes_out(self, name):
        """As a vector, as a scalar and of no elements."""
        first, second = array(name, 0, 1, 1, 0, 1), array(name, 1, 1, 0, 0, 1)
        empty = first[:0].reshape(0, 2)
        inputs = [[part, tf.constant(part[0]), empty] for part in (first, second)]
        vectors, scalars, empties = zip(*xla.replicate(lambda *x: x, inputs), strict=True)
        check(vectors, name, first, second)
        check(scalars, name, first[0], second[0])
        check(empties, name, empty, empty)
        check(xla.replicate(lambda x: x, [[tf.constant(second)]] * 2), name, second, second)

    def test_is_captured_and_compiled_in(self, name):
        value = array(name, 1, 0, 1)
        outside = tf.constant(value)
        results = xla.replicate(lambda: (outside, tf.constant(value)), num_replicas=2)
        for column in zip(*results, strict=True):
            check(column, name, value, value)

    def test_inside_a_function(self, name):
        first, second = array(name, 0, 1, 1), array(name, 1, 1, 0)
        parts = [first, first[0], second, second[0]]  # cut here: TensorFlow's own slices lack some of the dtypes
        step = tf.function(lambda a, b, c, d: xla.replicate(lambda x, y: (x, y), [[a, b], [c, d]]))
        vectors, scalars = zip(*step(*map(tf.constant, parts)), strict=True)
        check(vectors, name, first, second)
        check(scalars, name, first[0], second[0])


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_computed_in_their_own_dtype(name):
    x = array(name, 1, 2, 3)
    check(xla.replicate(lambda x: x * x + x, [[x], [x + x]]), name, array(name, 2, 6, 12), array(name, 6, 20, 42))


@pytest.mark.parametrize("name", NARROW)
def test_narrow_numbers_are_cast(name):
    x = array(name, 1, 2, 3)
    results = xla.replicate(lambda x: tf.cast(tf.cast(x, tf.float32) * 2.0, x.dtype), [[x]] * 2)
    check(results, name, array(name, 2, 4, 6), array(name, 2, 4, 6))


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


@pytest.mark.parametrize("name", FLOATS)
def test_what_is_no_number_passes_unchanged(name):
    special = array(name, float("nan"), float("inf"), -float("inf"), -0.0, 0.0)
    plain = array(name, 1, 2, 3, 4, 5)
    check(xla.replicate(lambda x: x, [[special], [plain]]), name, special, plain)
    variable = tf.Variable(special)
    check(xla.replicate(lambda: variable.read_value(), num_replicas=2), name, special, special)


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


@pytest.mark.parametrize("name", [name for name in ("bool", *NUMBERS, *NARROW) if name not in WITHOUT_VARIABLES])
def test_every_dtype_is_kept_in_a_variable(name):
    before, after = array(name, 0, 1, 1), array(name, 1, 0, 1)
    variable = tf.Variable(before)

    def fn(x):
        read = tf.identity(variable)
        variable.assign(x)
        return read

    check(xla.replicate(fn, [[after]] * 2), name, before, before)
    check([variable], name, after)


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
