"""Nothing deadlocks or aborts on a few busy cores, and a run that fails leaves all as it was.

A deadlock in a collective could not be caught: the tests' time limit makes it a failure. SOAK=100 in the
environment runs a hundred times as many steps.
"""

import concurrent.futures
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import Failing

from replica_engine import xla
from replica_engine.errors import LoweringError, ReplicaMismatchError

SOAK = int(os.environ.get("SOAK", "1"))
COLLECTIVES = 16
REPLICAS = 16  # more than there are cores

pytestmark = pytest.mark.timeout(600 * SOAK)


class Stress:
    """A step with many collectives between matrix products, whose result is known."""

    def __init__(self, replicas):
        self.replicas = replicas
        self.total = replicas.variable(0.0)
        size = replicas.size
        self.inputs = replicas.spread(lambda i: np.full([16, 16], (i + 1) / size, np.float32))
        # A matrix of equal numbers times the identity is itself; the mean over replicas is the same on all.
        self.expected = (size + 1) / 2 / size

    def body(self, x):
        for index in range(COLLECTIVES):
            x = tf.matmul(x, tf.eye(16))
            if index % 3 == 0:
                x = xla.all_reduce(x, "MEAN")
            elif index % 3 == 1:
                x = xla.all_gather(x[:4], axis=0)[:4]
                x = tf.tile(x, [4, 1])
            else:
                x = xla.all_reduce(x, "MAX")
        self.total.assign_add(x[0, 0])
        return x

    def steps(self, count):
        """That many steps, each checked."""
        for _ in range(count):
            result = self.replicas.strategy.run(self.body, args=(self.inputs,))
            for one in self.replicas.strategy.experimental_local_results(result):
                array = one.numpy()
                assert array.min() == array.max() == pytest.approx(self.expected, rel=1e-6)

    def check(self, count):
        """That so many steps wrote to the variable."""
        found = self.replicas.components(self.total)
        assert found == [pytest.approx(count * self.expected, rel=1e-4)] * len(found)


@pytest.fixture
def busy():
    """Other processes that keep every core busy while the test runs."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
        for _ in range(os.cpu_count())
    ]
    try:
        for process in spinning:
            process.stdout.readline()  # it runs
        yield
    finally:
        for process in spinning:
            process.kill()
            process.communicate()


def test_replicas_meet_in_every_collective(replicas):
    stress = Stress(replicas(REPLICAS))
    stress.steps(30 * SOAK)
    stress.check(30 * SOAK)


@pytest.mark.usefixtures("busy")
@pytest.mark.full("keeps all cores busy")
def test_replicas_meet_while_others_keep_all_cores_busy(replicas):
    stress = Stress(replicas(REPLICAS))
    stress.steps(10 * SOAK)
    stress.check(10 * SOAK)


def test_strategies_on_two_threads_do_not_starve_each_other(replicas):
    both = [Stress(replicas(size)) for size in (2, 16)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(stress.steps, 20 * SOAK) for stress in both]:
            done.result()
    for stress in both:
        stress.check(20 * SOAK)


def test_host_functions_on_two_threads_do_not_starve_each_other(replicas):
    """Each step holds a thread of TensorFlow's pool, which has as many as there are cores."""
    both = [Stress(replicas(size)) for size in (2, 4)]

    def loop(stress):
        @tf.function
        def steps(count):
            for _ in tf.range(count):
                stress.replicas.strategy.run(stress.body, args=(stress.inputs,))

        for _ in range(5):
            steps(tf.constant(2 * SOAK))
            stress.total.numpy()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(loop, stress) for stress in both]:
            done.result()
    for stress in both:
        stress.check(10 * SOAK)


def test_a_data_set_beside_steps_does_not_starve_them(replicas):
    """Its threads and the steps' are the same few."""
    four = replicas(4)
    total = four.variable(0.0, tf.VariableAggregation.SUM)
    dataset = tf.data.Dataset.range(40 * SOAK).map(lambda i: tf.cast(i, tf.float32), num_parallel_calls=4)
    dataset = dataset.batch(4, drop_remainder=True).prefetch(4)

    @tf.function
    def epoch(iterator):
        for _ in tf.range(10 * SOAK):
            four.strategy.run(lambda x: tf.group(total.assign_add(tf.reduce_sum(x))), args=(next(iterator),))

    epoch(iter(four.strategy.experimental_distribute_dataset(dataset)))
    assert total.numpy() == sum(range(40 * SOAK))


# Runs that fail.


def draws(x):
    return x * tf.cast(next(iter(tf.data.Dataset.range(3))), tf.float32)


def raises(x):
    raise Failing("while it is traced")


FAILURES = {
    "an exception while tracing": (raises, Failing),
    "a shape that depends on data": (lambda x: tf.where(x > 0.0), LoweringError),
    "an op XLA has not": (draws, LoweringError),
    "shapes that do not fit": (lambda x: x + tf.ones([5]), ValueError),
}


@pytest.mark.parametrize("form", ["eager", "function"])
@pytest.mark.parametrize(("bad", "error"), FAILURES.values(), ids=FAILURES.keys())
def test_a_run_that_fails_leaves_variables_as_they_were(two, bad, error, form):
    mirrored = two.variable(1.0)
    own = two.variable(0.0, tf.VariableAggregation.SUM, on_read=True)
    x = tf.ones([2])

    def good(x):
        mirrored.assign_add(tf.reduce_sum(x))
        own.assign_add(tf.cast(xla.replica_id() + 1, tf.float32))
        return mirrored.read_value()

    def fails(x):
        good(x)
        return bad(x)

    run = two.strategy.run if form == "eager" else tf.function(lambda fn, args: two.strategy.run(fn, args=args))
    assert two.each(run(good, args=(x,))) == [3.0] * 2
    for _ in range(2):
        with pytest.raises(error):
            run(fails, args=(x,))
        assert two.components(mirrored) == [3.0] * 2
        assert two.components(own) == [1.0, 2.0]
    assert two.each(run(good, args=(x,))) == [5.0] * 2
    assert two.components(own) == [2.0, 4.0]


@pytest.mark.parametrize("form", ["eager", "function"])
def test_replicas_with_other_shapes_fail_before_anything_runs(two, form, launched):
    """Where they meet in a collective; else each could run its own."""
    variable = two.variable(1.0)

    def fn(x):
        variable.assign_add(xla.all_reduce(tf.reduce_sum(x)))
        return variable.read_value()

    run = lambda x: two.strategy.run(fn, args=(x,))  # noqa: E731
    run = run if form == "eager" else tf.function(run)
    assert two.each(run(two.spread(lambda i: [1.0]))) == [3.0] * 2
    error = ReplicaMismatchError if form == "eager" else tf.errors.OpError
    with pytest.raises((error, ReplicaMismatchError), match=r"drop_remainder=True"):
        run(two.spread(lambda i: [1.0] * (i + 1)))
    assert launched() == 1
    assert two.components(variable) == [3.0] * 2
    assert two.each(run(two.spread(lambda i: [1.0]))) == [5.0] * 2


def test_a_failing_variable_initializer_leaves_no_trace(two):
    class Lazy:
        weight = None
        fail = True

        def __call__(self):
            if self.fail:
                raise Failing("the initializer")
            if self.weight is None:
                self.weight = tf.Variable(3.0)
            self.weight.assign_add(1.0)
            return self.weight.read_value()

    lazy = Lazy()
    with pytest.raises(Failing):
        two.strategy.run(lazy)
    lazy.fail = False
    assert two.each(two.strategy.run(lazy)) == [4.0] * 2
    assert lazy.weight.numpy() == 4.0


def test_an_interrupted_trace_leaves_the_strategy_usable(two):
    """Ctrl-C while a long function is traced."""

    def fn():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.strategy.run(fn)
    assert two.each(two.strategy.run(lambda: xla.replica_id() + 1)) == [1, 2]
    assert isinstance(tf.distribute.get_replica_context(), tf.distribute.ReplicaContext)
    assert not tf.distribute.in_cross_replica_context()
