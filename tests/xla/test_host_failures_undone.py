"""After host work has failed all variables are as before the run, and the next run works."""

import concurrent.futures
import contextlib
import functools
import textwrap

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import Failing, X, check_strategy_works, check_works, fails_on, raised_by, values

from replica_engine import TPUStrategy, xla
from replica_engine.xla.host_calls import session


@pytest.mark.parametrize("form", ["eager", "in a function"])
def test_variables_of_a_strategy_are_as_before(two, form):
    with two.scope():
        mirrored = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
        apart = tf.Variable(1.0)
        on_read = tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ)
    fn = fails_on(1, Failing(1), when=lambda x: x < 0.0)

    def body(x):
        mirrored.assign_add(x)
        apart.assign_add(tf.cast(xla.replica_id(), tf.float32))
        on_read.assign_add(xla.outside_compilation(fn, x))
        mirrored.assign_add(x)

    contents = lambda: [list(values(two.experimental_local_results(each))) for each in (mirrored, apart, on_read)]  # noqa: E731
    run = lambda x: two.run(body, args=(x,))  # noqa: E731
    run = tf.function(run) if form == "in a function" else run
    run(tf.constant(2.0))
    before = contents()
    assert before == [[5.0, 5.0], [1.0, 2.0], [13.0, 13.0]]
    for _ in range(2):
        with pytest.raises((Failing, tf.errors.UnknownError), match="code 1"):
            run(tf.constant(-1.0))
        assert contents() == before
    run(tf.constant(2.0))
    assert contents() == [[9.0, 9.0], [1.0, 3.0], [25.0, 25.0]]


def test_plain_variables_are_as_before():
    variable = tf.Variable([1.0])
    fn = fails_on(0, Failing(1), when=lambda x: x < 0.0)

    def body(x):
        variable.assign_add([x])
        return xla.outside_compilation(fn, x) + variable

    for x, expected in ((1.0, 2.0), (-5.0, 2.0), (1.0, 3.0)):
        with pytest.raises(Failing) if x < 0.0 else contextlib.nullcontext():
            xla.replicate(body, [[tf.constant(x)]] * 2)
        assert variable.numpy() == [expected]


def test_random_numbers_go_on():
    """A failed run draws as any other; the next one does not repeat an earlier one's."""
    fn = fails_on(0, Failing(1), when=lambda x: x < 0.0)

    def body(x):
        drawn = tf.random.normal([4])
        xla.outside_compilation(fn, x)
        return drawn

    first = xla.replicate(body, X)[0].numpy()
    with pytest.raises(Failing):
        xla.replicate(body, [[tf.constant(-1.0)]] * 2)
    assert not np.array_equal(first, xla.replicate(body, X)[0])


def test_of_replicas_with_different_shapes_one_may_fail(two):
    """Each takes a branch of its own."""
    with two.scope():
        variable = tf.Variable(1.0)
    share = lambda context: tf.ones([2 + context.replica_id_in_sync_group])  # noqa: E731
    x = two.experimental_distribute_values_from_function(share)

    def fn(x):
        if x.shape[0] == 3:
            raise Failing(3)

    def body(x):
        variable.assign(5.0)
        xla.outside_compilation(fn, x)

    found = raised_by(lambda: two.run(body, args=(x,)))
    assert found.__notes__[0].startswith("replica 1 of 2, CPU:1, in outside_compilation(fn) at")
    assert variable.numpy() == 1.0
    two.run(body, args=(tf.ones([2]),))
    assert variable.numpy() == 5.0


def test_after_a_failure_the_later_calls_are_not_made():
    calls = []
    fails = fails_on(0, Failing(1))

    def note(_):
        calls.append(int(xla.replica_id()))

    def body(x):
        x = xla.cross_replica_sum(xla.outside_compilation(fails, x))
        xla.outside_compilation(note, x)

    raised_by(lambda: xla.replicate(body, X))
    assert calls == []


def endless_in_its_condition(call, x):
    while call(x) < 1000.0:
        x = x * 1.0
    return x


def endless_with_collectives(call, x):
    while call(x) < 1000.0:
        x = xla.cross_replica_sum(x) * 0.5
    return x


def endless_in_its_body(call, x):
    while x < 1000.0:
        x = call(x)
    return x


@pytest.mark.parametrize("body", [endless_in_its_condition, endless_with_collectives, endless_in_its_body])
def test_a_loop_that_does_not_end_on_zeros_ends(body, monkeypatch):
    monkeypatch.setattr(session, "_PATIENCE", 200)
    error = Failing(1)
    call = functools.partial(xla.outside_compilation, fails_on(0, error))
    assert raised_by(lambda: xla.replicate(lambda x: body(call, x), X)) is error
    check_works()


PROGRAM = """
    import os, signal, threading
    import tensorflow as tf
    from replica_engine import xla
    from replica_engine.xla.host_calls import session
    session._STUCK_AFTER = 0.5

    @xla.returns(tf.TensorSpec([], tf.float32))
    def fails():
        raise ArithmeticError("of the user's own")

    def body():
        x = xla.outside_compilation(fails)
        while x < 100.0:
            x = x * 2.0
        return x

    def run():
        try:
            xla.replicate(body, num_replicas=2)
        except ArithmeticError as error:
            print(error, len(error.__notes__) > 1)

    HOW
    print([int(each) for each in xla.replicate(lambda: xla.replica_id(), num_replicas=2)], flush=True)
    os._exit(0)
"""
HOW_IT_IS_RUN = {
    "on the main thread": "run()",
    "where SIGINT is ignored": "signal.signal(signal.SIGINT, signal.SIG_IGN); run()",
    "on another thread": "thread = threading.Thread(target=run); thread.start(); thread.join()",
}


@pytest.mark.parametrize("how", HOW_IT_IS_RUN)
def test_a_loop_on_the_devices_that_does_not_end_on_zeros_is_left(programs, how):
    """It calls the host no more. In a process of its own, since nothing ends it."""
    done = programs.run(textwrap.dedent(PROGRAM).replace("HOW", HOW_IT_IS_RUN[how]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["of the user's own True", "[0, 1]"]


def test_a_failing_strategy_leaves_another_one_alone():
    failing, fine = TPUStrategy(num_cores=2), TPUStrategy(num_cores=4)
    with fine.scope():
        total = tf.Variable(0, aggregation=tf.VariableAggregation.SUM)
    error = Failing(1)
    fails = fails_on(1, error, when=lambda x: x > 2.0)

    def fails_later(x):
        for _ in tf.range(4):
            x = xla.cross_replica_sum(xla.outside_compilation(fails, x)) / 10.0
        return x

    def works():
        total.assign_add(xla.outside_compilation(lambda: tf.identity(xla.replica_id())))

    def fail(times):
        for _ in range(times):
            assert raised_by(lambda: failing.run(fails_later, args=(tf.constant(1.0),))) is error

    def work(times):
        for _ in range(times):
            fine.run(works)

    for _ in range(2):
        fail(1)
        work(1)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(fail, 5), pool.submit(work, 5)]:
            done.result()
    assert total.numpy() == 7 * 6
    check_strategy_works(failing)
