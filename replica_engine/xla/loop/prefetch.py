"""Fetching the inputs of a device loop, ahead of its steps and on a thread of its own.

To start a thread takes as long as many small steps, and the caller would wait for it. So it stays for a moment when its
loop is over, for the next one.
"""

from __future__ import annotations

import contextvars
import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import ClassVar

from replica_engine._tf import keras_state, thread_state
from replica_engine.errors import HostAccessError
from replica_engine.pjrt.group import needed_by_a_program
from replica_engine.pjrt.interrupts import held_off
from replica_engine.telemetry import timeline
from replica_engine.telemetry.trace_file import Track
from replica_engine.xla.infeed import InputQueue
from replica_engine.xla.loop.batches import BatchReader

NAME = "replica_engine: inputs of a device loop"
"""Of the threads."""

_IDLE = 0.05  # seconds that a thread stays; loops that are farther apart gain nothing by that
_JOIN = 1.0  # seconds that a loop waits for its thread, which may be in the user's iterator


class Prefetcher:
    """Fetches batches ahead of the steps of one loop.

    Args:
        queue: where to put them; the first one is there.
        reader: takes them apart.
        batches: the rest.
        iterations: how many there are to be.
        name: of who runs the steps, for timelines.

    Attributes:
        error: what ended the inputs early.
    """

    def __init__(self, queue: InputQueue, reader: BatchReader, batches: Iterator[tuple], iterations: int, name: str):
        self.error: BaseException | None = None
        self._queue = queue
        self._reader = reader
        self._batches = batches
        self._iterations = iterations
        self._name = name
        self._started = False
        self._has_ended = threading.Lock()  # taken until then
        self._has_ended.acquire()

    def start(self) -> None:
        """Begins to fetch."""
        with held_off():  # a thread that has been taken out gets its job, and is waited for
            self._started = True
            # In a context of its own, as on a new thread: what the iterator sets there is not for the next loop.
            _Thread.do(functools.partial(contextvars.Context().run, self._run), self._has_ended)

    def end(self) -> None:
        """Waits for the thread, if it was started, but not for ever. The queue has been stopped."""
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
        track = Track(self._name, "feeding", order=-1)
        for number in range(1, self._iterations):
            if not self._queue.wait_for_room():
                return
            began = time.perf_counter()
            with timeline.profiled("feeding"):
                batch = next(self._batches, None)
            if timeline.recording():
                timeline.add(track, f"batch {number}", "feeding", began, time.perf_counter())
            if batch is None:
                return
            self._queue.put(self._reader.parts(batch, number))


class _Thread(threading.Thread):
    """Does jobs, one after the other, and ends when there has been none for a while.

    It refers to no job that is over. A daemon: at exit nobody waits for the user's iterator. One that an iterator has
    left in another state than it found (a device, a graph) does no other job; of a `threading.local` of the user's it
    cannot know.
    """

    _idle: ClassVar[list[_Thread]] = []  # without a lock, which a signal handler could not take again: `pop`, `remove`

    def __init__(self) -> None:
        super().__init__(name=NAME, daemon=True)
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Lock]] = queue.SimpleQueue()

    @classmethod
    def do(cls, job: Callable[[], None], has_ended: threading.Lock) -> None:
        """Has a thread do a job, which must not raise, and then release a lock."""
        try:
            cls._idle.pop()._jobs.put((job, has_ended))
        except IndexError:
            thread = cls()
            thread._jobs.put((job, has_ended))
            thread.start()

    def run(self) -> None:
        """The thread."""
        state = thread_state.of_thread()
        while self._do_one(state):
            pass

    def _do_one(self, state: tuple) -> bool:
        """Waits for a job and does it; whether it may wait for another. In a frame that goes away with the job."""
        try:
            job, has_ended = self._jobs.get(timeout=_IDLE)
        except queue.Empty:
            try:
                self._idle.remove(self)
            except ValueError:  # somebody has just taken it out
                return True
            return False
        with keras_state.entered({}):
            job()
        del job  # before anybody is told: it has the first batch, and the iterator
        stays = thread_state.is_as(state)
        if stays:
            self._idle.append(self)  # likewise: the next loop is to find it
        has_ended.release()
        return stays


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Thread._idle.clear)  # a child process has none of the threads
