"""Gradients through host work, of every order: those of the same program without `outside_compilation`."""

import collections
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.errors import LoweringError


def direct(fn, *args, **kwargs):
    """What `xla.outside_compilation` is compared with."""
    return fn(*args, **kwargs)


def cubes(x):
    return x**3 + tf.sin(x)


def mixed(x, y):
    """Neither symmetric nor separable."""
    return x**2 * y + tf.exp(-x), x * y**3


def gradients(fn, *inputs):
    """First derivatives of the sum of `fn(*inputs)`, as dense tensors."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value = fn(*inputs)
    return [None if each is None else tf.convert_to_tensor(each) for each in tape.gradient(value, inputs)]


def example(n=2, shape=(3,)):
    return [[tf.constant(part)] for part in np.random.default_rng(1).uniform(0.5, 1.5, size=(n, *shape))]


def same_without(body, inputs=None, eager=True):
    """Checks that `body(call, *inputs)` comes to the same whether `call` goes through the host or not.

    The latter in eager mode, which is quicker than compiling it; not if the replicas of the body meet or differ.
    """
    inputs = inputs or example()
    results = xla.replicate(lambda *args: body(xla.outside_compilation, *args), inputs)
    if eager:
        expected = [body(direct, *args) for args in inputs]
    else:
        expected = xla.replicate(lambda *args: body(direct, *args), inputs)
    tf.nest.assert_same_structure(results, expected)
    for result, wanted in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        assert (result is None) == (wanted is None)
        if result is not None:
            assert result.dtype == wanted.dtype
            np.testing.assert_allclose(result, wanted, rtol=1e-10, atol=1e-12)


# One after the other: each is a body, and must be the same with and without.


def first_order(call, x):
    return gradients(lambda x: call(cubes, x) * x, x)


def weighted(call, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = call(mixed, x, x + 1.0)
    return tape.gradient(y, x, output_gradients=[x, 2.0 * x])


def third_order(call, x):
    second = lambda x: gradients(lambda x: gradients(lambda x: call(cubes, x), x)[0], x)[0]  # noqa: E731
    return gradients(lambda x: second(x) * x, x)


def all_orders_at_once(call, x):
    with tf.GradientTape() as third, tf.GradientTape() as second, tf.GradientTape() as first:
        for tape in (first, second, third):
            tape.watch(x)
        y = call(cubes, x)
        first_of = first.gradient(y, x)
        second_of = second.gradient(first_of, x)
    return y, first_of, second_of, third.gradient(second_of * first_of, x)


def several_inputs(call, x):
    return gradients(lambda x, y: call(mixed, x, y), x, 2.0 * x)


def second_order_of_several(call, x):
    def first(x, y):
        dx, dy = gradients(lambda x, y: call(mixed, x, y), x, y)
        return dx * y + dy * x

    return gradients(first, x, 2.0 * x)


def integers_beside_floats(call, x):
    def fn(x, steps, y):
        return tf.cast(steps, x.dtype) * x * y, steps + 1

    def outer(x, y):
        product, steps = call(fn, x, tf.constant(3), y)
        return product * tf.cast(steps, x.dtype)

    return gradients(outer, x, x + 2.0)


def integer_results(call, x):
    def fn(x):
        return {"count": tf.cast(x * 10.0, tf.int32), "y": x**2, "positive": x > 1.0}

    def outer(x):
        found = call(fn, x)
        return tf.where(found["positive"], found["y"], -found["y"]) * tf.cast(found["count"], x.dtype)

    return gradients(outer, x)


def only_integers(call, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.cast(call(lambda x: tf.cast(x * 10.0, tf.int32), x), x.dtype)
    return y, tape.gradient(y, x, unconnected_gradients="zero")


def closures(call, x):
    def outer(x, y):
        factor = x * y

        def fn(z):
            return factor * z + y

        return call(fn, x)

    return gradients(outer, x, x + 1.0)


def the_same_tensor_twice(call, x):
    return gradients(lambda x: call(mixed, x, x), x)


def the_argument_itself(call, x):
    def fn(x):
        return x, x * 2.0, [x]

    return gradients(lambda x: tf.nest.flatten(call(fn, x)), x)


def structures(call, x):
    def fn(nest, scale=1.0):
        return {"a": [nest["x"] ** 2 * scale], "b": None}

    return gradients(lambda x: call(fn, {"x": x, "n": 5}, scale=3.0)["a"][0] * x, x)


def one_that_feeds_another(call, x):
    def outer(x):
        return call(lambda y: y**2, call(cubes, x) + 1.0) * call(tf.sin, x)

    return gradients(lambda x: gradients(outer, x)[0] * x, x)


def one_forward_twice(call, x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y, z = call(mixed, x, x + 1.0)
        total = tf.reduce_sum(y * z)
    return tape.gradient(y, x), tape.gradient(z, x), tape.gradient(total, x), tape.gradient(y, x)


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
    def outer(x):
        return call(lambda x: tf.gather(x, [2, 0, 2, 2]) ** 3, x)

    return gradients(lambda x: gradients(outer, x)[0] ** 2, x)


def gathered_from_it(call, x):
    return gradients(lambda x: tf.gather(call(cubes, x), [2, 0, 2, 2]) ** 2, x)


@tf.custom_gradient
def tripled(x):
    return x * 1.0, lambda upstream: 3.0 * upstream


def gradients_of_its_own(call, x):
    return gradients(lambda x: call(lambda x: tripled(x) * x * tf.stop_gradient(x), x), x)


def other_shapes(call, x):
    def fn(row, rows, none):
        product = tf.matmul(row[None], rows, transpose_b=True)
        return product, tf.reduce_sum(row), none * 2.0

    return gradients(lambda x: call(fn, x, tf.stack([x, x**2]), x[:0]), x)


def complex_numbers(call, x):
    def outer(x, y):
        z = call(lambda z: z**2 * tf.math.conj(z) + 1.0j, tf.complex(x, y))
        return tf.math.real(z) * tf.math.imag(z)

    return gradients(lambda x: gradients(outer, x, x + 1.0), x)


def a_loop(call, x):
    def outer(x):
        body = lambda i, y: (i + 1, call(lambda x, y: tf.sin(y) * x, x, y))  # noqa: E731
        return tf.while_loop(lambda i, y: i < 3, body, (0, x), maximum_iterations=3)[1]

    return gradients(outer, x)


def a_loop_over_a_range(call, x):
    def outer(x):
        y = x
        for i in tf.range(3):
            y = call(lambda y, i: tf.sin(y) * x + tf.cast(i, x.dtype), y, i)
        return y

    return gradients(outer, x)


def a_loop_that_ends_early(call, x):
    def outer(x):
        more = lambda y: tf.reduce_sum(y) < 20.0  # noqa: E731
        return tf.while_loop(more, lambda y: (call(lambda y: y * 1.5 + x, y),), (x,), maximum_iterations=10)[0]

    return gradients(outer, x)


def nested_loops(call, x):
    def outer(x):
        y = x
        for _ in tf.range(2):
            for _ in tf.range(2):
                y = call(lambda y: tf.sin(y) * x, y)
            y = call(lambda y: y**2, y)
        return y

    return gradients(outer, x)


def second_order_in_a_loop(call, x):
    def outer(x):
        y = x
        for _ in tf.range(2):
            y = call(lambda x, y: tf.sin(y) * x, x, y)
        return y

    return gradients(lambda x: gradients(outer, x)[0] * x, x)


def a_gradient_in_a_loop(call, x):
    for _ in tf.range(3):
        x = x - 0.1 * gradients(lambda x: call(cubes, x), x)[0]
    return x


def a_branch(call, x):
    """Replicas take different ones."""

    def outer(x):
        return tf.cond(
            tf.equal(xla.replica_id(), 0), lambda: call(cubes, x) * x, lambda: call(lambda x: 5.0 * x, x) ** 2
        )

    return gradients(outer, x)


def second_order_in_a_branch(call, x):
    def outer(x):
        return tf.cond(tf.equal(xla.replica_id(), 0), lambda: call(cubes, x) * x, lambda: x**4)

    return gradients(lambda x: gradients(outer, x)[0] * x, x)


def a_gradient_in_a_branch(call, x):
    return tf.cond(x[0] > 0.0, lambda: gradients(lambda x: call(cubes, x), x)[0], lambda: x)


def a_branch_in_a_loop(call, x):
    def outer(x):
        y = x
        for i in tf.range(4):
            if tf.equal(i % 2, xla.replica_id()):
                y = call(lambda y: tf.sin(y) * x, y)
        return y

    return gradients(outer, x)


def nested_functions(call, x):
    @tf.function
    def inner(x):
        return call(cubes, x) * x

    middle = tf.function(lambda x: inner(x) + inner(2.0 * x))
    return gradients(lambda x: gradients(middle, x)[0] * x, x)


def a_gradient_in_a_function(call, x):
    first = tf.function(lambda x: gradients(lambda x: call(cubes, x), x)[0])
    return gradients(lambda x: first(x) * first(2.0 * x), x)


def a_sum_over_replicas(call, x):
    def outer(x):
        y = xla.cross_replica_sum(call(cubes, x))
        return call(lambda x, y: x * y**2, x, y)

    return gradients(outer, x)


def second_order_of_a_sum_over_replicas(call, x):
    def outer(x):
        return call(tf.sin, xla.cross_replica_sum(call(cubes, x))) * x

    return gradients(lambda x: gradients(outer, x)[0] * x, x)


def sums_over_replicas_in_a_loop(call, x):
    def outer(x):
        y = x
        for _ in tf.range(3):
            y = xla.all_reduce(call(lambda y: tf.sin(y) * x, y), "MEAN")
        return y

    return gradients(outer, x)


def computed_again(call, x):
    return gradients(tf.recompute_grad(lambda x: call(cubes, x) * x), x)


def gradients_of_the_graph(call, x):
    y = call(cubes, x) * x
    return tf.gradients(tf.gradients(y, x)[0], x)


BODIES = [
    first_order,
    weighted,
    third_order,
    all_orders_at_once,
    several_inputs,
    second_order_of_several,
    integers_beside_floats,
    integer_results,
    only_integers,
    closures,
    the_same_tensor_twice,
    the_argument_itself,
    structures,
    one_that_feeds_another,
    one_forward_twice,
    one_forward_twice_and_again,
    unconnected,
    gathered_in_it_twice,
    gathered_from_it,
    gradients_of_its_own,
    other_shapes,
    complex_numbers,
    a_loop,
    a_loop_over_a_range,
    a_loop_that_ends_early,
    nested_loops,
    second_order_in_a_loop,
    a_gradient_in_a_loop,
    a_gradient_in_a_branch,
    nested_functions,
    a_gradient_in_a_function,
    computed_again,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_gradients_are_those_without_it(body):
    same_without(body)


@pytest.mark.parametrize(
    "body",
    [
        a_branch,
        second_order_in_a_branch,
        a_branch_in_a_loop,
        a_sum_over_replicas,
        second_order_of_a_sum_over_replicas,
        sums_over_replicas_in_a_loop,
        gradients_of_the_graph,
    ],
    ids=lambda body: body.__name__,
)
def test_gradients_are_those_of_the_same_program_without_it(body):
    same_without(body, eager=False)


@pytest.mark.parametrize("n", [1, 4])
def test_they_are_so_on_any_number_of_replicas(n):
    same_without(second_order_of_a_sum_over_replicas, example(n), eager=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex128"])
def test_they_are_of_the_dtype_of_the_value(dtype):
    body = lambda x: gradients(lambda x: xla.outside_compilation(lambda x: x * 3.0, x), x)  # noqa: E731
    for (result,) in xla.replicate(body, [[tf.constant([1.0, 2.0], dtype)]] * 2):
        assert result.dtype == dtype
        assert result.numpy().tolist() == [3.0, 3.0]


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
        fn = lambda x: (x.numpy() ** 2, 7.0)  # noqa: E731
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


# How often, and by which names.


def counting(calls):
    """`cubes`, which notes for each replica that it ran."""

    @xla.returns(tf.TensorSpec([], tf.float32))
    def fn(x):
        calls[int(xla.replica_id())] += 1
        return cubes(x)

    return fn


def third_derivative(fn, x):
    return gradients(lambda x: gradients(lambda x: gradients(fn, x)[0], x)[0], x)[0]


@pytest.mark.parametrize("derivative", [lambda fn, x: gradients(fn, x)[0], third_derivative], ids=["first", "third"])
def test_the_function_runs_once_for_each_forward_and_not_for_gradients(derivative):
    calls = collections.Counter()
    fn = counting(calls)

    def body(x):
        return derivative(lambda x: xla.outside_compilation(fn, x) * x, x)

    for _ in range(2):
        xla.replicate(body, [[tf.constant(1.0)], [tf.constant(2.0)]])
    assert calls == {0: 2, 1: 2}


def test_in_a_loop_it_runs_once_in_each_iteration():
    calls = collections.Counter()
    fn = counting(calls)

    def body(x):
        def outer(x):
            for _ in tf.range(3):
                x = xla.outside_compilation(fn, x)
            return x

        return gradients(outer, x)

    xla.replicate(body, [[tf.constant(0.1)], [tf.constant(0.2)]])
    assert calls == {0: 3, 1: 3}


def test_it_runs_in_the_branch_that_is_taken_only():
    calls = collections.Counter()
    fn = counting(calls)

    def body(x):
        return gradients(lambda x: tf.cond(x > 1.5, lambda: xla.outside_compilation(fn, x), lambda: x), x)[0]

    results = xla.replicate(body, [[tf.constant(1.0)], [tf.constant(2.0)]])
    assert [float(each) for each in results] == [1.0, pytest.approx(12.0 + np.cos(2.0))]
    assert calls == {1: 1}


def names(body, inputs=None):
    """The names of the clusters of a body, in the order in which it was traced."""
    return [call.name for call in xla.lower(body, inputs or example()).traced.host_calls.calls]


def test_clusters_are_numbered():
    def body(x):
        for _ in tf.range(2):
            x = xla.outside_compilation(cubes, x)
        xla.outside_compilation(lambda: None)
        return xla.outside_compilation(cubes, x)

    assert names(body) == ["0", "1", "2"]


def test_a_gradient_has_the_name_of_its_cluster_and_a_number():
    def body(x):
        return gradients(lambda x: xla.outside_compilation(tf.sin, xla.outside_compilation(cubes, x)), x)

    assert names(body) == ["0", "1", "1.0", "0.0"]


def test_two_gradients_of_one_cluster_have_two_names():
    def body(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = xla.outside_compilation(cubes, x)
            z = 2.0 * y
        return tape.gradient(y, x), tape.gradient(z, x), tape.gradient(y, x)

    assert names(body) == ["0", "0.0", "0.1", "0.2"]


def test_the_gradient_of_a_gradient_is_one_of_the_same_cluster():
    def body(x):
        first = lambda x: gradients(lambda x: xla.outside_compilation(cubes, x), x)[0]  # noqa: E731
        second = lambda x: gradients(first, x)[0]  # noqa: E731
        return gradients(second, x), xla.outside_compilation(cubes, x)

    found = names(body)
    assert found[0] == "0"
    assert found[-1] == "1"
    assert len(set(found)) == len(found)
    assert {name.split(".")[0] for name in found[1:-1]} == {"0"}
    assert sorted(int(name.split(".")[1]) for name in found[1:-1]) == list(range(len(found) - 2))


def test_what_has_no_gradient_asked_for_has_no_cluster_for_it():
    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = xla.outside_compilation(cubes, x)
            z = xla.outside_compilation(cubes, 2.0 * x)
        return y, tape.gradient(z, x)

    assert names(body) == ["0", "1", "1.0"]


# With a strategy.


def test_a_training_step_learns_as_without_it():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 8, 3)), generator.normal(size=(2, 8, 1))
    start = generator.normal(size=(3, 1))
    weights = []
    for call in (xla.outside_compilation, direct):
        strategy = TPUStrategy(num_cores=2)
        with strategy.scope():
            w = tf.Variable(start, aggregation=tf.VariableAggregation.MEAN)

        def loss_of(prediction, y):
            return tf.reduce_mean((prediction - y) ** 2)

        def step(x, y, call=call, w=w):
            with tf.GradientTape() as tape:
                loss = call(loss_of, call(tf.matmul, x, w), y)
            w.assign_sub(0.1 * xla.all_reduce(tape.gradient(loss, w), "MEAN"))
            return loss

        spread = [
            strategy.experimental_distribute_values_from_function(
                lambda context, part=part: tf.constant(part[context.replica_id_in_sync_group])
            )
            for part in (x, y)
        ]
        train = tf.function(lambda *args, step=step, strategy=strategy: strategy.run(step, args=args))
        for _ in range(3):
            train(*spread)
        weights.append(w.numpy())
    assert not np.allclose(weights[0], start)
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-10)


def test_each_step_of_a_device_loop_has_its_own():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        w = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    def step(context, x):
        with tf.GradientTape() as tape:
            loss = xla.outside_compilation(lambda w, x: (w * x - 6.0) ** 2, w, x)
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * gradient)
        context.set_last_step_output("gradient", gradient)

    context = strategy.run_steps(step, [tf.constant(x) for x in (1.0, 2.0, 0.5)], iterations=3)
    expected = 1.0
    for x in (1.0, 2.0, 0.5):
        gradient = 2.0 * x * (expected * x - 6.0)
        expected -= 0.1 * gradient
    assert w.numpy() == pytest.approx(expected, rel=1e-5)
    for each in strategy.experimental_local_results(context.last_step_outputs["gradient"]):
        assert float(each) == pytest.approx(gradient, rel=1e-5)


class Failing(Exception):
    pass


def test_an_exception_in_a_gradient_names_it():
    @tf.custom_gradient
    def fails(x):
        def gradient(upstream):
            raise Failing("in the gradient")

        return x * 1.0, gradient

    body = lambda x: gradients(lambda y: xla.outside_compilation(fails, y), x)  # noqa: E731
    with pytest.raises(Failing, match="in the gradient") as raised:
        xla.replicate(body, example())
    assert "the gradient '0.0' of outside_compilation '0' at" in raised.value.__notes__[0]


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


def test_a_step_that_is_late_with_its_gradient_is_not_overtaken_by_the_next():
    """The next batch depends on nothing; the gradient has to wait for a long product."""
    strategy = TPUStrategy(num_cores=2)
    factor = tf.constant(np.random.default_rng(0).normal(size=(200, 200)) / 20)

    def product(x):
        y = factor * x
        for _ in range(6):
            y = y @ factor
        return tf.reduce_sum(y)

    def step(context, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            z = product(xla.outside_compilation(tf.identity, x))
        context.set_last_step_output("gradient", tape.gradient(z, x))

    context = strategy.run_steps(step, [tf.ones([], tf.float64)] * 3, iterations=3)
    expected = float(product(tf.ones([], tf.float64)))
    for each in strategy.experimental_local_results(context.last_step_outputs["gradient"]):
        assert float(each) == pytest.approx(expected)
