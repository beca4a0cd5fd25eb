"""Arrays with `dynamic_size=True`: right up to the size that they are made with, an error beyond it."""

import re

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.errors import LoweringError

X = [1.0, 2.0, 3.0]


def array(size=0, **options):
    return tf.TensorArray(tf.float32, size=size, dynamic_size=True, **options)


def over_a_range(x):
    found = array(3)
    for i in tf.range(3):
        found = found.write(i, x * tf.cast(i, tf.float32))
    return found.stack()


def in_a_branch_on_data(x):
    found = array(3, element_shape=[3])
    for i in tf.range(3):
        if x[i] > 1.5:
            found = found.write(i, x)
    return found.stack()


def in_python(x):
    found = array(3)
    for i in range(3):
        found = found.write(i, x)
    return found.stack()


def in_an_array_of_each_iteration(x):
    rows = array(2)
    for i in tf.range(2):
        row = array(3)
        for j in tf.range(3):
            row = row.write(j, x * tf.cast(i + j, tf.float32))
        rows = rows.write(i, row.stack())
    return rows.stack()


def in_a_function(x):
    return tf.function(over_a_range)(x)


def from_what_was_written_before(x):
    found = array(4, clear_after_read=False).write(0, x)
    for i in tf.range(1, 4):
        found = found.write(i, found.read(i - 1) * x)
    return found.stack()


WITHIN = [
    over_a_range,
    in_a_branch_on_data,
    in_python,
    in_an_array_of_each_iteration,
    in_a_function,
    from_what_was_written_before,
]


@pytest.fixture(scope="module")
def two():
    return TPUStrategy(num_cores=2)


def on_replica_0(strategy, body, x=X):
    return strategy.experimental_local_results(strategy.run(body, args=(tf.constant(x),)))[0].numpy()


@pytest.mark.parametrize("body", WITHIN, ids=lambda body: body.__name__)
def test_within_its_size_it_is_what_tensorflow_makes(two, body):
    np.testing.assert_array_equal(on_replica_0(two, body), body(tf.constant(X)).numpy())


def test_its_gradients_are_right(two):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(from_what_was_written_before(x))  # the first four powers of each element
        return tape.gradient(loss, x)

    x = np.float32(X)
    np.testing.assert_allclose(on_replica_0(two, gradient), 1.0 + 2.0 * x + 3.0 * x**2 + 4.0 * x**3, rtol=1e-6)


def test_in_a_host_call_it_grows(two):
    @xla.returns(tf.TensorSpec([3, 3], tf.float32))
    def on_host(x):
        found = array()
        for i in range(3):
            found = found.write(i, x * float(i))
        return found.stack()

    found = on_replica_0(two, lambda x: xla.outside_compilation(on_host, x))
    np.testing.assert_array_equal(found, np.outer([0, 1, 2], X))


def while_data_is_small(x):
    found, i = array(), 0
    while tf.reduce_sum(x) < 100.0:
        found = found.write(i, x)
        i += 1
        x *= 2.0
    return found.stack()


def over_a_longer_range(x):
    found = array(2)
    for i in tf.range(3):
        found = found.write(i, x)
    return found.stack()


def at_its_own_size(x):
    found = array()
    for value in x:
        found = found.write(found.size(), value)
    return found.stack()


BEYOND = [while_data_is_small, over_a_longer_range, at_its_own_size]


@pytest.mark.parametrize("body", BEYOND, ids=lambda body: body.__name__)
def test_a_write_beyond_its_size_raises_when_it_happens(two, body):
    with pytest.raises(tf.errors.InvalidArgumentError, match="Pass the largest size") as raised:
        on_replica_0(two, body)
    assert is_in(body, raised.value.__notes__[0])


@pytest.mark.parametrize("body", BEYOND, ids=lambda body: body.__name__)
def test_where_nothing_can_check_it_is_an_error_before_the_run(body):
    with pytest.raises(LoweringError, match="Pass the largest size") as raised:
        on_replica_0(TPUStrategy(num_cores=2, soft_placement=False), body)
    assert is_in(body, str(raised.value))


def is_in(body, text):
    """Whether a text names a line of a body."""
    line = int(re.search(r"test_arrays_that_grow\.py:(\d+) in", text)[1])
    return 0 < line - body.__code__.co_firstlineno < 6
