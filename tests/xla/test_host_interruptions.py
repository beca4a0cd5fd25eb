"""Ctrl-C, and what else is to end the program, in host work."""

import _thread
import contextlib
import os
import signal
import threading

import pytest
import tensorflow as tf
from helpers.host_work import check_strategy_works, check_works
from helpers.interrupted import ctrl_c_at_line, ctrl_c_raises

from replica_engine import TPUStrategy, xla
from replica_engine.errors import ProgramError
from replica_engine.watch import watchdog
from replica_engine.xla.host_calls.session import Session
from replica_engine.xla.state import device_value


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)], ids=lambda error: type(error).__name__)
def test_what_is_to_end_the_program_leaves_the_run(error):
    variable = tf.Variable(1.0)

    def fn():
        raise error

    def body():
        variable.assign(2.0)
        xla.outside_compilation(fn)

    with pytest.raises(type(error)) as raised:
        xla.replicate(body, num_replicas=2)
    assert raised.value is error
    assert variable.numpy() == 1.0
    check_works()


def test_an_interrupt_while_it_is_traced_leaves_the_strategy_usable(two):
    def fn(x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two.run(lambda: xla.outside_compilation(lambda x: [fn(x)], tf.constant(1.0)))
    check_strategy_works(two)


@contextlib.contextmanager
def interrupts():
    """`go, interrupt`: a host function that calls `interrupt` is in it while Ctrl-C is pressed, and stays till `go`."""
    go, asleep = threading.Event(), threading.Barrier(2)

    def interrupt():
        asleep.wait(300)
        if int(xla.replica_id()) == 0:
            os.kill(os.getpid(), signal.SIGINT)
        go.wait(300)

    with ctrl_c_raises():
        try:
            yield go, interrupt
        finally:
            go.set()


def test_ctrl_c_is_answered_while_a_host_call_sleeps(two):
    with two.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
    woken = []

    with interrupts() as (go, interrupt):

        def body():
            variable.assign_add(tf.ones([]))
            xla.outside_compilation(sleep)
            xla.cross_replica_sum(variable.read_value())

        def sleep():
            interrupt()
            woken.append(int(xla.replica_id()))

        with pytest.raises(KeyboardInterrupt):
            two.run(body)
        assert woken == [], "it did not end the wait"
        go.set()
        check_strategy_works(two)
        assert variable.numpy() == 1.0


def test_ctrl_c_in_a_device_loop_ends_it(two):
    with two.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
    steps = []

    with interrupts() as (go, interrupt):

        def third(x):
            steps.append(float(x))
            if float(x) == 2.0:
                interrupt()

        def step(context, x):
            variable.assign_add(x)
            xla.outside_compilation(third, x)

        with pytest.raises(KeyboardInterrupt):
            two.run_steps(step, (tf.constant(float(i)) for i in range(1000)), iterations=1000)
        go.set()
        check_strategy_works(two)
        assert variable.numpy() == 1.0 + 0.0 + 1.0  # the steps before
        assert sorted(steps) == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]


def test_the_next_run_waits_for_the_one_that_was_interrupted(two):
    ended = []

    with interrupts() as (go, interrupt):

        def fn():
            interrupt()
            ended.append(int(xla.replica_id()))

        with pytest.raises(KeyboardInterrupt):
            two.run(lambda: xla.outside_compilation(fn))
        assert ended == []
        timer = threading.Timer(0.1, go.set)
        timer.start()
        two.run(lambda: tf.zeros([]))
        assert sorted(ended) == [0, 1]
        timer.join()


@pytest.mark.parametrize("waits_for", ["its program", "its turn"])
@pytest.mark.parametrize("timeout", [None, 100.0])
def test_ctrl_c_in_the_moment_before_a_wait(waits_for, timeout):
    """The interpreter has been told of it, and the thread that waits is not woken."""
    go, inside, waited = threading.Event(), threading.Event(), []

    def stuck():
        inside.set()
        waited.append(go.wait(300))

    def interrupted():
        _thread.interrupt_main()
        waited.append(go.wait(300))

    strategy = TPUStrategy(num_cores=2, timeout=timeout)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ctrl_c_raises())
        if waits_for == "its turn":
            other = TPUStrategy(num_cores=2)
            running = threading.Thread(target=other.run, args=(lambda: xla.outside_compilation(stuck),))
            pressing = threading.Timer(1.0, _thread.interrupt_main)  # by when this thread waits for its turn
            for thread in (running, pressing):
                stack.callback(thread.join, 300)
            running.start()
            inside.wait(300)
            pressing.start()
        stack.callback(go.set)
        with pytest.raises(KeyboardInterrupt):
            strategy.run(lambda: xla.outside_compilation(interrupted if waits_for == "its program" else lambda: None))
        assert not waited, "it did not end the wait"
    check_strategy_works(strategy)


def test_an_error_after_the_launch_does_not_hide_what_ended_it(two, monkeypatch):
    """A program that is given up may fail afterwards, and what is to be done with its values then fails too."""
    with two.scope():
        variable = tf.Variable(1.0)

    def fails():
        raise ValueError("the first error")

    def launched(value):
        raise ProgramError("the second error")

    def body():
        variable.assign_add(1.0)
        xla.outside_compilation(fails)

    monkeypatch.setattr(device_value.DeviceValue, "launched", launched)
    with pytest.raises(ValueError, match="the first error"):
        two.run(body)


def test_ctrl_c_after_a_host_call_has_failed_leaves_nothing_that_interrupts_later(two):
    """What limits the wait for such a program would interrupt whatever the user runs by then."""

    def fails():
        raise KeyError("the user's")

    def run():
        with pytest.raises(KeyError):
            two.run(lambda: xla.outside_compilation(fails))

    run()
    with ctrl_c_raises():
        for code in (Session.end.__code__, watchdog.Wait.__exit__.__code__):
            number = 1
            while ctrl_c_at_line(number, code, run):
                check_strategy_works(two)  # which waits for the end of the program
                assert not watchdog._watchdog._watches, f"{code.co_name}, line {number}"
                number += 1
            assert number > 5
