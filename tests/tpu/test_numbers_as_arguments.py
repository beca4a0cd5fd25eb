"""Python numbers among the arguments: floats are tensors in the body, where they can be."""

import math

import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import ProgramError, WorkerLostError


@pytest.fixture
def outcome(two):
    """`outcome(fn, *args)`: each replica's result, in eager mode and in a `tf.function`, which agree."""

    def outcome(fn, *args):
        run = two.strategy.run
        forms = [run(fn, args), run(tf.function(fn), args), tf.function(lambda: run(fn, args))()]
        values = [[each.numpy().tolist() for each in two.strategy.experimental_local_results(form)] for form in forms]
        assert values == [values[0]] * len(values)
        return values[0]

    return outcome


def test_each_replica_has_a_result(outcome):
    assert outcome(lambda x: x + 5.0 + 5.0, 25.0) == [35.0, 35.0]


def test_a_loop_on_one_is_a_loop_of_the_program(outcome):
    def fn(x):
        x = x + 5.0
        while x < 50.0:
            x = xla.outside_compilation(lambda x: x + 6.0, x)
        return x + 4.0

    assert outcome(fn, 25.0) == [58.0, 58.0]


def test_they_have_gradients(outcome):
    assert outcome(lambda x, y: tf.gradients([(x + 7.0) ** 4 * y], [x])[0], 2.0, 3.0) == [8748.0, 8748.0]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: tf.fill([2], math.sqrt(x)), [2.0, 2.0]),
        (lambda x: x * tf.ones([2], tf.float64), [4.0, 4.0]),
        (lambda x: tf.range(0.0, x, 2.0), [0.0, 2.0]),
        (lambda x: tf.Variable(x) if x < 0 else tf.constant(x), 4.0),
    ],
    ids=["of Python's functions", "of another dtype", "as a bound", "as a choice"],
)
def test_a_body_that_wants_a_number_gets_one(outcome, fn, expected):
    assert outcome(fn, 4.0) == [expected, expected]


def test_one_program_serves_all(two):
    step = lambda x, rate: x * rate  # noqa: E731
    two.strategy.run(step, args=(tf.ones([]), 0.5))
    before = xla.counts()
    for rate in (0.25, 2.0):
        results = two.strategy.run(step, args=(tf.ones([]), rate))
        assert [float(each) for each in two.strategy.experimental_local_results(results)] == [rate, rate]
    assert xla.counts().compiles == before.compiles
    assert xla.counts().traces == before.traces


def test_a_failure_is_the_bodys_own_and_a_run_is_not_repeated(two):

    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        two.strategy.run(fails, args=(1.0,))

    def on_host(x):
        raise KeyError("mine")

    def body(x):
        xla.outside_compilation(on_host, x)
        return x

    before = xla.counts().launches
    with pytest.raises(KeyError, match="mine"):
        two.strategy.run(body, args=(1.0,))
    assert xla.counts().launches == before + 1


def test_numbers_in_structures_are_settings(two):
    body = lambda settings: settings  # noqa: E731
    assert two.strategy.run(body, args=({"rate": 0.5, "name": "sgd"},)) == {"rate": 0.5, "name": "sgd"}


def test_integers_are_compiled_in(two):
    result = two.strategy.run(lambda size: tf.ones([size]), args=(3,))
    assert [each.shape for each in two.strategy.experimental_local_results(result)] == [(3,), (3,)]


def test_a_failure_that_is_not_the_body_s_does_not_trace_it_again(two):
    """A program that does not fit into memory, and a job that lost a worker."""
    traces = []

    def too_large(rate):
        traces.append(rate)
        noise = tf.random.normal([1 << 22, 1 << 20])
        return tf.reduce_sum(noise @ tf.transpose(noise)) * rate

    def of_the_job(rate):
        traces.append(rate)
        raise WorkerLostError("worker 1 is gone")

    for step, error in ((too_large, ProgramError), (of_the_job, WorkerLostError)):
        with pytest.raises(error):
            two.strategy.run(step, args=(0.5,))
        assert len(traces) == 1
        traces.clear()
