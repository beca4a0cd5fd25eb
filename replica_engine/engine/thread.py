"""One persistent replica thread: parked until it is given a job, parked again after it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from replica_engine.engine.event import Event
from replica_engine.errors import ReplicaUnwound
from replica_engine.process.interrupts import raise_in


class ReplicaThread(threading.Thread):
    """Runs jobs, one at a time, each when `should_run` is set.

    Assigning a job does not start it: `should_run` does, so that the baton of a run (see `run.py`) starts
    replicas in order. A parked thread refers to nothing but itself, and so keeps no strategy, tensor or
    function alive. It is a daemon: at interpreter exit nothing waits for it.

    A job must not raise; it keeps its outcome as data.

    Attributes:
        should_run: lets it run.
        replica: the one that it runs.
        stay: for jobs: what the last one left as it was for the next.
    """

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self.should_run = Event()
        self.replica: object | None = None
        self.stay: object | None = None
        self._job: Callable[[], None] | None = None
        self._closed = False

    def assign(self, job: Callable[[], None]) -> None:
        """Lays a job ready. Only for a parked thread."""
        self._job = job

    def close(self) -> None:
        """Lets the thread end, as soon as it has no job."""
        self._closed = True
        self.should_run.set()

    def interrupt(self) -> None:
        """Raises ReplicaUnwound in the thread at its next Python instruction.

        Only for threads that will be closed: nobody can tell at which instruction it arrives.
        """
        if self.ident is not None:
            raise_in(self.ident, ReplicaUnwound)

    def run(self) -> None:
        """The thread's loop; started by `start()`."""
        try:
            while not self._closed:
                self.should_run.wait()
                if not self._closed:  # Being closed is no turn to run.
                    self._run_job()
        except ReplicaUnwound:
            return  # An interrupt that came too late to find the job: the thread was to end anyway.

    def _run_job(self) -> None:
        """Runs the job, if there is one, in a frame that goes away with it.

        Some tools look at the local variables of every frame of a thread, and CPython keeps what they saw
        with the frame. Were the job a local variable of `run`, a parked thread would keep the last run alive.
        """
        job, self._job = self._job, None
        if job is not None:
            job()
