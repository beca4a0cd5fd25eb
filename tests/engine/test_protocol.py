"""The protocol of engine/run.py: turns, meetings, ends."""

import contextlib
import functools
import subprocess
import sys
import threading

import pytest
from helpers.meeting import MEETING, meet
from helpers.time_limits import PATIENT, time_is_nearly_up

from replica_engine.engine import GroupPool, Run, SyncGroup, SyncPoint, SyncRecord, current_replica
from replica_engine.engine import run as engine_run
from replica_engine.errors import MergeCallMismatchError, ReplicaTimeoutError, ReplicaUnwound
from replica_engine.testing import Sequencer, no_leaked_threads


def test_returns_each_bodys_value_in_order(run_bodies, concurrent):
    assert run_bodies(*[lambda replica: replica.index * 10] * 4, concurrent=concurrent) == [0, 10, 20, 30]


def test_merges_the_requests_of_all_and_gives_each_its_part(run_bodies, concurrent):
    def merge(requests):
        return [sum(requests) + index for index in range(len(requests))]

    def body(replica):
        return [meet(replica, replica.index + 1), meet(replica, 10 * replica.index)]

    assert run_bodies(body, body, body, merge=merge, concurrent=concurrent) == [[6, 30], [7, 31], [8, 32]]


def test_replicas_take_turns_in_order():
    order = []

    def body(replica):
        for stretch in range(3):
            order.append((stretch, replica.index))
            if stretch < 2:
                meet(replica)

    group = SyncGroup(["CPU:0", "CPU:1", "CPU:2"])
    Run(group, [body] * 3, lambda requests: requests)()
    group.close()
    assert order == [(stretch, index) for stretch in range(3) for index in range(3)]


def test_never_two_at_once_when_sequential(run_bodies):
    inside = threading.Lock()

    def body(replica):
        for _ in range(50):
            assert inside.acquire(blocking=False), "another replica is running"
            inside.release()
            meet(replica)

    run_bodies(*[body] * 4)


def test_merge_runs_on_the_calling_thread_with_all_replicas_paused(run_bodies):
    seen = []

    def merge(requests):
        seen.append(threading.current_thread())
        return requests

    run_bodies(lambda replica: meet(replica), lambda replica: meet(replica), merge=merge)
    assert seen == [threading.current_thread()]


def test_concurrent_replicas_run_at_the_same_time(run_bodies):
    barrier = threading.Barrier(3, timeout=300)  # passes only if all three are inside at once
    run_bodies(*[lambda replica: barrier.wait()] * 3, concurrent=True)


@pytest.mark.parametrize("order", [["r0", "r1"], ["r1", "r0"]])
def test_concurrent_replicas_may_pause_in_any_order(run_bodies, order):
    sequencer = Sequencer(order)

    def body(replica):
        sequencer.pass_(f"r{replica.index}")
        return meet(replica, replica.index)

    assert run_bodies(body, body, merge=lambda requests: requests[::-1], concurrent=True) == [1, 0]


def test_current_replica_is_known_inside_and_only_there(run_bodies):
    assert current_replica() is None
    assert run_bodies(*[lambda replica: current_replica() is replica] * 2) == [True, True]
    assert current_replica() is None


def test_a_head_start_is_given_in_every_round(run_bodies, monkeypatch):
    monkeypatch.setattr("replica_engine.engine.run.HEAD_START", 0.01)
    first_released, asked, second_released = threading.Event(), threading.Event(), threading.Event()
    answers, order = iter([False, True]), []

    def builds():
        answer = next(answers)
        if answer:
            asked.set()
        return answer

    def body(replica):
        if replica.index == 0:
            assert first_released.wait(300)  # builds nothing in its head start: the other is released
        else:
            first_released.set()
        meet(replica)
        if replica.index == 0:
            assert asked.wait(300)
            assert not second_released.wait(0.05)  # builds: the other waits
        else:
            second_released.set()
        order.append(replica.index)

    run_bodies(body, body, concurrent=True, builds=builds)
    assert order == [0, 1]


class TestFailures:
    def test_a_bodys_exception_leaves_as_the_same_object(self, run_bodies, concurrent):
        error = KeyError("lost")

        def body(replica):
            meet(replica)
            if replica.index == 1:
                raise error
            meet(replica)

        with pytest.raises(KeyError) as raised:
            run_bodies(body, body, body, concurrent=concurrent)
        assert raised.value is error
        assert "replica 1 of 3, CPU:1, after 1 merge call (the last: merge_fn at user.py:1 in fn)" in error.__notes__

    def test_its_traceback_shows_the_line_that_raised(self, run_bodies):
        def body(replica):
            raise ValueError("here")

        with pytest.raises(ValueError, match="here") as raised:
            run_bodies(body)
        assert raised.traceback[-1].name == "body"

    def test_paused_replicas_are_unwound_and_their_finally_blocks_run(self, run_bodies):
        unwound = []

        def body(replica):
            try:
                meet(replica)
                if replica.index == 2:
                    raise ValueError
                meet(replica)
            except ReplicaUnwound:
                unwound.append(replica.index)
                raise
            finally:
                unwound.append(f"finally {replica.index}")

        with pytest.raises(ValueError):  # noqa: PT011
            run_bodies(body, body, body)
        assert unwound == ["finally 2", 0, "finally 0", 1, "finally 1"]

    def test_replicas_after_the_failed_one_do_not_get_their_turn(self, run_bodies):
        started = []

        def body(replica):
            started.append(replica.index)
            raise ValueError

        with pytest.raises(ValueError):  # noqa: PT011
            run_bodies(body, body, body)
        assert started == [0]

    def test_except_exception_does_not_stop_the_unwinding(self, run_bodies):
        went_on = []

        def body(replica):
            if replica.index == 1:
                raise OSError("root cause")
            try:
                meet(replica)
            except Exception:
                went_on.append(replica.index)

        with pytest.raises(OSError, match="root cause"):
            run_bodies(body, body)
        assert went_on == []

    def test_a_replica_that_swallows_the_unwinding_cannot_meet_again(self, run_bodies):
        tries = []

        def body(replica):
            if replica.index == 1:
                raise OSError("root cause")
            for attempt in range(3):
                try:
                    meet(replica)
                except ReplicaUnwound:
                    tries.append(attempt)

        with pytest.raises(OSError, match="root cause"):
            run_bodies(body, body)
        assert tries == [0, 1, 2]

    def test_failures_on_the_way_down_become_notes(self, run_bodies):
        def body(replica):
            if replica.index == 1:
                raise OSError("root cause")
            try:
                meet(replica)
            finally:
                raise ValueError("while cleaning up")

        with pytest.raises(OSError, match="root cause") as raised:
            run_bodies(body, body)
        assert "also failed: replica 0 of 2, CPU:0: ValueError: while cleaning up" in raised.value.__notes__

    def test_several_failures_at_once_are_all_told(self, run_bodies):
        barrier = threading.Barrier(2, timeout=300)

        def body(replica):
            barrier.wait()
            raise ValueError(f"from {replica.index}")

        with pytest.raises(ValueError, match="from") as raised:
            run_bodies(body, body, concurrent=True)
        other = 1 - int(str(raised.value)[-1])
        assert f"also failed: replica {other} of 2, CPU:{other}: ValueError: from {other}" in raised.value.__notes__

    def test_an_exception_in_merge_leaves_and_all_are_unwound(self, run_bodies, concurrent):
        ended = []

        def body(replica):
            try:
                meet(replica)
            finally:
                ended.append(replica.index)

        def merge(requests):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run_bodies(body, body, merge=merge, concurrent=concurrent)
        assert sorted(ended) == [0, 1]

    def test_system_exit_in_a_replica_leaves_too(self, run_bodies):
        with pytest.raises(SystemExit):
            run_bodies(lambda replica: sys.exit(3))


class TestMismatch:
    @pytest.mark.parametrize("early", [0, 1, 2])
    def test_different_numbers_of_merge_calls(self, run_bodies, concurrent, early):
        def body(replica):
            meet(replica)
            if replica.index != early:
                meet(replica, point=SyncPoint("second", "user.py", 7, "fn", identity="second"))

        with pytest.raises(MergeCallMismatchError, match="different number of merge_call") as raised:
            run_bodies(body, body, body, concurrent=concurrent)
        for row in raised.value.rows:
            finished = row.replica == early
            assert row.state == ("finished" if finished else "waiting in a merge call")
            assert row.merge_calls == (1 if finished else 2)
            assert row.where == ("merge_fn at user.py:1 in fn" if finished else "second at user.py:7 in fn")
            assert str(row) in str(raised.value)

    def test_different_merge_functions(self, run_bodies, concurrent):
        def body(replica):
            meet(replica, point=SyncPoint(f"merge_{replica.index}", "user.py", 5, "fn", identity=replica.index % 2))

        with pytest.raises(MergeCallMismatchError, match="different merge functions") as raised:
            run_bodies(body, body, body, concurrent=concurrent)
        assert [row.where for row in raised.value.rows] == [f"merge_{i} at user.py:5 in fn" for i in range(3)]

    def test_the_same_function_from_different_lines_is_a_meeting(self, run_bodies):
        def body(replica):
            point = SyncPoint("merge_fn", "user.py", replica.index, "fn", identity="merge_fn")
            return meet(replica, replica.index, point)

        assert run_bodies(body, body, merge=lambda requests: requests[::-1]) == [1, 0]


TRACED = """
import sys, threading
from replica_engine.engine import Run, SyncGroup
from replica_engine.errors import ReplicaTimeoutError

def trace(*_):
    return trace

def body(replica):
    if replica.index == 1:
        threading.Event().wait()

group = SyncGroup(["CPU:0", "CPU:1"])
threading.settrace(trace)
sys.settrace(trace)
try:
    Run(group, [body, body], lambda requests: requests, timeout=5.0)()
except ReplicaTimeoutError as error:
    print([row.state for row in error.rows], flush=True)
sys.settrace(None)
"""


class TestTimeout:
    def test_a_replica_that_does_not_come_back_under_a_debugger_or_coverage(self):
        """On Python 3.11 the run would not end: see `interrupts.raise_in`."""
        done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=300)
        assert done.stdout == "['finished', 'running']\n", done.stderr

    def test_a_replica_that_does_not_come_back_is_named(self, run_bodies, monkeypatch):
        monkeypatch.setattr("replica_engine.engine.run.INTERRUPT_GRACE", 0.01)
        release = threading.Event()

        def body(replica):
            if replica.index == 1:
                time_is_nearly_up()
                release.wait()

        with pytest.raises(ReplicaTimeoutError) as raised:
            run_bodies(body, body, timeout=PATIENT)
        release.set()
        assert [row.state for row in raised.value.rows] == ["finished", "running"]
        assert any(
            note.startswith("abandoned, because it did not return: replica 1") for note in raised.value.__notes__
        )

    def test_a_loop_in_python_is_interrupted(self):
        began, ended = threading.Event(), threading.Event()

        def body(replica):
            began.set()
            try:
                while True:
                    replica.row()
            finally:
                ended.set()

        with no_leaked_threads():
            while not began.is_set():  # on a busy machine the time may be over before the thread gets its turn
                pool = GroupPool(["CPU:0"])
                with pytest.raises(ReplicaTimeoutError), pool.lease() as group:
                    Run(group, [body], list, timeout=0.1)()
            assert ended.wait(300)

    def test_so_is_that_of_a_replica_beside_one_that_fails(self, monkeypatch):
        monkeypatch.setattr(engine_run, "UNWIND_GRACE", 0.01)
        began, ended = threading.Event(), threading.Event()

        def fails(replica):
            began.wait()
            raise ValueError("in replica 0")

        def loops(replica):
            began.set()
            try:
                while True:
                    replica.row()
            finally:
                ended.set()

        pool = GroupPool(["CPU:0", "CPU:1"])
        with (
            no_leaked_threads(),
            pytest.raises(ValueError, match="in replica 0") as caught,
            pool.lease() as group,
        ):
            Run(group, [fails, loops], list, concurrent=True)()
        assert ended.wait(300)
        assert "abandoned, because it did not return: replica 1" in str(caught.value.__notes__)


class TestThreads:
    def test_are_named_after_replica_and_device(self, run_bodies):
        names = run_bodies(*[lambda replica: threading.current_thread().name] * 2)
        assert names == ["replica 0 of 2 (CPU:0)", "replica 1 of 2 (CPU:1)"]

    def test_are_kept_and_reused(self):
        pool = GroupPool(["CPU:0", "CPU:1"])
        seen = []
        for _ in range(5):
            with pool.lease() as group:
                seen.append(tuple(Run(group, [lambda _: threading.get_ident()] * 2, list)()))
        pool.close()
        assert len(set(seen)) == 1

    def test_of_a_failed_run_are_not_reused(self):
        pool = GroupPool(["CPU:0"])
        with pytest.raises(ValueError), pool.lease() as first:  # noqa: PT011
            raise ValueError
        with pool.lease() as second:
            assert second is not first
        pool.close()

    def test_two_leases_at_once_are_two_groups(self):
        pool = GroupPool(["CPU:0"])
        with pool.lease() as outer, pool.lease() as inner:
            assert outer is not inner
        pool.close()

    def test_go_when_their_pool_goes(self):
        with no_leaked_threads():
            pool = GroupPool(["CPU:0", "CPU:1"])
            with pool.lease():
                assert sum(t.name.startswith("replica ") for t in threading.enumerate()) >= 2
            del pool

    def test_idle_groups_are_bounded(self):
        pool = GroupPool(["CPU:0"])
        with contextlib.ExitStack() as leases:
            first = {leases.enter_context(pool.lease()) for _ in range(GroupPool.KEPT + 3)}
        with contextlib.ExitStack() as leases:
            second = {leases.enter_context(pool.lease()) for _ in range(GroupPool.KEPT + 3)}
        pool.close()
        assert len(first & second) == GroupPool.KEPT

    def test_parked_ones_hold_nothing_of_the_last_run(self):
        import weakref

        class Value:
            pass

        pool = GroupPool(["CPU:0", "CPU:1"])
        value = Value()
        gone = weakref.ref(value)
        with pool.lease() as group:
            Run(group, [lambda replica, value=value: meet(replica, value)] * 2, list)()
        del group, value
        # A thread hands the baton over just before it lets go of its job; a second run waits for that.
        with pool.lease() as group:
            Run(group, [lambda replica: None] * 2, list)()
        assert gone() is None
        pool.close()


def test_many_rounds_and_many_replicas(run_bodies):
    def body(replica):
        total = 0
        for step in range(200):
            total += meet(replica, step * replica.index)
        return total

    merged = run_bodies(*[body] * 16, merge=lambda requests: [sum(requests)] * len(requests))
    assert merged == [sum(range(16)) * sum(range(200))] * 16


def test_nested_runs_in_a_merge():
    pool = GroupPool(["CPU:0", "CPU:1"])

    def inner():
        with pool.lease() as group:
            return Run(group, [lambda replica: meet(replica, 1)] * 2, lambda r: [sum(r)] * 2)()

    with pool.lease() as group:
        result = Run(group, [lambda replica: meet(replica)] * 2, lambda requests: inner())()
    pool.close()
    assert result == [2, 2]


def test_the_record_of_sync_points_is_bounded():
    def body(replica):
        for _ in range(300):
            meet(replica)
        return replica.merge_calls, replica.last

    record = SyncRecord(1)
    group = SyncGroup(["CPU:0"], record)
    assert Run(group, [body], list)() == [(300, MEETING)]
    group.close()
    assert len(record.rings[0]) == SyncRecord.KEPT < 300


def test_what_a_replica_raises_while_it_unwinds_from_an_errand_becomes_a_note(monkeypatch):
    """The run ends at once: nobody waits for the outcome of the errand."""
    monkeypatch.setattr(engine_run, "UNWIND_GRACE", 5.0)

    def errand(replica):
        try:
            meet(replica, "inner")
        finally:
            raise OSError(f"replica {replica.index}")

    def merge(requests):
        if requests[0] == "inner":
            raise ValueError("merge")
        return run.errands([functools.partial(errand, replica) for replica in run.replicas])

    group = SyncGroup(["CPU:0", "CPU:1"])
    run = Run(group, [lambda replica: meet(replica, "outer")] * 2, merge)
    with pytest.raises(ValueError, match="merge") as caught:
        run()
    group.close()
    assert not getattr(caught.value, "__notes__", [])  # none of them was abandoned
