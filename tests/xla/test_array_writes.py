"""Arrays of compiled programs: what is written to them, and the writes that are errors."""

import re

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.errors import LoweringError

X = [1.0, 2.0, 3.0]


@pytest.fixture(scope="module")
def one():
    return TPUStrategy(num_cores=1)


def growing(size=0):
    return tf.TensorArray(tf.float32, size=size, dynamic_size=True)


def over_a_range(x):
    found = growing()
    for i in tf.range(3):
        found = found.write(i, x)
    return found.stack()


def in_python(x):
    return growing().write(0, x).stack()


def of_the_largest_size(x):
    found = growing(3)
    return found.write(2, x).stack()


def at_its_own_size(x):
    found = growing()
    for value in x:
        found = found.write(found.size(), value)
    return found.stack()


def in_a_function(x):
    @tf.function
    def inner(x):
        return growing().write(0, x).stack()

    return inner(x)


@pytest.mark.parametrize("soft_placement", [True, False])
@pytest.mark.parametrize("body", [over_a_range, in_python, of_the_largest_size, at_its_own_size, in_a_function])
def test_a_write_to_an_array_that_may_grow_is_an_error(body, soft_placement):
    strategy = TPUStrategy(num_cores=1, soft_placement=soft_placement)
    check_refused(strategy, body, r"dynamic_size=True is written at .* Pass the largest size")


def check_refused(strategy, body, words):
    """The error has these words, and names a line of the body."""
    with pytest.raises(LoweringError, match=words) as raised:
        strategy.run(body, args=(tf.constant(X),))
    line = int(re.search(r"test_array_writes\.py:(\d+) in", str(raised.value))[1])
    assert 0 < line - body.__code__.co_firstlineno < 6


def test_in_a_host_call_an_array_grows(one):
    on_host = xla.returns(tf.TensorSpec([3, 3], tf.float32))(lambda x: over_a_range(x))
    found = one.run(lambda x: xla.outside_compilation(on_host, x), args=(tf.constant(X),))
    np.testing.assert_array_equal(found, [X] * 3)


def of_three():
    return tf.TensorArray(tf.float32, size=3)


def full(x):
    return of_three().unstack(x)


def guarded_by_the_counter(x):
    found = full(x)
    for i in tf.range(5):
        if i < 3:
            found = found.write(i, 2.0 * x[i])
    return found.stack()


def in_a_branch_that_the_data_does_not_take(x):
    found = full(x)
    if tf.reduce_sum(x) > 100.0:
        found = found.write(7, x[0])
    return 2.0 * found.stack()


def in_a_loop_that_the_data_does_not_enter(x):
    found = full(x)
    while tf.reduce_sum(x) > 100.0:
        found = found.write(7, x[0])
    return 2.0 * found.stack()


def by_map_fn_and_scan(x):
    return tf.map_fn(lambda each: 2.0 * each, x) + 0.0 * tf.scan(lambda a, b: a + b, x)


LARGE_ENOUGH = [
    *(guarded_by_the_counter, in_a_branch_that_the_data_does_not_take),
    *(in_a_loop_that_the_data_does_not_enter, by_map_fn_and_scan),
]


@pytest.mark.parametrize("body", LARGE_ENOUGH)
def test_arrays_that_are_large_enough_are_left_alone(one, body):
    np.testing.assert_array_equal(one.run(body, args=(tf.constant(X),)), [2.0, 4.0, 6.0])


def test_a_write_to_an_unknown_index_is_not_refused(one):
    body = lambda x: full(x).write(tf.cast(x[0], tf.int32), x[1]).write(1, x[1]).stack()  # noqa: E731
    assert one.run(body, args=(tf.constant(X),)).shape == (3,)


def test_gradients_through_an_array_are_right(one):
    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(guarded_by_the_counter(x) ** 2)
        return tape.gradient(loss, x)

    np.testing.assert_array_equal(one.run(body, args=(tf.constant(X),)), [8.0, 16.0, 24.0])


def from_what_was_written_before(x):
    found = tf.TensorArray(tf.float32, size=4, clear_after_read=False).write(0, x)
    for i in tf.range(1, 4):
        found = found.write(i, found.read(i - 1) * x)
    return found.stack()


def test_gradients_of_two_orders_are_right(one):
    def gradients(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(from_what_was_written_before(x))  # the first four powers of each element
            gradient = tape.gradient(loss, x)
        return tf.stack([gradient, outer.gradient(gradient, x)])

    x = np.float32(X)
    expected = [1.0 + 2.0 * x + 3.0 * x**2 + 4.0 * x**3, 2.0 + 6.0 * x + 12.0 * x**2]
    np.testing.assert_allclose(one.run(gradients, args=(tf.constant(X),)), expected, rtol=1e-6)


def in_a_python_loop(x):
    found = of_three()
    for i in range(4):
        found = found.write(i, x[0])
    return found.stack()


def after_it_was_filled(x):
    @tf.function
    def inner(x):
        return full(x).write(3, x[0]).stack()

    return inner(x)


@pytest.mark.parametrize("body", [in_a_python_loop, after_it_was_filled])
def test_a_write_at_a_known_index_beyond_the_size_is_an_error(one, body):
    check_refused(one, body, r"Index 3 is written at .* in a tf.TensorArray of size 3")
