"""Replicas that do not agree in an operator with merge calls, and what goes wrong inside one."""

import json
import os
import signal
import threading

import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.on_mirrored import context, index, line_of, locally, numbered, run, stepping, total
from helpers.time_limits import PATIENT, time_is_nearly_up
from helpers.warned import when_warned

import replica_engine
from replica_engine import MirroredStrategy
from replica_engine.errors import (
    MergeCallMismatchError,
    ReplicaMismatchError,
    ReplicaTimeoutError,
    StructureMismatchError,
)

HERE = os.path.basename(__file__)


class OwnError(Exception):
    pass


@pytest.fixture
def fails(mirrored):
    """`fails(error, body)`: the run raises the error, whose text is returned; the next run works."""

    def fails(error, body, *args, strategy=mirrored):
        with pytest.raises(error) as caught:
            run(strategy, body, *(args or (numbered(strategy),)))
        assert run(strategy, joint, numbered(strategy)) == [3.0, 3.0]
        return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])

    return fails


def joint(x):
    return tf.cond(x > 0.0, lambda: total(x), lambda: x)


def in_a_branch(fn, unwound=None):
    """A step that calls `fn(x)` in a branch; each replica that comes out of it, however, is added to `unwound`."""

    def branch(x):
        try:
            return fn(x)
        finally:
            if unwound is not None:
                unwound.append(index())

    return lambda x: tf.cond(x > 0.0, lambda: branch(x), lambda: x)


# Conditions.


def _autograph(x):
    while x < 2.0:
        x += total(x)
    return x


DIFFER_AT_RUN = {
    "cond": lambda x, _: tf.cond(x > 1.5, lambda: total(x), lambda: x),
    "switch_case": lambda x, number: tf.switch_case(number, [lambda: total(x), lambda: x, lambda: x]),
    "while_loop": lambda x, number: tf.while_loop(lambda i, _: i < number, lambda i, x: (i + 1, total(x)), (0, x))[1],
    "maximum_iterations": lambda x, number: tf.while_loop(
        lambda _: True, lambda x: [total(x)], [x], maximum_iterations=number
    ),
    "autograph": lambda x, _: _autograph(x),
}


@pytest.mark.parametrize("name", DIFFER_AT_RUN)
def test_what_may_differ_when_the_step_runs(fails, name):
    text = fails(tf.errors.InvalidArgumentError, lambda x: DIFFER_AT_RUN[name](x, tf.cast(x, tf.int32)))
    assert "The replicas do not agree" in text
    assert f"{__file__}:" in text
    assert "replica 0 of 2 (CPU:0)" in text
    assert "replica 1 of 2 (CPU:1)" in text
    if name == "cond":
        line = line_of('"cond": lambda')
        assert f"condition of tf.cond at {__file__}:{line}" in text


def _another_operator(x):
    if index() == 0:
        return tf.cond(x > 0.0, lambda: total(x), lambda: x)
    return tf.while_loop(lambda x: x < 3.0, lambda x: [total(x)], [x])[0]


def _another_line(x):
    if index() == 0:
        return tf.cond(x > 0.0, lambda: total(x), lambda: x)
    return tf.cond(x > 0.0, lambda: total(x), lambda: x)


DIFFER_IN_THE_TRACE = {
    "the condition": (
        lambda x: tf.cond(tf.constant(index() == 0), lambda: total(x), lambda: x),
        ReplicaMismatchError,
        ["  replica 0 of 2 (CPU:0): True\n  replica 1 of 2 (CPU:1): False\n", f"tf.cond at {__file__}:"],
    ),
    "who enters": (
        lambda x: joint(x) if index() == 1 else x,
        MergeCallMismatchError,
        ["replica 0 of 2 (CPU:0): finished", HERE],
    ),
    "who merges in a branch": (
        lambda x: tf.cond(x > 0.0, lambda: total(x) if index() == 0 else x, lambda: x),
        MergeCallMismatchError,
        ["replica 0 of 2 (CPU:0)", "replica 1 of 2 (CPU:1)"],
    ),
    "the operator": (_another_operator, MergeCallMismatchError, ["tf.cond", "tf.while_loop"]),
    "the line": (_another_line, MergeCallMismatchError, []),
    "the dtype of branches": (
        lambda x: tf.cond(x > 0.0, lambda: total(x), lambda: tf.cast(x, tf.int32)),
        TypeError,
        ["float32", "int32"],
    ),
    "shapes in a branch": (
        lambda x: tf.cond(x > 0.0, lambda: total(tf.ones([1 + index()]))[0], lambda: x),
        ReplicaMismatchError,
        [],
    ),
}


@pytest.mark.parametrize(("body", "error", "words"), DIFFER_IN_THE_TRACE.values(), ids=DIFFER_IN_THE_TRACE)
def test_what_may_differ_while_the_step_is_traced(fails, body, error, words):
    text = fails(error, body)
    assert [each for each in words if each not in text] == [], text


def test_branches_of_another_structure(fails):
    """A branch that gives one replica more than the other."""
    text = fails(
        (StructureMismatchError, ValueError, TypeError),
        lambda x: tf.cond(x > 0.0, lambda: (total(x), x), lambda: (x, x) if index() == 0 else x),
    )
    assert "branch" in text or "structure" in text


# Exceptions.


@pytest.mark.parametrize("culprits", [[0], [1], [0, 1]])
@pytest.mark.parametrize("after", [False, True], ids=["before a merge", "after a merge"])
def test_an_exception_in_a_branch(fails, culprits, after):
    unwound = []

    def branch(x):
        y = total(x) if after or index() not in culprits else x
        if index() in culprits:
            raise OwnError(f"replica {index()}")
        return total(y)

    text = fails(OwnError, in_a_branch(branch, unwound))
    assert f"replica {culprits[0]}" in text
    assert set(unwound) >= ({0, 1} if after else {culprits[0]})


def test_an_exception_in_a_branch_that_all_replicas_catch(mirrored):
    caught = []

    def branch(x):
        total(x)
        raise OwnError

    def body(x):
        try:
            x = in_a_branch(branch)(x)
        except OwnError:
            caught.append(index())
            x = tf.cond(x > 0.0, lambda: 2.0 * total(x), lambda: x)
        return total(x)

    assert run(mirrored, body, numbered(mirrored)) == [12.0, 12.0]
    assert caught == [0, 1]


def test_an_exception_in_a_loop_in_a_condition_that_all_catch_outside(mirrored):
    def body(x):
        def inner(i, x):
            total(x)
            raise OwnError

        try:
            return tf.cond(x > 0.0, lambda: tf.while_loop(lambda i, _: i < 2, inner, (0, x))[1], lambda: x)
        except OwnError:
            return total(x)

    assert run(mirrored, body, numbered(mirrored)) == [3.0, 3.0]


def test_a_merge_function_that_raises_in_a_branch(fails):
    unwound = []

    def merge_fn(strategy):
        raise OwnError

    text = fails(OwnError, in_a_branch(lambda x: context().merge_call(merge_fn), unwound))
    assert "merge_fn" in text
    assert set(unwound) == {0, 1}


def test_an_exception_of_one_replica_that_catches_it(fails):
    """The others are in the operator, which cannot be built without it."""

    def branch(x):
        if index() == 1:
            raise OwnError
        return total(x)

    def body(x):
        try:
            return in_a_branch(branch)(x)
        except OwnError:
            return x

    assert "replica 1 of 2, CPU:1, after 1 merge call" in fails(OwnError, body)


# Time.


def test_a_replica_that_does_not_come_back_in_a_branch():
    strategy = MirroredStrategy(DEVICES[:2], timeout=PATIENT)
    release = threading.Event()
    unwound = []

    def branch(x):
        y = total(x)
        if index() == 1:
            time_is_nearly_up()
            release.wait()  # stuck
        return y

    x = numbered(strategy)
    with pytest.raises(ReplicaTimeoutError) as caught:
        run(strategy, in_a_branch(branch, unwound), x)
    release.set()
    assert "replica 1 of 2 (CPU:1): running" in str(caught.value)
    assert f"{HERE}:{line_of('# stuck')}" in str(caught.value) or "all_reduce" in str(caught.value)
    assert 0 in unwound
    assert run(strategy, joint, x) == [3.0, 3.0]


def test_a_merge_function_that_does_not_come_back_in_a_branch():
    strategy = MirroredStrategy(DEVICES[:2], timeout=PATIENT)

    def stuck(strategy):
        time_is_nearly_up()
        for _ in range(1000):
            threading.Event().wait(0.01)

    x = numbered(strategy)
    with pytest.raises(ReplicaTimeoutError, match="stuck"):
        run(strategy, in_a_branch(lambda x: context().merge_call(stuck)), x)
    assert run(strategy, joint, x) == [3.0, 3.0]


def test_the_warning_has_a_row_for_each_replica():
    strategy = MirroredStrategy(DEVICES[:2], warn_after=0.2)
    warned, texts = threading.Event(), []

    def note(text):
        if "replica 1 of 2 (CPU:1): running" in text:
            texts.append(text)
            warned.set()

    def branch(x):
        y = total(x)
        if index() == 1:
            assert warned.wait(300)
        return y

    with when_warned(note):
        assert run(strategy, in_a_branch(branch), numbered(strategy)) == [3.0, 3.0]
    assert "replica 0 of 2 (CPU:0)" in texts[0]


@pytest.mark.parametrize("on_replica", [True, False], ids=["on a replica", "in a merge"])
def test_ctrl_c_inside_a_branch(fails, on_replica):
    unwound = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted(strategy):
        signal.raise_signal(signal.SIGINT)

    def branch(x):
        total(x)
        if not on_replica:
            context().merge_call(interrupted)
        elif index() == 1:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            threading.Event().wait(0.2)
        return total(x)

    try:
        fails(KeyboardInterrupt, in_a_branch(branch, unwound))
    finally:
        signal.signal(signal.SIGINT, before)
    assert set(unwound) == {0, 1}


# The record.


def test_sync_points_inside_have_the_users_lines(mirrored):
    def body(x):
        for i in tf.range(3):  # the loop
            if i > 0:  # the condition
                x = context().all_reduce("SUM", x)  # the all-reduce
        return x

    run(mirrored, body, numbered(mirrored))
    for replica in (0, 1):
        points = [point for point in mirrored.sync_points() if point.replica == replica]
        where = [(point.kind, int(point.where.split(":")[1].split()[0])) for point in points]
        for kind, text in (
            ("tf.while_loop", "# the loop"),
            ("tf.cond", "# the condition"),
            ("all_reduce", "# the all-reduce"),
        ):
            assert (kind, line_of(text)) in where
        assert all(point.traced for point in points)


def test_timelines_show_them(mirrored, tmp_path):
    path = tmp_path / "timeline.json"
    with replica_engine.timeline(path):
        run(mirrored, joint, numbered(mirrored))
    text = json.dumps(json.loads(path.read_text()))
    assert "tf.cond" in text
    assert "all_reduce" in text
    assert HERE in text


# Threads.


def test_concurrent_replicas(mirrored):
    strategy = MirroredStrategy(DEVICES[:4], concurrent=True)

    @tf.function
    def inner(x):
        if x > 0.0:
            x = total(x)
        return x

    for _ in range(3):
        assert run(strategy, lambda x: inner(x) + inner(x), numbered(strategy), form="eager") == [20.0] * 4
    assert run(strategy, joint, numbered(strategy)) == [10.0] * 4


def test_two_threads_call_run_at_once(mirrored):
    inside = threading.Barrier(2)
    steps = {}

    def body(x):
        def branch():
            y = total(x)
            if index() == 0:
                inside.wait(300)
            return y

        return tf.cond(x > 0.0, branch, lambda: x)

    def call(number):
        steps[number] = run(mirrored, body, numbered(mirrored, float(number)))

    threads = [threading.Thread(target=call, args=(number,)) for number in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert steps == {1: [3.0, 3.0], 5: [11.0, 11.0]}


def test_many_failures_leave_the_strategy_working(mirrored):
    def body(x, fail):
        def branch():
            y = total(x)
            if fail and index() == 1:
                raise OwnError
            return y

        return tf.cond(x > 0.0, branch, lambda: x)

    x = numbered(mirrored)
    for fail in (True, False, True, False):
        step = stepping(mirrored, lambda x, fail=fail: body(x, fail))
        if fail:
            with pytest.raises(OwnError):
                step(x)
        else:
            assert locally(mirrored, step(x)) == [3.0, 3.0]
