"""Gradients through host work, of every order: those of the same program without `outside_compilation`."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import SCALAR, Failing, cubes, example, first_order, gradients, same_without, second_order

from replica_engine import xla
from replica_engine.errors import LoweringError


def mixed(x, y):
    """Neither symmetric nor separable."""
    return x**2 * y + tf.exp(-x), x * y**3


def weighted(call, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = call(mixed, x, x + 1.0)
    return tape.gradient(y, x, output_gradients=[x, 2.0 * x])


def all_orders_at_once(call, x):
    with tf.GradientTape() as third, tf.GradientTape() as second, tf.GradientTape() as first:
        for tape in (first, second, third):
            tape.watch(x)
        y = call(cubes, x)
        first_of = first.gradient(y, x)
        second_of = second.gradient(first_of, x)
    return y, first_of, second_of, third.gradient(second_of * first_of, x)


def second_order_of_several(call, x):
    def first(x, y):
        dx, dy = gradients(lambda x, y: call(mixed, x, y), x, y)
        return dx * y + dy * x

    return gradients(first, x, 2.0 * x)


def integers_beside_floats(call, x):
    fn = lambda x, steps, y: (tf.cast(steps, x.dtype) * x * y, steps + 1)  # noqa: E731

    def outer(x, y):
        product, steps = call(fn, x, tf.constant(3), y)
        return product * tf.cast(steps, x.dtype)

    return gradients(outer, x, x + 2.0)


@first_order
def integer_results(call, x):
    found = call(lambda x: {"count": tf.cast(x * 10.0, tf.int32), "y": x**2, "positive": x > 1.0}, x)
    return tf.where(found["positive"], found["y"], -found["y"]) * tf.cast(found["count"], x.dtype)


def only_integers(call, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cast(call(lambda x: tf.cast(x * 10.0, tf.int32), x), x.dtype)
    return y, tape.gradient(y, x, unconnected_gradients="zero")


def closures(call, x):
    def outer(x, y):
        factor = x * y
        return call(lambda z: factor * z + y, x)

    return gradients(outer, x, x + 1.0)


@first_order
def the_same_tensor_twice(call, x):
    return call(mixed, x, x)


@first_order
def the_argument_itself(call, x):
    return tf.nest.flatten(call(lambda x: (x, x * 2.0, [x]), x))


@first_order
def structures(call, x):
    fn = lambda nest, scale=1.0: {"a": [nest["x"] ** 2 * scale], "b": None}  # noqa: E731
    return call(fn, {"x": x, "n": 5}, scale=3.0)["a"][0] * x


@second_order
def one_that_feeds_another(call, x):
    return call(lambda y: y**2, call(cubes, x) + 1.0) * call(tf.sin, x)


def one_forward_twice_and_again(call, x):
    with tf.GradientTape() as second:
        second.watch(x)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y, z = call(mixed, x, x + 1.0)
        product = tape.gradient(y, x) * tape.gradient(z, x)
    return second.gradient(product, x)


def unconnected(call, x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        unused = x * 2.0
        y = call(lambda x, _: (x * 2.0, tf.ones_like(x)), x, unused)
    zero = tf.UnconnectedGradients.ZERO
    return tape.gradient(y[0], x), tape.gradient(y, unused, unconnected_gradients=zero), tape.gradient(y[0], x)


def gathered_in_it_twice(call, x):
    outer = lambda x: call(lambda x: tf.gather(x, [2, 0, 2, 2]) ** 3, x)  # noqa: E731
    return gradients(lambda x: gradients(outer, x)[0] ** 2, x)


@first_order
def gathered_from_it(call, x):
    return tf.gather(call(cubes, x), [2, 0, 2, 2]) ** 2


@tf.custom_gradient
def tripled(x):
    return x * 1.0, lambda upstream: 3.0 * upstream


@first_order
def gradients_of_its_own(call, x):
    return call(lambda x: tripled(x) * x * tf.stop_gradient(x), x)


@first_order
def other_shapes(call, x):
    def fn(row, rows, none):
        return tf.matmul(row[None], rows, transpose_b=True), tf.reduce_sum(row), none * 2.0

    return call(fn, x, tf.stack([x, x**2]), x[:0])


def complex_numbers(call, x):
    def outer(x, y):
        z = call(lambda z: z**2 * tf.math.conj(z) + 1.0j, tf.complex(x, y))
        return tf.math.real(z) * tf.math.imag(z)

    return gradients(lambda x: gradients(outer, x, x + 1.0), x)


BODIES = [
    *(weighted, all_orders_at_once, second_order_of_several, integers_beside_floats, integer_results, only_integers),
    *(closures, the_same_tensor_twice, the_argument_itself, structures, one_that_feeds_another),
    *(one_forward_twice_and_again, unconnected, gathered_in_it_twice, gathered_from_it, gradients_of_its_own),
    *(other_shapes, complex_numbers),
]


@pytest.mark.parametrize("body", BODIES)
def test_gradients_are_those_without_it(body):
    same_without(body)


def test_they_are_of_the_dtype_of_the_value():
    dtypes = ["bfloat16", "float32", "complex128"]
    tripled = lambda x: xla.outside_compilation(lambda x: x * 3.0, x)  # noqa: E731
    body = lambda *xs: [gradients(tripled, x)[0] for x in xs]  # noqa: E731
    for results in xla.replicate(body, [[tf.constant([1.0, 2.0], dtype) for dtype in dtypes]] * 2):
        assert [result.dtype for result in results] == dtypes
        assert [result.numpy().tolist() for result in results] == [[3.0, 3.0]] * 3


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "in a function"])
def test_repeated_runs_have_gradients_of_their_own_values(in_function):
    def run(x):
        return xla.replicate(lambda x: gradients(lambda x: xla.outside_compilation(cubes, x), x)[0], [[x], [2.0 * x]])

    run = tf.function(run) if in_function else run
    for start in (1.0, 5.0):
        for result, x in zip(run(tf.constant(start)), [start, 2.0 * start], strict=True):
            assert float(result) == pytest.approx(3.0 * x**2 + np.cos(x))


def test_what_is_no_tensorflow_has_no_gradient():
    def body(x):
        fn = xla.returns((tf.TensorSpec(x.shape, x.dtype), SCALAR))(lambda x: (x.numpy() ** 2, 7.0))
        return gradients(lambda x: xla.outside_compilation(fn, x)[0] + x, x)

    assert [result[0].numpy().tolist() for result in xla.replicate(body, example())] == [[1.0] * 3] * 2


def test_a_loop_without_a_bound_says_how_to_give_one():
    def body(x):
        def outer(x):
            y = x
            while tf.reduce_sum(y) < 100.0:
                y = xla.outside_compilation(lambda y: y * 2.0, y)
            return y

        return gradients(outer, x)

    with pytest.raises(LoweringError, match="maximum_iterations"):
        xla.replicate(body, example())


def test_an_exception_in_a_gradient_names_it():
    @tf.custom_gradient
    def fails(x):
        def gradient(upstream):
            raise Failing("in the gradient")

        return x * 1.0, gradient

    body = lambda x: gradients(lambda y: xla.outside_compilation(fails, y), x)  # noqa: E731
    with pytest.raises(Failing, match="in the gradient") as raised:
        xla.replicate(body, example())
    assert "the gradient of outside_compilation(fails) at" in raised.value.__notes__[0]


def test_nothing_is_kept_after_the_run():
    class Resource:
        pass

    alive = []

    def fn(x):
        resource = Resource()
        alive.append(weakref.ref(resource))

        @tf.custom_gradient
        def identity(x):
            return x * 1.0, lambda upstream: upstream * (1.0 if resource else 0.0)

        return identity(x)

    fn = xla.returns(tf.TensorSpec([3], tf.float64))(fn)
    xla.replicate(lambda x: gradients(lambda y: xla.outside_compilation(fn, y), x), example())
    gc.collect()
    assert len(alive) == 2
    assert [each() for each in alive] == [None, None]
