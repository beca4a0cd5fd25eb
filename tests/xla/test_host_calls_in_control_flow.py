"""Host calls in loops, branches and functions: where and as often as in eager mode, in order."""

import functools

import pytest
import tensorflow as tf
from helpers.host_work import noting, on_two, values

from replica_engine import xla


def in_a_loop_and_its_condition(call, x):
    while call(x) < 60.0:
        x = call(x * 2.0)
    return call(x)


def in_nested_loops(call, x):
    for _ in tf.range(2):
        x = call(x)
        for _ in tf.range(2):
            x = call(x * 2.0)
    return x


def in_a_branch(call, x):
    return tf.cond(x > 1.5, lambda: call(x), lambda: x * 3.0)


def in_both_branches(call, x):
    return call(call(x) if x > 1.5 else call(-x))


def in_a_switch(call, x):
    branches = [lambda: x, lambda: x, lambda: call(x), lambda: call(-x)]
    return tf.switch_case(tf.cast(x, tf.int32) + 1, branches)


def in_mapped_elements(call, x):
    return tf.map_fn(call, tf.stack([x, 2.0 * x, 3.0 * x]))


PLACES = [
    *(in_a_loop_and_its_condition, in_nested_loops, in_a_branch, in_both_branches, in_a_switch, in_mapped_elements)
]


@pytest.mark.parametrize("place", PLACES)
def test_they_run_where_and_as_often_as_in_eager_mode(place):
    """Also where replicas take different branches, and loop differently often."""
    calls, expected_calls = {0: [], 1: []}, {0: [], 1: []}
    fn = noting(calls)
    results = on_two(lambda x: place(functools.partial(xla.outside_compilation, fn), x))
    expected = [place(noting(expected_calls, replica), tf.constant(x)) for replica, x in enumerate([1.0, 2.0])]
    assert values(results) == values(expected)
    assert calls == expected_calls


def test_they_run_in_nested_functions_between_collectives(run):
    calls = {0: [], 1: []}
    add_ten = noting(calls)
    inner = tf.function(lambda x: xla.outside_compilation(add_ten, x))
    middle = tf.function(lambda x: inner(x) + inner(2.0 * x))

    def body(x):
        for _ in tf.range(2):
            if xla.cross_replica_sum(x) < 1000.0:
                x = xla.cross_replica_sum(middle(x))
        return x

    assert values(run(body, 1.0, 2.0)) == [3.0 * 49.0 * 2.0 + 40.0] * 2
    assert calls == {0: [1.0, 2.0, 49.0, 98.0], 1: [2.0, 4.0, 49.0, 98.0]}


@pytest.mark.parametrize("in_function", [False, True])
def test_functions_without_results_run_too(in_function):
    calls = {0: [], 1: []}

    def note(x, name):
        calls[int(xla.replica_id())].append((name, float(x)))

    def body(x):
        for _ in tf.range(2):
            x += 10.0
            xla.outside_compilation(note, x, name="in the loop")
        xla.outside_compilation(note, x, "after it")

    run = tf.function(on_two) if in_function else on_two
    for _ in range(2):
        assert run(body) == [None, None]
    for replica in (0, 1):
        x = 1.0 + replica
        assert calls[replica] == [("in the loop", x + 10.0), ("in the loop", x + 20.0), ("after it", x + 20.0)] * 2


def test_each_replica_keeps_the_order_of_the_program():
    """Of calls that do not depend on each other."""
    calls = {0: [], 1: []}

    def note(name):
        calls[int(xla.replica_id())].append(name)

    def body(x):
        for name in range(5):
            xla.outside_compilation(note, name)
            for _ in tf.range(2):
                xla.outside_compilation(note, "loop")
        return x

    on_two(body)
    expected = [each for name in range(5) for each in (name, "loop", "loop")]
    assert calls == {0: expected, 1: expected}
