"""How far the inputs of device loops are fetched ahead, and the thread that does it."""

import contextvars
import gc
import itertools
import signal
import threading
import types
import weakref

import numpy as np
import pytest
import tensorflow as tf
from helpers.interrupted import ctrl_c_raises
from helpers.loop_steps import SUM, THREAD, Noting, numbers, then_fail

from replica_engine import xla
from replica_engine.errors import ReplicaEngineError
from replica_engine.xla.calls import prefetch

SOON = 200  # seconds until a thread that should have gone on by then is stuck


def test_more_replicas_than_cores_that_never_meet(replicas):
    """Each may be as far from the others as batches are fetched ahead."""
    eight = Noting(replicas(8), most=100)
    assert eight.run(numbers(100), 100, prefetch=1).steps == 100
    assert eight.inputs == [float(number) for number in range(100)]


class Held:
    """A step that waits on the host, in step `at`, until it is let go."""

    def __init__(self, at):
        self.at = at
        self.arrived = threading.Event()
        self.go = threading.Event()

    @xla.returns(None)
    def host(self, x):
        if float(x) == self.at:
            self.arrived.set()
            assert self.go.wait(SOON)

    def step(self, context, x):
        xla.outside_compilation(self.host, x)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_batches_are_fetched_ahead_while_a_step_runs_and_no_more_than_asked_for(two, prefetch):
    fetched = threading.Semaphore(0)

    def batches():
        for number in itertools.count():
            fetched.release()
            yield np.float32(number)

    held = Held(at=3)
    run = threading.Thread(
        target=two.strategy.run_steps, args=(held.step, batches(), 100), kwargs={"prefetch": prefetch}
    )
    run.start()
    assert held.arrived.wait(SOON)
    for _ in range(4 + prefetch):  # of steps 0 to 3, and ahead
        assert fetched.acquire(timeout=SOON)
    more = fetched.acquire(timeout=0.2)
    held.go.set()
    run.join(SOON)
    assert not run.is_alive()
    assert not more


def test_memory_is_bounded_by_what_is_fetched_ahead(two):
    """Of 30 batches those fetched ahead are alive, one that is being fetched and those in use; and none at the end."""
    alive = []
    most = []

    def batches():
        for number in range(30):
            batch = tf.fill([1000], 1.0 * number)
            alive.append(weakref.ref(batch))
            yield batch
            del batch
            most.append(sum(each() is not None for each in alive))

    total = two.variable(0.0, SUM)
    two.strategy.run_steps(lambda context, x: total.assign_add(tf.reduce_mean(x)), batches(), 30, prefetch=2)
    assert total.numpy() == 2 * sum(range(30))
    assert max(most) <= 2 + 3
    gc.collect()
    assert not [each() for each in alive if each() is not None]


def feeding():
    """The threads that feed, or have just done so."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


@pytest.fixture(autouse=True)
def _no_thread_of_an_earlier_test():
    """One that comes back now would read the `_IDLE` of this test, and stay for as long."""
    for thread in feeding():
        thread.join(SOON)


def fail(error):
    raise error


def test_one_thread_feeds_loop_after_loop(noting, monkeypatch):
    """However they end, if they follow each other quickly; soon after the last one it goes, as in every test here."""
    usual = prefetch._IDLE
    monkeypatch.setattr(prefetch, "_IDLE", 1000.0)  # seconds: quickly even for a slow machine
    monkeypatch.setattr(prefetch, "_JOIN", SOON)
    on = []

    def batches(count):
        for number in range(count):
            on.append(threading.current_thread())
            yield np.float32(number)

    noting.run(batches(5), 3)  # traced
    on.clear()
    noting.run(batches(5), 3)
    noting.run(batches(5), 3)
    of_main = [thread is threading.main_thread() for thread in on]
    assert of_main == 2 * [True, False, False]  # the first batch: its shape
    assert len({*on}) == 2

    with pytest.raises(tf.errors.OutOfRangeError):
        noting.run(batches(2), 3)
    with pytest.raises(OSError, match="no more"):
        noting.run(then_fail(batches(2), OSError("no more")), 5)
    monkeypatch.setattr(prefetch, "_IDLE", usual)  # so that the thread goes after the last loop
    noting.run(batches(5), 3)
    assert len({*on}) == 2


def test_the_thread_is_gone_soon_after_a_loop(two):
    host = lambda: fail(OSError("on the host"))  # noqa: E731
    with pytest.raises(OSError, match="on the host"):
        two.strategy.run_steps(lambda context, x: xla.outside_compilation(xla.returns(None)(host)), numbers(9), 9)
    for thread in feeding():
        thread.join(SOON)
    assert not feeding()

    with pytest.raises(OSError, match="traced"):
        two.strategy.run_steps(lambda context, x: fail(OSError("traced")), numbers(9), 9)
    assert not feeding()


def test_what_an_iterator_sets_on_the_thread_is_not_there_in_the_next_loop(noting):
    """Context variables: each loop's inputs begin with none."""
    variable = contextvars.ContextVar("variable", default=0)
    seen = []

    def batches():
        for number in range(3):
            seen.append(variable.get())
            variable.set(number + 1)
            yield np.float32(number)

    for _ in range(2):
        contextvars.copy_context().run(noting.run, batches(), 3)
    assert seen == [0, 0, 2] * 2


def test_a_device_that_an_iterator_leaves_entered_is_not_there_in_the_next_loop(noting, monkeypatch):
    monkeypatch.setattr(prefetch, "_IDLE", 1.5)
    seen = []

    def batches():
        for number in range(3):
            seen.append(tf.constant(0).device[-1])
            tf.device("CPU:1").__enter__()
            yield np.float32(number)
            tf.device(None).__enter__()

    for _ in range(3):
        noting.run(itertools.chain([np.float32(0.0)], batches()), 3)
    assert seen == ["0", "0"] * 3


def test_a_thread_that_does_not_come_back_feeds_no_other_loop(two, noting):
    """It is in the user's iterator when its loop is over, and stays there."""
    leave = threading.Event()

    def batches():
        yield np.float32(0.0)
        assert leave.wait(SOON)

    host = lambda: fail(OSError("on the host"))  # noqa: E731
    with pytest.raises(OSError, match="on the host"):
        two.strategy.run_steps(lambda context, x: xla.outside_compilation(xla.returns(None)(host)), batches(), 9)
    (stuck,) = feeding()
    assert noting.run(numbers(3), 3).steps == 3
    assert stuck.is_alive()
    leave.set()
    stuck.join(SOON)
    assert not stuck.is_alive()


@pytest.fixture
def no_hang():
    """Ctrl-C for what would hang; `no_hang.fired` says whether it came to that."""
    state = types.SimpleNamespace(fired=False)

    def fire():
        state.fired = True
        signal.raise_signal(signal.SIGINT)

    timer = threading.Timer(2 * SOON, fire)
    with ctrl_c_raises():
        timer.start()
        yield state
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("uses", ["reads", "runs"])
def test_an_iterator_that_uses_the_devices_does_not_hang(two, no_hang, uses):
    """They are busy with the steps, which wait for it. It works, or is told so."""
    total = two.variable(0.0, SUM)

    def batches():
        for number in range(4):
            if uses == "reads":
                total.numpy()
            else:
                two.strategy.run(lambda: total.assign_add(total * 0.0))
            yield np.float32(number)

    try:
        two.strategy.run_steps(lambda context, x: total.assign_add(x), batches(), 4)
    except ReplicaEngineError:
        assert total.numpy() in (0.0, 2 * 0.0, 2 * 1.0)
    except KeyboardInterrupt:
        pass
    assert not no_hang.fired
