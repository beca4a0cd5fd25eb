"""Gradients of cross-replica operations, against finite differences.

The objective is the sum of the objectives of all replicas, as in `tf.distribute`: a replica's gradient says how
that sum changes with the replica's own value.
"""

import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import gradient_of

from replica_engine import xla
from replica_engine.errors import LoweringError

SHAPE = (4, 4)
HALVES = [[0, 2], [3, 1]]
RING = {n: [(i, (i + 1) % n) for i in range(n)] for n in (2, 4)}

OPERATIONS = {
    "sum": xla.cross_replica_sum,
    "mean": lambda x: xla.all_reduce(x, "MEAN"),
    "min": lambda x: xla.all_reduce(x, "MIN"),
    "max": lambda x: xla.all_reduce(x, "MAX"),
    "gather": xla.all_gather,
    "gather along -1": lambda x: xla.all_gather(x, axis=-1),
    "scatter": xla.reduce_scatter,
    "exchange 0 1": lambda x: xla.all_to_all(x, 0, 1),
    "exchange 1 1": lambda x: xla.all_to_all(x, 1, 1),
    "permute": lambda x: xla.ppermute(x, RING[xla.num_replicas()]),
    "permute some": lambda x: xla.ppermute(x, RING[xla.num_replicas()][1:]),
}
IN_GROUPS = {
    "sum": lambda x: xla.cross_replica_sum(x, HALVES),
    "mean": lambda x: xla.all_reduce(x, "MEAN", HALVES),
    "mean of unequal groups": lambda x: xla.all_reduce(x, "MEAN", [[1], [0, 2, 3]]),
    "max": lambda x: xla.all_reduce(x, "MAX", HALVES),
    "gather": lambda x: xla.all_gather(x, 1, HALVES),
    "exchange": lambda x: xla.all_to_all(x, 0, 1, HALVES),
}


def loss_of(operation):
    """One replica's objective: a weighted sum of cubes, other weights on each replica and element."""

    def loss(x):
        y = operation(x)
        weights = tf.cast(tf.reshape(tf.range(1, tf.size(y) + 1), tf.shape(y)), x.dtype)
        return tf.reduce_sum(weights * y**3) * tf.cast(xla.replica_id() + 1, x.dtype) / 10.0

    return loss


def replicated(fn, *arrays):
    return np.stack([result.numpy() for result in xla.replicate(fn, list(zip(*arrays, strict=True)))])


def example(n):
    return np.random.default_rng(3).normal(size=(n, *SHAPE))


def check(loss, x):
    """The gradient along a random direction on each replica: how the sum of all replicas' losses changes."""
    gradient = gradient_of(loss)

    def run(x):
        results = xla.replicate(lambda x: (loss(x), gradient(x)), [[part] for part in x])
        return sum(float(value) for value, _ in results), np.stack([slope.numpy() for _, slope in results])

    slopes = run(x)[1]
    generator = np.random.default_rng(5)
    step = 1e-5
    # A direction for each replica by itself, so that a gradient that went to the wrong one is found.
    for replica in range(len(x)):
        direction = np.zeros_like(x)
        direction[replica] = generator.normal(size=x.shape[1:])
        ahead, behind = (run(x + sign * step * direction)[0] for sign in (1, -1))
        np.testing.assert_allclose((slopes * direction).sum(), (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_gradient_is_that_of_the_sum_of_all_objectives(name):
    check(loss_of(OPERATIONS[name]), example(4))


@pytest.mark.parametrize("name", IN_GROUPS)
def test_it_is_so_in_groups(name):
    check(loss_of(IN_GROUPS[name]), example(4))


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_have_gradients(name):
    """The second derivative along a direction is the change of the first one along it."""
    gradient = gradient_of(loss_of(OPERATIONS[name]))

    def both(x, direction):
        with tf.GradientTape() as tape:
            tape.watch(x)
            first = gradient(x)
            along = tf.reduce_sum(first * direction)
        return tf.stack([first, tape.gradient(along, x)])

    x = example(2)
    direction = np.random.default_rng(5).normal(size=x.shape)
    step = 1e-5
    ahead, behind = (replicated(both, x + sign * step * direction, direction)[:, 0] for sign in (1, -1))
    second = replicated(both, x, direction)[:, 1]
    np.testing.assert_allclose(second, (ahead - behind) / (2 * step), rtol=1e-5, atol=1e-6)


def test_the_gradient_of_an_extreme_is_shared_by_those_that_have_it():
    fn = gradient_of(lambda x: xla.all_reduce(x, "MAX"))
    results = xla.replicate(fn, [[x] for x in (5.0, 1.0, 5.0)])
    assert [float(result) for result in results] == [1.5, 0.0, 1.5]


def test_the_gradient_of_gathered_scalars_is_a_scalar():
    weights = tf.constant([1.0, 10.0])
    fn = gradient_of(lambda x: tf.reduce_sum(xla.all_gather(x) * weights))
    results = xla.replicate(fn, [[1.0], [2.0]])
    assert [result.numpy().tolist() for result in results] == [2.0, 20.0]


def test_nothing_has_a_gradient_of_its_own_shape():
    fn = gradient_of(lambda x: tf.reduce_sum(xla.all_gather(x) * 2.0) + tf.reduce_sum(xla.cross_replica_sum(x)))
    assert [result.shape.as_list() for result in xla.replicate(fn, [[tf.zeros([0, 3])]] * 2)] == [[0, 3]] * 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_gradients_are_of_the_dtype_of_the_value(dtype):
    fn = gradient_of(lambda x: xla.cross_replica_sum(x) + xla.all_gather(x)[:1] + xla.ppermute(x, [(0, 1), (1, 0)]))
    results = xla.replicate(fn, [[tf.constant([1.0], dtype)], [tf.constant([2.0], dtype)]])
    # Of the sum 2; of what was gathered, both replicas took replica 0's: 2 for that one; of the permutation 1.
    assert [complex(result.numpy()[0]) for result in results] == [5.0, 3.0]
    assert results[0].dtype == dtype


class TestInsideControlFlow:
    @pytest.mark.parametrize(
        ("name", "loop"),
        [
            ("sum", "maximum_iterations"),
            ("max", "tf.range"),
            ("gather", "maximum_iterations"),
            ("exchange 0 1", "tf.range"),
        ],
    )
    def test_loops(self, name, loop):
        operation = OPERATIONS[name]
        step = lambda x, y: tf.tanh(tf.reshape(operation(y), [-1, *SHAPE])[0] * 0.7 + x)  # noqa: E731

        def with_while(x):
            return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, step(x, y)), (0, x), maximum_iterations=3)[1]

        def with_range(x):
            y = x
            for _ in tf.range(3):
                y = step(x, y)
            return y

        check(loss_of(with_while if loop == "maximum_iterations" else with_range), example(2))

    @pytest.mark.parametrize("taken", [True, False])
    def test_branches(self, taken):
        condition = tf.Variable(taken)
        branch = lambda x: tf.cond(condition, lambda: xla.cross_replica_sum(x), lambda: xla.all_to_all(x, 0, 0) * 3.0)  # noqa: E731
        check(loss_of(branch), example(2))

    def test_nested_functions(self):
        inner = tf.function(lambda x: xla.all_gather(tf.sin(x), 1))
        check(loss_of(lambda x: inner(x) * 2.0), example(2))

    def test_recomputed_gradients(self):
        check(loss_of(tf.recompute_grad(lambda x: xla.cross_replica_sum(tf.sin(x)))), example(2))

    def test_a_loop_without_a_bound_says_how_to_give_one(self):
        def loss(x):
            y, i = x, 0
            while tf.reduce_sum(y) < 100.0:
                y = xla.cross_replica_sum(y) * 2.0
                i += 1
            return tf.reduce_sum(y)

        x = [[tf.ones([2])]] * 2
        assert float(xla.replicate(loss, x)[0]) == 128.0  # without a gradient it needs none
        with pytest.raises(LoweringError, match="maximum_iterations"):
            xla.replicate(gradient_of(loss), x)


def test_a_training_step_on_replicas_is_one_on_the_whole_batch():
    """What collectives are for: the same weights as one device with all data gets."""
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(4, 8, 3)), generator.normal(size=(4, 8, 1))
    w = tf.Variable(generator.normal(size=(3, 1)))
    start = w.numpy()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - y) ** 2)
        w.assign_sub(0.1 * xla.all_reduce(tape.gradient(loss, w), "MEAN"))

    xla.replicate(step, list(zip(x, y, strict=True)))
    rows, targets = x.reshape(-1, 3), y.reshape(-1, 1)
    expected = start - 0.1 * 2 * rows.T @ (rows @ start - targets) / len(rows)
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-12)
