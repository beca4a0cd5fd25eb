"""Ctrl-C in a device loop: it ends soon, after whole steps, and the next one works."""

import itertools
import signal
import threading

import numpy as np
import pytest
from helpers.interrupted import ctrl_c_raises
from helpers.loop_steps import hosted, make_total, numbers

from replica_engine.pjrt.executable import Executable
from replica_engine.process import threads


def for_ever():
    """Batches without end, the same on all replicas."""
    return itertools.repeat(np.float32(1.0))


@pytest.fixture
def ctrl_c():
    """Presses it."""
    with ctrl_c_raises():
        yield lambda: signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("owner", "name"), [(threads, "start"), (Executable, "launch")], ids=["the thread", "the program"]
)
def test_ctrl_c_while_a_loop_is_set_going_leaves_whole_steps_and_no_thread(two, ctrl_c, monkeypatch, owner, name):
    """Signals that come while a call runs are raised as it returns, and its result is gone."""
    total, step = make_total(two)
    two.strategy.run_steps(step, numbers(1, start=1), 1)
    original = getattr(owner, name)

    def and_ctrl_c(*args):
        result = original(*args)
        if threading.current_thread() is threading.main_thread():
            ctrl_c()
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, and_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            two.strategy.run_steps(step, for_ever(), 10**9)
    before = total.numpy()
    assert before >= 2.0
    assert before % 2.0 == 0.0
    two.strategy.run_steps(step, for_ever(), 3)
    assert total.numpy() == before + 6.0


@pytest.mark.parametrize("after", [1, 100])
def test_ctrl_c_ends_a_loop_between_steps(two, ctrl_c, after):
    own = two.variable(0.0)
    total, step = make_total(two)

    def both(context, x):
        step(context, x)
        own.assign_add(x)

    def batches():
        for number in itertools.count():
            if number == after:
                ctrl_c()
            yield np.float32(1.0)

    two.strategy.run_steps(both, numbers(1, start=1), 1)
    with pytest.raises(KeyboardInterrupt):
        two.strategy.run_steps(both, batches(), 10**9)
    first, second = two.components(own)
    assert first == second == int(first)
    assert total.numpy() == 2 * first
    two.strategy.run_steps(both, for_ever(), 3)
    assert two.components(own) == [first + 3] * 2


def test_ctrl_c_in_a_loop_with_host_calls_keeps_whole_steps(two, ctrl_c):
    total, step = make_total(two)
    calls = []

    def host(x):
        calls.append(x)
        if len(calls) == 20:
            ctrl_c()

    def both(context, x):
        step(context, x)
        hosted(host)(x)

    with pytest.raises(KeyboardInterrupt):
        two.strategy.run_steps(both, for_ever(), 10**9)
    before = total.numpy()
    assert 18.0 <= before <= len(calls)  # the host is called twice a step
    assert before % 2.0 == 0.0
    two.strategy.run_steps(step, for_ever(), 3)
    assert total.numpy() == before + 6.0


def test_ctrl_c_while_replicas_wait_for_an_iterator_that_is_stuck(two, ctrl_c):
    total, step = make_total(two)
    release, waited = threading.Event(), []

    def batches():
        yield np.float32(1.0)
        yield np.float32(1.0)
        ctrl_c()
        waited.append(release.wait(300))

    with pytest.raises(KeyboardInterrupt):
        two.strategy.run_steps(step, batches(), 10**9)
    assert not waited, "it did not end the wait"
    release.set()
    before = total.numpy()
    assert before in (0.0, 2.0, 4.0)
    two.strategy.run_steps(step, for_ever(), 3)
    assert total.numpy() == before + 6.0
