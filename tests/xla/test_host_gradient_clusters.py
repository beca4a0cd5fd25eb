"""How often host work runs for its gradients, by which names, and gradients in steps of a strategy."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import cubes, direct, example, gradients
from helpers.on_two import spread

from replica_engine import TPUStrategy, xla

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


def test_the_function_runs_once_for_each_forward_and_not_for_gradients():
    calls = collections.Counter()
    fn = counting(calls)
    body = lambda x: third_derivative(lambda x: xla.outside_compilation(fn, x) * x, x)  # noqa: E731
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
    body = lambda x: gradients(lambda x: tf.cond(x > 1.5, lambda: xla.outside_compilation(fn, x), lambda: x), x)[0]  # noqa: E731
    results = xla.replicate(body, [[tf.constant(1.0)], [tf.constant(2.0)]])
    assert [float(each) for each in results] == [1.0, pytest.approx(12.0 + np.cos(2.0))]
    assert calls == {1: 1}


def names(body, inputs=None):
    """The names of the clusters of a body, in the order in which it was traced."""
    return [call.name for call in xla.lower(body, inputs or example()).traced.host_calls.calls]


def numbered(x):
    for _ in tf.range(2):
        x = xla.outside_compilation(cubes, x)
    xla.outside_compilation(lambda: None)
    return xla.outside_compilation(cubes, x)


def a_gradient_of_two(x):
    return gradients(lambda x: xla.outside_compilation(tf.sin, xla.outside_compilation(cubes, x)), x)


def several_gradients_of_one(x):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        y = xla.outside_compilation(cubes, x)
        z = 2.0 * y
    return tape.gradient(y, x), tape.gradient(z, x), tape.gradient(y, x)


def one_without_a_gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = xla.outside_compilation(cubes, x)
        z = xla.outside_compilation(cubes, 2.0 * x)
    return y, tape.gradient(z, x)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (numbered, ["0", "1", "2"]),
        (a_gradient_of_two, ["0", "1", "1.0", "0.0"]),
        (several_gradients_of_one, ["0", "0.0", "0.1", "0.2"]),
        (one_without_a_gradient, ["0", "1", "1.0"]),
    ],
)
def test_a_gradient_has_the_name_of_its_cluster_and_a_number(body, expected):
    assert names(body) == expected


def test_the_gradient_of_a_gradient_is_one_of_the_same_cluster():
    def body(x):
        first = lambda x: gradients(lambda x: xla.outside_compilation(cubes, x), x)[0]  # noqa: E731
        return gradients(lambda x: gradients(first, x)[0], x), xla.outside_compilation(cubes, x)

    found = names(body)
    assert found[0] == "0"
    assert found[-1] == "1"
    assert len(set(found)) == len(found)
    assert {name.split(".")[0] for name in found[1:-1]} == {"0"}
    assert sorted(int(name.split(".")[1]) for name in found[1:-1]) == list(range(len(found) - 2))


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

        shares = [spread(strategy, lambda i, part=part: tf.constant(part[i])) for part in (x, y)]
        train = tf.function(lambda *args, step=step, strategy=strategy: strategy.run(step, args=args))
        for _ in range(3):
            train(*shares)
        weights.append(w.numpy())
    assert not np.allclose(weights[0], start)
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-10)


def test_each_step_of_a_device_loop_has_its_own(two):
    with two.scope():
        w = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    def step(context, x):
        with tf.GradientTape() as tape:
            loss = xla.outside_compilation(lambda w, x: (w * x - 6.0) ** 2, w, x)
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * gradient)
        context.set_last_step_output("gradient", gradient)

    context = two.run_steps(step, [tf.constant(x) for x in (1.0, 2.0, 0.5)], iterations=3)
    expected = 1.0
    for x in (1.0, 2.0, 0.5):
        gradient = 2.0 * x * (expected * x - 6.0)
        expected -= 0.1 * gradient
    assert w.numpy() == pytest.approx(expected, rel=1e-5)
    for each in two.experimental_local_results(context.last_step_outputs["gradient"]):
        assert float(each) == pytest.approx(gradient, rel=1e-5)


def test_a_step_that_is_late_with_its_gradient_is_not_overtaken_by_the_next(two):
    """The next batch depends on nothing; the gradient has to wait for a long product."""
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

    context = two.run_steps(step, [tf.ones([], tf.float64)] * 3, iterations=3)
    expected = float(product(tf.ones([], tf.float64)))
    for each in two.experimental_local_results(context.last_step_outputs["gradient"]):
        assert float(each) == pytest.approx(expected)
