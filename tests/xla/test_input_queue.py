"""The queue between the thread that fetches batches and the one that launches steps, by itself.

Who waits is seen in the queue's condition, so nothing here sleeps.
"""

import concurrent.futures
import gc
import threading
import types
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica_engine.xla.calls import prefetch
from replica_engine.xla.calls.prefetch import InputQueue

SOON = 300  # seconds until a thread that should have gone on by then is stuck


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch):
    """Who is not woken does not look again, as it would within a second."""
    monkeypatch.setattr(prefetch, "MISSED", 1000.0)
    monkeypatch.setattr(prefetch, "_GATHER", 1000.0)


def filled(depth=10, batches=3):
    """A queue with some batches in it: 0, 1, ..."""
    queue = InputQueue(depth)
    queue.put(*range(batches))
    return queue


class Call(threading.Thread):
    """A call on a thread of its own.

    Attributes:
        noticed: set when it waits in a queue, or has ended.
        future: what it came to.
    """

    def __init__(self, fn, *args):
        super().__init__(daemon=True)
        self.noticed = threading.Event()
        self.future = concurrent.futures.Future()
        self._fn = lambda: fn(*args)

    def run(self):
        """The thread."""
        try:
            self.future.set_result(self._fn())
        except Exception as error:
            self.future.set_exception(error)
        finally:
            self.noticed.set()


@pytest.fixture
def waits(monkeypatch):
    """`waits(fn)`: calls `fn` on a thread, and returns its future once that waits in a queue made in this test."""

    class Condition(threading.Condition):
        def wait(self, timeout=None):
            threading.current_thread().noticed.set()
            return super().wait(timeout)

    def waits(fn, *args):
        call = Call(fn, *args)
        call.start()
        assert call.noticed.wait(SOON)
        assert not call.future.done(), f"it did not wait, but came to {call.future.result()}"
        return call.future

    monkeypatch.setattr(prefetch, "threading", types.SimpleNamespace(Condition=Condition))
    return waits


def test_batches_come_in_order_as_many_as_asked_for():
    queue = filled(batches=5)
    assert queue.take(2) == [0, 1]
    assert queue.take(1) == [2]
    queue.close()
    assert queue.has_more
    assert queue.take(4) == [3, 4]
    assert not queue.has_more
    assert queue.take(4) == queue.take(4) == []


def test_it_waits_for_as_many_as_asked_for(waits):
    queue = InputQueue(4)
    taken = waits(queue.take, 2)
    queue.put("a")
    assert not taken.done()
    queue.put("b", "c")
    assert taken.result(SOON) == ["a", "b"]
    assert queue.take(1) == ["c"]


def test_slow_batches_are_taken_as_they_come(waits, monkeypatch):
    monkeypatch.setattr(prefetch, "_GATHER", 0.0)
    assert filled(batches=2).take(5) == [0, 1]
    queue = InputQueue(4)
    taken = waits(queue.take, 5)
    queue.put("a")
    assert taken.result(SOON) == ["a"]


def test_it_never_waits_for_more_than_it_holds():
    assert filled(depth=3, batches=3).take(100) == [0, 1, 2]


def test_a_full_queue_has_room_once_batches_are_taken(waits):
    queue = filled(depth=2, batches=2)
    room = waits(queue.wait_for_room)
    queue.take(1)
    assert room.result(SOON) == 1


@pytest.mark.parametrize("end", ["close", "stop"])
def test_the_end_wakes_who_waits_for_a_batch(waits, end):
    queue = filled(batches=1)
    waiting = waits(queue.take, 2)
    getattr(queue, end)()
    assert waiting.result(SOON) == ([0] if end == "close" else [])


def test_a_stop_wakes_who_waits_for_room_and_wants_no_more(waits):
    queue = filled(depth=1, batches=1)
    room = waits(queue.wait_for_room)
    queue.stop()
    assert room.result(SOON) == 0
    queue.put(2)
    assert queue.take(1) == []
    assert not queue.has_more


@pytest.mark.parametrize("batches", [0, 1])
def test_time_that_runs_out_takes_nothing(batches):
    queue = filled(batches=batches)
    assert queue.take(2, seconds=0.0) is None
    queue.close()
    assert queue.take(2, seconds=0.0) == list(range(batches))


def test_a_batch_is_let_go_when_it_was_taken_or_dropped():
    class Batch:
        pass

    queue, batches = InputQueue(4), [Batch() for _ in range(3)]
    alive = [weakref.ref(each) for each in batches]
    queue.put(*batches)
    del batches
    queue.take(1)
    gc.collect()
    assert [each() is not None for each in alive] == [False, True, True]
    queue.stop()
    gc.collect()
    assert not any(each() for each in alive)


@settings(max_examples=50, deadline=None)
@given(depth=st.integers(1, 6), count=st.integers(0, 30), asked=st.lists(st.integers(1, 6), min_size=1))
def test_two_threads_pass_on_all_batches(depth, count, asked):
    queue = InputQueue(depth)

    def feed():
        number = 0
        while number < count and (room := queue.wait_for_room()):
            assert 1 <= room <= depth
            batches = range(number, min(count, number + room))
            queue.put(*batches)
            number += len(batches)
        queue.close()

    call, found, turn = Call(feed), [], 0
    call.start()
    while taken := queue.take(asked[turn % len(asked)]):
        assert len(taken) <= min(asked[turn % len(asked)], depth)
        found += taken
        turn += 1
    call.future.result(SOON)
    assert found == list(range(count))
