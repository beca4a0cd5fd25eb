"""Fetches the inputs of a device loop ahead of its steps, on a separate thread, into a bounded queue.

Starting a thread takes as long as many small steps, and the caller would wait for it. So when its loop is over, the
thread stays for a moment, for the next loop.
"""

from __future__ import annotations

import contextvars
import functools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from replica_engine._tf import thread_state
from replica_engine._tf.keras import state as keras_state
from replica_engine.errors import HostAccessError
from replica_engine.pjrt.group import held_off, needed_by_a_program
from replica_engine.process import threads
from replica_engine.process.interrupts import MISSED
from replica_engine.telemetry import timeline
from replica_engine.xla.loop.batches import BatchReader

NAME = "replica_engine: inputs of a device loop"
"""The name of these threads."""

_GATHER = 1.0  # seconds to wait for more batches than one; then a launch has fewer steps than it may
_IDLE = 0.05  # seconds that a thread stays; a loop that begins later gains nothing from it
_JOIN = 1.0  # seconds that a loop waits for its thread, which may be inside the user's iterator


Parts = Sequence[Any]
"""One batch: for each replica, the arrays of its part."""


class InputQueue:
    """A bounded queue of batches between the thread that fetches them and the one that launches steps.

    Args:
        depth: how many batches it holds at most.
    """

    def __init__(self, depth: int):
        self._depth = depth
        self._batches: deque[Parts] = deque()
        self._is_over = False
        self._wanted = 1  # how many batches `take` waits for
        self._changed = threading.Condition()

    @property
    def has_more(self) -> bool:
        """Whether more batches may come out of it."""
        return bool(self._batches) or not self._is_over

    def wait_for_room(self) -> int:
        """Waits until there is room for a batch, and returns for how many; 0 if no more batches are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or len(self._batches) < self._depth)
            return 0 if self._is_over else self._depth - len(self._batches)

    def put(self, *batches: Parts) -> None:
        """Adds batches, for which there is room; only one thread may do so. If no more are wanted, it drops them."""
        with self._changed:
            if not self._is_over:
                self._batches.extend(batches)
                if len(self._batches) >= self._wanted:  # not for each: waking a thread takes longer than a small step
                    self._changed.notify_all()

    def take(self, most: int, seconds: float | None = None) -> list[Parts] | None:
        """Waits until there are `most` batches, or all that will come, and takes them; none at the end.

        If batches come slowly, it takes those that are there after `_GATHER` seconds.

        Args:
            most: how many, at most the depth.
            seconds: how long to wait; None waits without a limit.

        Returns:
            The batches; None if time ran out.
        """
        began = time.perf_counter()
        with self._changed:
            while not self._is_over:
                waited = time.perf_counter() - began
                self._wanted = min(most, self._depth) if waited < _GATHER else 1
                if len(self._batches) >= self._wanted:
                    break
                if seconds is not None and waited >= seconds:
                    return None
                ends = [each - waited for each in (_GATHER, seconds) if each is not None and each > waited]
                self._changed.wait(min([MISSED, *ends]))  # see `wait_for_ever`; this may be the main thread
            taken = [self._batches.popleft() for _ in range(min(most, len(self._batches)))]
            self._changed.notify_all()
            return taken

    def close(self) -> None:
        """Ends the inputs: no more batches follow."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends the inputs, and drops those that nobody has taken."""
        with self._changed:
            self._batches.clear()
            self.close()


class Prefetcher:
    """Fetches batches ahead of the steps of one loop.

    Args:
        queue: the queue to put batches into; the first batch is already there.
        reader: takes batches apart.
        batches: the other batches.
        iterations: how many batches the loop needs, with the first.
        name: the name of the strategy that runs the steps, for timelines.

    Attributes:
        error: the exception that ended the inputs early, or None.
    """

    def __init__(self, queue: InputQueue, reader: BatchReader, batches: Iterator[tuple], iterations: int, name: str):
        self.error: BaseException | None = None
        self._queue = queue
        self._reader = reader
        self._batches = batches
        self._iterations = iterations
        self._name = name
        self._started = False
        self._has_ended = threading.Lock()  # held until the thread's job ends
        self._has_ended.acquire()

    def start(self) -> None:
        """Begins to fetch."""
        held_off().around(self._start)  # an idle thread that was taken out of the list must get its job

    def _start(self) -> None:
        self._started = True
        # In a new context, as on a new thread: what the iterator sets there must not reach the next loop.
        _Thread.do(functools.partial(contextvars.Context().run, self._run), self._has_ended)

    def end(self) -> None:
        """Waits up to `_JOIN` seconds for the thread, if it was started. The queue has been stopped already."""
        if self._started:
            self._has_ended.acquire(timeout=_JOIN)

    def _run(self) -> None:
        """The job of the thread."""
        try:
            with needed_by_a_program(HostAccessError.in_inputs):
                self._fetch()
        except BaseException as error:
            self.error = error
        finally:
            self._queue.close()

    def _fetch(self) -> None:
        track = timeline.Track(self._name, "feeding", order=-1)
        number = 1
        while number < self._iterations and (room := self._queue.wait_for_room()):
            began = time.perf_counter()
            with timeline.profiled("feeding"):
                batches = self._reader.take(self._batches, number, min(room, self._iterations - number))
            if timeline.recording():
                name = f"batch {number}" if len(batches) < 2 else f"batches {number} to {number + len(batches) - 1}"
                timeline.add(track, name, "feeding", began, time.perf_counter())
            if not batches:
                return
            self._queue.put(*batches)
            number += len(batches)


class _Thread(threading.Thread):
    """Does jobs, one after the other, and ends after `_IDLE` seconds without a job.

    It keeps no reference to a finished job. It is a daemon: at exit nothing waits for the user's iterator. If an
    iterator leaves the thread's state (a device, a graph) changed, the thread does no other job. It cannot notice a
    changed `threading.local` of the user.
    """

    _idle: ClassVar[list[_Thread]] = []  # no lock, which a signal handler could not take again: `pop`, `remove` suffice

    def __init__(self) -> None:
        super().__init__(name=NAME, daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Lock]] = queue.SimpleQueue()

    @classmethod
    def do(cls, job: Callable[[], None], has_ended: threading.Lock) -> None:
        """Gives a job to a thread. The job must not raise. The thread then releases the lock."""
        try:
            cls._idle.pop()._jobs.put((job, has_ended))
        except IndexError:
            thread = cls()
            thread._jobs.put((job, has_ended))
            threads.start(thread)

    def run(self) -> None:
        """Does jobs until the thread should end."""
        state = thread_state.of_thread()
        while self._do_one(state):
            pass

    def _do_one(self, state: tuple) -> bool:
        """Waits for a job and does it; returns whether to wait for another. Its frame frees the job when it returns."""
        try:
            job, has_ended = self._jobs.get(timeout=_IDLE)
        except queue.Empty:
            try:
                self._idle.remove(self)
            except ValueError:  # another thread has just taken it out and is about to send a job
                return True
            return False
        with keras_state.entered({}):
            job()
        del job  # before the lock is released: the job holds the first batch and the iterator
        stays = thread_state.is_as(state)
        if stays:
            self._idle.append(self)  # also before the lock is released: the next loop must find this thread
        has_ended.release()
        return stays


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Thread._idle.clear)  # none of the threads exist in a child process
