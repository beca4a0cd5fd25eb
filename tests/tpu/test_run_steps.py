"""Device loops: many steps in one launch, compiled once, and several loops at once."""

import gc
import itertools
import threading
import weakref

import numpy as np
import pytest
import tensorflow as tf
from helpers.loop_steps import SUM, at_once, hosted, make_total, numbers

from replica_engine import xla

# One launch.


def test_steps_run_in_one_launch_and_are_compiled_once(two, launched):
    """For any number of steps, also with a step function that is defined again for each call."""
    total = two.variable(0.0, SUM)
    before = xla.counts()
    for iterations in (1, 5, 3):

        def step(context, x):
            total.assign_add(x)

        two.strategy.run_steps(step, numbers(iterations), iterations)
    assert total.numpy() == 2 * (0 + 0 + 1 + 2 + 3 + 4 + 0 + 1 + 2)
    assert launched() == 3
    counts = xla.counts() - before
    assert (counts.traces, counts.lowerings, counts.compiles) == (1, 1, 1)


def test_steps_per_run_is_how_many_steps_if_it_is_not_said(replicas):
    some = replicas(2, steps_per_run=3)
    total, step = make_total(some)
    batches = iter(numbers(10))
    extended = some.strategy.extended
    assert some.strategy.run_steps(step, batches).steps == 3
    assert extended.experimental_run_steps_on_iterator(lambda context, x: None, batches).steps == 3
    assert some.strategy.run_steps(step, batches, 2).steps == 2
    assert total.numpy() == 2 * (0 + 1 + 2 + 6 + 7)


def test_a_step_may_do_nothing_and_take_nothing(two, launched):
    assert two.strategy.run_steps(lambda context: None, itertools.repeat(()), 4).steps == 4
    assert two.strategy.run_steps(lambda context, x: None, itertools.repeat(None), 4).steps == 4
    assert launched() == 2


def test_control_flow_of_a_step_is_converted_as_it_is_by_run(two):
    def collatz(x):
        steps = 0
        while x > 1.0:
            if x % 2.0 == 0.0:
                x /= 2.0
            else:
                x = 3.0 * x + 1.0
            steps += 1
        return steps

    def step(context, x):
        context.set_last_step_output("steps", collatz(x))

    assert two.each(two.strategy.run(collatz, args=(tf.constant(27.0),))) == [111, 111]
    for fn in (step, tf.function(step)):
        context = two.strategy.run_steps(fn, [np.float32(27.0)], 1)
        assert two.each(context.last_step_outputs["steps"]) == [111, 111]


# Several at once.


def test_loops_of_two_strategies_on_two_threads_do_not_mix(replicas):
    strategies = [replicas(2), replicas(3)]
    loops = []
    for some in strategies:
        total, step = make_total(some)

        def loop(some=some, step=step):
            batches = iter(numbers(50))
            return [some.each(some.strategy.run_steps(step, batches, 10).last_step_outputs["x"])[0] for _ in range(5)]

        loops.append((total, loop))
    for found in at_once(*(loop for _, loop in loops)):
        assert found == [9.0 + 10 * each for each in range(5)]
    assert [total.numpy() for total, _ in loops] == [2 * 1225.0, 3 * 1225.0]


def test_loops_of_one_strategy_on_three_threads_lose_no_step(two):
    total, step = make_total(two)
    before = xla.counts()

    def loop():
        for _ in range(4):
            assert two.strategy.run_steps(step, numbers(10), 10).steps == 10

    def steps():
        for _ in range(10):
            two.strategy.run(lambda: total.assign_add(total * 0.0 + 1.0))

    at_once(loop, loop, loop, steps)
    assert total.numpy() == 2 * (12 * 45.0) + 2 * 10.0
    counts = xla.counts() - before
    assert (counts.launches, counts.compiles) == (22, 2)


def test_a_strategy_whose_loops_have_run_is_freed(replicas):
    def once():
        some = replicas(2)
        total, step = make_total(some)

        def host(x):
            if x > 2.0:
                raise OSError("gone")

        def both(context, x):
            step(context, x)
            hosted(host)(x)

        some.strategy.run_steps(both, numbers(3), 3)
        with pytest.raises(OSError, match="gone"):
            some.strategy.run_steps(both, numbers(5), 5)
        return weakref.ref(some.strategy), weakref.ref(total)

    alive, wait = once(), threading.Event()
    for _ in range(200):  # a timer's thread that was told to end may have to wake first
        gc.collect()
        if not any(each() for each in alive) or wait.wait(0.01):
            break
    assert [each() for each in alive] == [None, None]
