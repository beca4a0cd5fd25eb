"""One replica in one run: what its own thread and the coordinator both see of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from replica_engine.engine.sync_point import State, SyncPoint
from replica_engine.engine.thread import ReplicaThread
from replica_engine.errors import ReplicaRow, ReplicaUnwound

if TYPE_CHECKING:
    from replica_engine.engine.run import Run

COORDINATOR_CHECK = 30.0  # seconds between looks at whether a paused replica's coordinator still lives


class Replica:
    """One replica in one run.

    Exactly one thread may touch it at a time: its own while it holds the baton, the coordinator while the
    replica is paused or finished. The events between them are the only synchronisation, so whoever does
    not hold the baton must not write here; `state` may be read at any time, for reports.

    Attributes:
        index: which replica of the run, from 0.
        device: its device, in the short form "CPU:1".
        state: what it is doing.
        sync_points: the last few sync points it reached, the newest last.
        merge_calls: how many it reached in this run.
        request: what it passed to its latest `pause`, until the coordinator takes it.
        value: what its body returned.
        error: what its body raised.
    """

    RECORDED = 16  # sync points kept

    def __init__(self, run: Run, index: int, device: str, thread: ReplicaThread):
        self.index = index
        self.device = device
        self.thread = thread
        self.state = State.IDLE
        self.sync_points: deque[SyncPoint] = deque(maxlen=self.RECORDED)
        self.merge_calls = 0
        self.request: Any = None
        self.value: Any = None
        self.error: BaseException | None = None
        self._result: Any = None
        self._run = run

    def pause(self, point: SyncPoint, request: Any) -> Any:
        """Stops at a sync point until the coordinator has merged. Called on the replica's own thread.

        Args:
            point: where this is, for comparison with the other replicas and for reports.
            request: what the coordinator's `merge` receives for this replica.

        Returns:
            This replica's part of the merge's result.

        Raises:
            ReplicaUnwound: the run was given up.
        """
        if self._run.given_up:
            raise ReplicaUnwound
        self.sync_points.append(point)
        self.merge_calls += 1
        self.request = request
        self.state = State.PAUSED
        self._run.hand_over(self)
        while True:
            woken = self.thread.should_run.wait(COORDINATOR_CHECK)
            if self._run.given_up or not self._run.coordinator.is_alive():
                raise ReplicaUnwound
            if woken and self.state is State.READY:  # Woken before the merge, it is nobody's turn.
                break
        self.state = State.RUNNING
        result, self._result = self._result, None
        return result

    def resume_with(self, result: Any) -> None:
        """Lays ready what `pause` will return. Called by the coordinator."""
        self.request = None
        self._result = result
        # Not only when its thread wakes: until then another replica could take it for stopped.
        self.state = State.READY

    def execute(self, body: Callable[[Replica], Any]) -> None:
        """Runs the replica's body, and keeps its value or exception. Its thread's job; never raises."""
        run = self._run
        if run.given_up:
            self.state = State.UNWOUND
        else:
            self.thread.replica = self
            self.state = State.RUNNING
            try:
                self.value = body(self)
                self.state = State.FINISHED
            except ReplicaUnwound:
                self.state = State.UNWOUND
            except BaseException as error:
                self.error = error
                self.state = State.FAILED
            finally:
                self.thread.replica = None
        run.hand_over(self)

    def forget(self) -> None:
        """Lets go of values and exceptions, once the coordinator has taken them."""
        self.value = self.request = self.error = self._result = None

    @property
    def coordinator(self) -> threading.Thread:
        """The thread that called `run`."""
        return self._run.coordinator

    @property
    def given_up(self) -> bool:
        """Whether its run was given up, so that nothing will come of waiting."""
        return self._run.given_up

    @property
    def over(self) -> bool:
        """Whether its body has come to its end, one way or another."""
        return self.state in (State.FINISHED, State.FAILED, State.UNWOUND)

    def row(self) -> ReplicaRow:
        """What is known of it, for an error's table."""
        where = str(self.sync_points[-1]) if self.sync_points else ""
        return ReplicaRow(self.index, len(self._run.replicas), self.device, self.state.value, self.merge_calls, where)

    def __str__(self) -> str:
        return f"replica {self.index} of {len(self._run.replicas)} ({self.device})"


def current_replica() -> Replica | None:
    """The replica that the calling thread is running, or None outside any."""
    replica = getattr(threading.current_thread(), "replica", None)
    return replica if isinstance(replica, Replica) else None
