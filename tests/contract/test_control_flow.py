"""Merge calls inside control flow: each operator with every kind of merge call, against the same in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_mirrored import context

pytestmark = [pytest.mark.graphs, pytest.mark.replicas(3)]  # first, between, last
ALONE_TOO = pytest.mark.replicas(1, 3)  # one test of conditions and one of loops: nothing else depends on the number

START = np.array([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.25], [2.0, 1.5]], np.float32)  # x of each replica


def total_of(strategy, x):
    return strategy.reduce("SUM", x, axis=None)


class Merging:
    """Every kind of merge call: on a replica (`__call__`), and in NumPy for all replicas at once (`in_numpy`)."""

    def __init__(self, strategy):
        aggregated = {"trainable": False, "synchronization": tf.VariableSynchronization.ON_WRITE}
        with strategy.scope():
            self.weight = tf.Variable([1.0, 2.0])
            self.sum = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, **aggregated)
            self.mean = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN, **aggregated)
            self.optimizer = keras.optimizers.SGD(0.01)
            self.optimizer.build([self.weight])
        self.expected = [np.array([1.0, 2.0], np.float32), 0.0, 0.0]
        self.order = np.arange(1, strategy.num_replicas_in_sync + 1, dtype=np.float32)[:, None]

    def __call__(self, x):
        total = context().all_reduce("SUM", x)
        mean = context().all_reduce("MEAN", x * x)
        gathered = context().all_gather(x[tf.newaxis], axis=0)
        merged = context().merge_call(total_of, args=(tf.sin(x),))
        self.sum.assign_add(x[0])
        self.mean.assign(x[1])
        self.optimizer.apply([x * self.weight], [self.weight])
        x = 0.5 * x + 0.1 * total - 0.02 * mean + 0.05 * tf.reduce_sum(gathered * self.order, 0)
        return x + 0.1 * merged + 0.01 * self.weight

    def light(self, x):
        """Two kinds of them, for a second place in the same operator."""
        self.sum.assign_add(x[0])
        return 0.5 * x + 0.1 * context().all_reduce("SUM", x)

    def light_in_numpy(self, xs):
        weight, total, mean = self.expected
        self.expected = [weight, total + xs[:, 0].sum(), mean]
        return 0.5 * xs + 0.1 * xs.sum(0)

    def in_numpy(self, xs):
        weight, total, _ = self.expected
        gathered = (xs * self.order).sum(0)
        weight = weight - 0.01 * (xs * weight).sum(0)
        self.expected = [weight, total + xs[:, 0].sum(), xs[:, 1].mean()]
        new = 0.5 * xs + 0.1 * xs.sum(0) - 0.02 * (xs * xs).mean(0) + 0.05 * gathered
        return new + 0.1 * np.sin(xs).sum(0) + 0.01 * weight

    @property
    def variables(self):
        return [variable.numpy() for variable in (self.weight, self.sum, self.mean)]


class InNumpy:
    """`Merging` as a program of all replicas at once."""

    def __init__(self, merging):
        self.light, self._all = merging.light_in_numpy, merging.in_numpy

    def __call__(self, xs):
        return self._all(xs)


@pytest.fixture
def merging(strategy):
    return Merging(strategy)


@pytest.fixture
def check(strategy, merging, per_replica):
    """`check(program, plain, *args)`: each replica runs `program(merging, x, *args)`, and `plain` is it in NumPy."""
    size = strategy.num_replicas_in_sync

    def check(program, plain, *args):
        step = tf.function(lambda x, *args: strategy.run(program, args=(merging, x, *args)))
        results = step(per_replica(lambda index: START[index]), *map(tf.constant, args))
        expected = plain(InNumpy(merging), START[:size])
        got = [np.asarray(each) for each in strategy.experimental_local_results(results)]
        np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)
        for value, other in zip(merging.variables, merging.expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=2e-5, atol=2e-5)

    return check


def test_conditions(check):
    def program(merging, x, yes, index):
        x = tf.cond(yes, lambda: merging(x), lambda: x + 100.0)
        x = tf.cond(yes, lambda: x - 1.0, lambda: merging.light(x))
        x = tf.switch_case(index, [lambda: x, lambda: x + 100.0, lambda: merging(x) + 0.5])
        x = tf.switch_case(index + 7, [lambda: x], default=lambda: merging.light(x))
        return tf.case([(index > 5, lambda: x), (index > 1, lambda: merging.light(x))], default=lambda: x + 100.0)

    check(program, lambda merging, x: merging.light(merging.light(merging(merging(x) - 1.0) + 0.5)), True, 2)


@ALONE_TOO
def test_branches_that_only_differ_in_merges(check):
    """Nested, and with a merge call in one branch only."""

    def program(merging, x, yes, index):
        def outer():
            y = tf.cond(index > 1, lambda: merging.light(x), lambda: x)
            return tf.switch_case(index, [lambda: y, lambda: merging.light(y), lambda: y * 2.0])

        return tf.cond(yes, outer, lambda: x)

    check(program, lambda merging, x: merging.light(x) * 2.0, True, 2)


def test_loops(check):
    def program(merging, x, count):
        x = tf.while_loop(lambda i, _: i < count, lambda i, x: (i + 1, merging(x)), (0, x))[1]
        x = tf.foldl(lambda x, step: merging.light(x) + step, tf.range(2.0), initializer=x)
        x = tf.scan(lambda x, step: merging.light(x) - step, tf.range(2.0), initializer=x)[-1]
        return tf.reduce_sum(tf.map_fn(lambda step: merging(x + step), tf.range(2.0), fn_output_signature=x.dtype), 0)

    def plain(merging, x):
        x = merging(merging(x))
        for step in (0.0, 1.0, 0.0, -1.0):
            x = merging.light(x) + step
        return merging(x) + merging(x + 1.0)

    check(program, plain, 2)


@ALONE_TOO
def test_loops_in_conditions_in_loops(check):
    def program(merging, x, count):
        def inner(x):
            return tf.while_loop(lambda j, _: j < 2, lambda j, x: (j + 1, merging.light(x)), (0, x))[1]

        def outer(i, x):
            return i + 1, tf.cond(i > 0, lambda: inner(x), lambda: x - 1.0)

        return tf.while_loop(lambda i, _: i < count, outer, (0, x))[1]

    check(program, lambda merging, x: merging.light(merging.light(x - 1.0)), 2)


def test_autograph_conditions(check):
    def program(merging, x, yes, count):
        if yes:
            y = merging(x)
        else:
            y = x + 100.0
            y -= 1.0
        if count > 5:
            return y
        elif count > 2 and yes:
            z = merging.light(y)
            if count == 3:
                z = merging.light(z) + 1.0
        else:
            z = y
        return z

    check(program, lambda merging, x: merging.light(merging.light(merging(x))) + 1.0, True, 3)


def test_autograph_loops(check):
    def program(merging, x, count):
        for i in tf.range(6):
            if i == 1:
                continue
            if i > count:
                break
            x = merging(x)
        for i in tf.range(count):
            last = merging.light(x) + tf.cast(i, tf.float32)  # undefined before
            x = last
        done = 0
        while done < 2:
            done += 1
            x = merging.light(x)
            if done > count:
                x -= 100.0
        for row in tf.stack([x, last]):
            x = merging.light(x) + row
        return x

    def plain(merging, x):
        last = merging.light(merging.light(merging(merging(x)))) + 1.0
        first = merging.light(merging.light(last))
        return merging.light(merging.light(first) + first) + last

    check(program, plain, 2)


def test_conditions_that_merge(check):
    """Until all replicas have done: in `while`, in `and`, and in a loop of TensorFlow."""

    def program(merging, x, count):
        while context().all_reduce("SUM", count) < 20 and context().all_reduce("MEAN", count) > 0:
            count += 3
            x = merging.light(x)
        of_all = tf.while_loop(
            lambda i, _: context().all_reduce("MEAN", i) < 2, lambda i, x: (i + 1, merging.light(x)), (0, x)
        )
        return of_all[1]

    def plain(merging, x):
        count = 2
        while count * len(x) < 20:
            count += 3
            x = merging.light(x)
        return merging.light(merging.light(x))

    check(program, plain, 2)


def test_autograph_returns(check):
    def early(merging, x, count):
        if count > 1:
            if count > 5:
                return x + 100.0
            else:
                x = merging.light(x)
                return merging.light(x) * 2.0
        else:
            return merging.light(x) + 100.0

    def program(merging, x, count):
        x = early(merging, x, count)
        for i in tf.range(count):  # AutoGraph has no return in a condition in a loop
            x = merging.light(x)
            return x + tf.cast(i, tf.float32)
        return x + 100.0

    check(program, lambda merging, x: merging.light(merging.light(merging.light(x)) * 2.0), 2)


def test_an_eager_run(strategy, n, merging, per_replica):
    """Operators of an eager replica are Python; those of a `tf.function` that it calls are not."""

    @tf.function
    def inner(x, yes):
        if yes:
            x = merging(x)
        return x

    def program(x):
        x = tf.cond(tf.constant(True), lambda: merging(x), lambda: x)
        return inner(inner(x, tf.constant(True)), tf.constant(False))

    results = strategy.run(program, args=(per_replica(lambda index: START[index]),))
    expected = merging.in_numpy(merging.in_numpy(START[:n]))
    np.testing.assert_allclose(strategy.experimental_local_results(results), expected, rtol=2e-5, atol=2e-5)
