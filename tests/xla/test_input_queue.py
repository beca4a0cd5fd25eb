"""The queue between the thread that fetches batches and the replicas that run steps, by itself.

Who waits is seen in the queue's condition, so nothing here sleeps.
"""

import concurrent.futures
import gc
import itertools
import random
import threading
import types
import weakref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica_engine.xla import infeed
from replica_engine.xla.infeed import Pace

SOON = 300  # seconds until a thread that should have gone on by then is stuck


@pytest.fixture(autouse=True)
def no_second_look(monkeypatch):
    """Who is not woken does not look again, as it would within a second."""
    monkeypatch.setattr(infeed, "MISSED", 1000.0)


class InputQueue(infeed.InputQueue):
    """One whose chunks are single batches."""

    def __init__(self, replicas, depth):
        super().__init__(replicas, depth, Pace(1))

    def take(self, replica):
        """A replica's part of its next batch; None at the end."""
        parts, _ = super().take(replica)
        assert len(parts) <= 1
        return parts[0] if parts else None


def parts(number, replicas=2):
    """Batch `number`: each replica's part is told from all others."""
    return [(number, replica) for replica in range(replicas)]


def filled(replicas=2, depth=10, batches=3):
    """A queue with some batches in it."""
    queue = InputQueue(replicas, depth)
    for number in range(batches):
        assert queue.put(parts(number, replicas))
    return queue


def rest(queue, replica):
    """What a replica still gets: the numbers of the batches, after a look at the parts."""
    found = []
    while (part := queue.take(replica)) is not None:
        assert part[1] == replica
        found.append(part[0])
    return found


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

    monkeypatch.setattr(infeed, "threading", types.SimpleNamespace(Condition=Condition))
    return waits


def test_each_replica_takes_its_part_of_each_batch_at_its_own_pace():
    queue = filled()
    assert [queue.take(0), queue.take(0), queue.take(1), queue.take(0)] == [(0, 0), (1, 0), (0, 1), (2, 0)]
    queue.close()
    assert rest(queue, 1) == [1, 2]
    assert rest(queue, 0) == []


def test_a_replica_waits_for_a_batch_that_has_not_come(waits):
    queue = InputQueue(2, 2)
    first, second = waits(queue.take, 0), waits(queue.take, 1)
    queue.put(parts(0))
    assert first.result(SOON) == (0, 0)
    assert second.result(SOON) == (0, 1)


def test_a_full_queue_takes_no_more_until_all_replicas_have_taken_the_first_batch(waits):
    queue = filled(depth=2, batches=2)
    put = waits(queue.put, parts(2))
    queue.take(0)
    queue.take(0)
    assert not put.done()
    ahead = waits(queue.take, 0)  # the replica that is ahead gets nothing before there is room
    queue.take(1)
    assert put.result(SOON) is True
    assert ahead.result(SOON) == (2, 0)
    waits(queue.put, parts(3))
    queue.stop()


def test_at_the_end_each_replica_gets_what_was_put_and_then_none_for_ever():
    queue = filled()
    queue.close()
    assert rest(queue, 0) == [0, 1, 2]
    assert queue.begun == 3
    assert rest(queue, 1) == [0, 1, 2]
    assert queue.take(0) is queue.take(1) is None


def test_a_queue_that_ends_without_a_batch_is_empty():
    queue = InputQueue(2, 2)
    queue.close()
    assert queue.take(0) is queue.take(1) is None
    assert queue.begun == 0


@pytest.mark.parametrize("end", ["close", "stop"])
def test_the_end_wakes_all_that_wait_for_a_batch(waits, end):
    queue = InputQueue(3, 2)
    waiting = [waits(queue.take, replica) for replica in range(3)]
    getattr(queue, end)()
    assert [each.result(SOON) for each in waiting] == [None] * 3


def test_a_stop_wakes_who_waits_for_room_and_wants_no_more(waits):
    queue = filled(depth=1, batches=1)
    put = waits(queue.put, parts(1))
    queue.stop()
    assert put.result(SOON) is False
    assert queue.put(parts(2)) is False


def test_a_stop_is_after_the_step_of_the_replica_that_is_ahead():
    """The others must not let it run that step alone: it would wait for them in a collective, for ever."""
    queue = filled(batches=5)
    assert [queue.take(0) for _ in range(3)] == [(0, 0), (1, 0), (2, 0)]
    queue.take(1)
    queue.stop()
    assert rest(queue, 0) == []
    assert rest(queue, 1) == [1, 2]
    assert queue.begun == 3


def test_a_stop_before_the_first_step_is_before_it():
    queue = filled()
    queue.stop()
    assert rest(queue, 0) == rest(queue, 1) == []


def test_a_replica_that_waits_is_not_ahead_when_the_run_is_stopped(waits):
    """It has asked for a batch and not begun it. The other has one to go."""
    queue = filled(batches=1)
    queue.take(0)
    ahead = waits(queue.take, 0)
    queue.stop()
    assert ahead.result(SOON) is None
    assert rest(queue, 1) == [0]


@pytest.mark.parametrize("first", ["close", "stop"])
@pytest.mark.parametrize("then", ["close", "stop"])
def test_an_end_is_never_put_off(first, then):
    queue = filled(batches=4)
    queue.take(0)
    getattr(queue, first)()
    before = 4 if first == "close" else 1
    getattr(queue, then)()
    expected = min(before, 4 if then == "close" else 1)
    assert [0, *rest(queue, 0)] == rest(queue, 1) == list(range(expected))


def test_a_batch_is_let_go_when_all_have_taken_it():
    class Batch(list):
        pass

    queue = InputQueue(2, 4)
    batches = [Batch(parts(number)) for number in range(4)]
    alive = [weakref.ref(batch) for batch in batches]
    for batch in batches:
        queue.put(batch)
    del batches, batch
    queue.take(0)
    queue.take(0)
    queue.take(1)
    gc.collect()
    assert [each() is not None for each in alive] == [False, True, True, True]
    queue.stop()  # nobody is to take the last two
    gc.collect()
    assert [each() is not None for each in alive] == [False, True, False, False]
    queue.take(1)
    gc.collect()
    assert [each() is not None for each in alive] == [False] * 4


ACTIONS = st.one_of(st.just("put"), st.integers(0, 3), st.sampled_from(["close", "stop"]))


@settings(max_examples=300, deadline=None)
@given(replicas=st.integers(1, 4), depth=st.integers(1, 3), script=st.lists(ACTIONS, max_size=40), end=st.booleans())
def test_all_replicas_stop_at_the_same_batch(replicas, depth, script, end):
    """In whatever order batches come and go, and whenever the inputs end or the run is stopped.

    The script leaves out what would wait; what is left is an interleaving of threads.
    """
    queue = InputQueue(replicas, depth)
    taken, put, last = [0] * replicas, 0, None
    for action in [*script, "stop" if end else "close"]:
        if action == "put":
            if last is not None or put - min(taken) < depth:
                assert queue.put(parts(put, replicas)) is (last is None)
                put += last is None
        elif action == "close":
            queue.close()
            last = put if last is None else last
        elif action == "stop":
            queue.stop()
            last = max(taken) if last is None else min(last, max(taken))
        elif action < replicas and (taken[action] < put or last is not None):
            part = queue.take(action)
            if last is not None and taken[action] >= last:
                assert part is None
            else:
                assert part == (taken[action], action)
                taken[action] += 1
        assert queue.begun == max(taken)
    for replica in range(replicas):
        assert rest(queue, replica) == list(range(taken[replica], last))
    assert queue.begun == last


@pytest.mark.parametrize("replicas", [2, 5])
def test_all_replicas_stop_at_the_same_batch_on_threads(replicas):
    """The same without a script: who comes first is for the threads to find out."""
    generator = random.Random(replicas)

    def replica_steps(queue, replica, start, stop_after):
        start.wait(SOON)
        steps = 0
        while queue.take(replica) is not None:
            steps += 1
            if steps == stop_after:
                queue.stop()
        return steps

    def feed(queue, start, count):
        start.wait(SOON)
        number = 0
        while number < count and queue.put(parts(number, replicas)):
            number += 1
        queue.close()
        return number

    for _ in range(150):
        queue = InputQueue(replicas, generator.randint(1, 4))
        start = threading.Barrier(replicas + 1)
        stops = [generator.choice([None, generator.randint(1, 12)]) for _ in range(replicas)]
        calls = [Call(replica_steps, queue, replica, start, stops[replica]) for replica in range(replicas)]
        calls.append(Call(feed, queue, start, 10))
        for call in calls:
            call.start()
        *steps, fed = [call.future.result(SOON) for call in calls]
        assert set(steps) == {queue.begun}
        assert queue.begun <= fed
        if not any(stop is not None and stop <= 10 for stop in stops):
            assert queue.begun == 10


class AsTold(Pace):
    """A pace that has chunks be as long as a script says."""

    def __init__(self, lengths):
        super().__init__(100)
        self._lengths = lengths

    def chunk(self, ready):
        """How many of the batches that are ready the next chunk has."""
        return self._lengths.draw(st.integers(1, ready))


@settings(max_examples=200, deadline=None)
@given(
    replicas=st.integers(1, 4),
    depth=st.integers(1, 6),
    script=st.lists(ACTIONS, max_size=40),
    end=st.booleans(),
    lengths=st.data(),
)
def test_all_replicas_take_the_same_chunks(replicas, depth, script, end, lengths):
    """For any order of replicas and inputs, and any moment at which the inputs end."""
    queue = infeed.InputQueue(replicas, depth, AsTold(lengths))
    chunks, put, ended = [[] for _ in range(replicas)], 0, False

    def take(replica):
        parts, more = queue.take(replica)
        assert [part[1] for part in parts] == [replica] * len(parts)
        if parts:
            chunks[replica].append([part[0] for part in parts])
        return bool(parts) and more

    def taken(replica):
        return sum(map(len, chunks[replica]))

    for action in script:
        if action == "put":
            if ended or put - min(map(taken, range(replicas))) < depth:
                put += queue.put(parts(put, replicas))
        elif action in ("close", "stop"):
            getattr(queue, action)()
            ended = True
        elif action < replicas and (taken(action) < put or ended):
            take(action)
    queue.stop() if end else queue.close()
    for replica in range(replicas):
        while take(replica):
            pass
        assert not queue.take(replica)[0]
        assert chunks[replica] == chunks[0]
    assert [number for chunk in chunks[0] for number in chunk] == list(range(queue.begun))


def test_a_replica_that_took_the_last_batch_is_told_so():
    """It need not ask again."""
    queue = infeed.InputQueue(2, 4, Pace(1))
    queue.put(parts(0))
    queue.put(parts(1))
    assert queue.take(0) == ([(0, 0)], True)
    queue.close()
    assert queue.take(0) == ([(1, 0)], False)


class TestPace:
    def test_the_first_chunk_is_one_step(self):
        assert Pace(most=50).chunk(ready=50) == 1

    @staticmethod
    def after(seconds, times=40):
        """A pace that has seen many steps that took so long."""
        pace = Pace(most=50)
        for _ in range(times):
            pace.took(10, 10 * seconds)
        return pace

    @pytest.mark.parametrize(("seconds", "length"), [(0.0, 50), (0.0001, 50), (0.0049, 10), (0.05, 1), (10.0, 1)])
    def test_a_chunk_takes_a_twentieth_of_a_second_at_most(self, seconds, length):
        assert self.after(seconds).chunk(50) == length

    def test_it_takes_no_more_than_there_are(self):
        assert self.after(0.0).chunk(7) == 7

    def test_it_follows_slower_steps_at_once_and_quicker_ones_little_by_little(self):
        pace = self.after(0.0)
        pace.took(50, 50 * 0.02)
        assert pace.chunk(50) == 2
        lengths = []
        for _ in range(20):
            pace.took(1, 0.0)
            lengths.append(pace.chunk(50))
        assert lengths == sorted(lengths)
        assert lengths[0] <= 4
        assert lengths[-1] == 50
        assert all(after <= 2 * before for before, after in itertools.pairwise(lengths))


def test_chunks_get_longer_as_steps_turn_out_to_be_quick_and_the_pace_is_kept(monkeypatch):
    """The clock is a number that the test sets; between two queues it does not run."""
    clock = [100.0]
    monkeypatch.setattr(infeed, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    pace, lengths = Pace(most=8), []
    for _ in range(3):
        queue = infeed.InputQueue(1, 100, pace)
        for number in range(40):
            queue.put(parts(number, 1))
        queue.close()
        more = True
        while more:
            taken, more = queue.take(0)
            lengths.append(len(taken))
            clock[0] += 0.0001 * len(taken)
        queue.over()
        clock[0] += 1000.0
    assert lengths[:3] == [1, 1, 2]
    assert lengths[-5:] == [8] * 5


def test_an_offer_stays_until_all_workers_have_used_it():
    """Of several workers, one may have fewer batches; what was offered and not used is offered again."""
    pace = Pace(4)
    for _ in range(40):
        pace.took(1, 1e-9)  # quick steps: as many at a time as may be
    queue = infeed.InputQueue(2, 8, pace)
    for number in range(6):
        queue.put([f"{number}a", f"{number}b"])
    queue.close()
    assert queue.offer(0, done=0) == (["0a", "1a", "2a", "3a"], True)
    assert queue.offer(1, done=0) == (["0b", "1b", "2b", "3b"], True)  # the other worker offers one batch
    assert queue.offer(0, done=1) == (["1a", "2a", "3a", "4a"], True)
    assert queue.offer(1, done=1) == (["1b", "2b", "3b", "4b"], True)
    assert queue.offer(0, done=5) == (["5a"], False)
    assert queue.offer(1, done=5) == (["5b"], False)
    assert queue.offer(0, done=6) == ([], False)
