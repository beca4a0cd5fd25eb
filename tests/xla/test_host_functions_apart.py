"""Host functions outlive the trace they were found in: each call goes to the function, and the objects, of its own."""

import pytest
import tensorflow as tf
from helpers.host_work import SCALAR

from replica_engine import TPUStrategy, xla

ONE = tf.constant(1.0)


@pytest.fixture
def run():
    """Runs a body with 1.0 on two replicas; the value on replica 0."""
    strategy = TPUStrategy(num_cores=2)
    return lambda body: strategy.experimental_local_results(strategy.run(body, args=(ONE,)))[0]


def test_functions_that_close_over_other_numbers_are_other_functions(run):
    def make(k):
        times = lambda v: v * k  # noqa: E731
        return lambda x: xla.outside_compilation(times, x)

    assert [float(run(make(k))) for k in (2.0, 3.0, 2.0)] == [2.0, 3.0, 2.0]


def test_equal_lists_are_not_the_same_list(run):
    def train():
        log = []

        def note(x):
            log.append(float(x))

        run(lambda x: xla.outside_compilation(note, x))
        return log

    assert (train(), train()) == ([1.0, 1.0], [1.0, 1.0])


def test_an_argument_that_holds_no_tensors_is_the_users_own(run):
    log, named = [], {}

    def note(log, named, x):
        log.append(float(x))
        named[float(x)] = "seen"

    run(lambda x: xla.outside_compilation(note, log, named, x))
    assert (log, named) == ([1.0, 1.0], {1.0: "seen"})


def test_keys_need_not_be_comparable(run):
    assert float(run(lambda x: xla.outside_compilation(lambda d: d[1] + d["a"], {1: x, "a": x}))) == 2.0


def test_a_function_made_in_a_loop_keeps_what_it_was_made_with(run):
    log = []

    def body(x):
        for i, name in enumerate(["first", "second"]):
            y = x + i

            def note():
                log.append((name, float(y)))  # noqa: B023

            xla.outside_compilation(note)

    run(body)
    assert sorted(log) == [("first", 1.0)] * 2 + [("second", 2.0)] * 2


def test_functions_share_what_one_of_them_assigns_to(run):
    def body(x):
        count = 0

        def add():
            nonlocal count
            count += 1

        def show():
            seen.append(count)

        xla.outside_compilation(add)
        xla.outside_compilation(show)

    seen = []
    run(body)
    assert max(seen) == 2


def test_what_a_host_function_assigns_to_compiles_nothing_again(run):
    count = 0

    def add():
        nonlocal count
        count += 1

    def body(x):
        xla.outside_compilation(add)

    run(body)
    before = xla.counts()
    run(body)
    assert count == 4
    assert (xla.counts() - before).compiles == 0


def test_what_a_host_function_changes_and_the_body_uses_is_traced_again(run):
    scale = 2.0

    def change():
        nonlocal scale
        scale = 5.0

    def body(x):
        xla.outside_compilation(change)
        return x * scale

    assert [float(run(body)), float(run(body))] == [2.0, 5.0]


def test_a_summary_step_that_is_a_variable_is_of_no_harm(run):
    tf.summary.experimental.set_step(tf.Variable(0, dtype=tf.int64))
    try:
        assert float(run(lambda x: xla.outside_compilation(lambda v: v + 1.0, x))) == 2.0
    finally:
        tf.summary.experimental.set_step(None)


def test_a_result_or_none_is_a_result(run):
    @xla.returns(SCALAR)
    def fn(x):
        return x.numpy() + 1.0 or None

    assert float(run(lambda x: xla.outside_compilation(fn, x))) == 2.0
