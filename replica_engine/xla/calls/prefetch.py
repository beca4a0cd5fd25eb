"""The inputs of a device loop: fetched ahead of its steps, and taken apart into each replica's arrays.

A separate thread fetches them into a bounded queue. Starting a thread takes as long as many small steps, and the caller
would wait for it. So when its loop is over, the thread stays for a moment, for the next loop.
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

import numpy as np
import tensorflow as tf

from replica_engine.errors import HostAccessError, InputsError
from replica_engine.pjrt.device_group import held_off, needed_by_a_program
from replica_engine.process import threads
from replica_engine.process.interrupts import MISSED
from replica_engine.upstream import data_pulls, distribute, thread_state
from replica_engine.upstream.graphs import xla_ops
from replica_engine.upstream.keras import keras_variables as keras_state
from replica_engine.values.structure import flatten
from replica_engine.watch import timeline
from replica_engine.xla.arguments import Arguments, difference, view


class BatchReader:
    """Takes batches apart that have the structure, dtypes and shapes of the first one.

    Most batches are tensors and arrays. Those are read quickly, and compared with the first batch while they are read.
    Any other batch goes through `Arguments`, which also explains how a batch differs from the first.

    Args:
        batch: the first batch: the arguments of a step.
        arguments: the same batch, taken apart.
        name: the name of the step, for messages.
        pulls: takes the batches after the first one as arrays; None if only their iterator can.
    """

    def __init__(self, batch: tuple, arguments: Arguments, name: str, pulls: data_pulls.Pulls | None = None):
        self._arguments = arguments
        self._name = name
        self._like, _ = _read(batch)
        self._skeleton = tf.nest.map_structure(lambda _: 0, batch) if batch else ()
        self._nothing: list[list[np.ndarray]] = [[] for _ in range(arguments.size)]
        self._pulls = pulls
        # For each column, the number of its component: TensorFlow counts them in the order of sorted keys.
        numbers = tf.nest.pack_sequence_as(batch, range(len(tf.nest.flatten(batch))))
        self._components = flatten(numbers)[0] if pulls is not None else []

    def take(self, batches: Iterator[tuple], number: int, most: int) -> list[list[list[np.ndarray]]]:
        """The next batches, as `parts` gives each: at least one and at most `most`, or none at the end.

        Args:
            batches: the batches.
            number: the number of the next one.
            most: how many may be taken.

        Raises:
            Exception: the iterator raised it.
            InputsError: a batch differs from the first one.
        """
        if self._pulls is None:
            batch = next(batches, None)
            return [] if batch is None else [self.parts(batch, number)]
        try:
            taken = self._pulls.take(most)
        except tf.errors.OutOfRangeError:
            return []
        each, size = self._pulls.each, self._arguments.size
        rows = list(zip(*[taken[component] for component in self._components], strict=True))
        if each == 1:
            return [[list(row)] * size for row in rows]
        return [list(map(list, rows[begin : begin + each])) for begin in range(0, len(rows), each)]

    def parts(self, batch: tuple, number: int) -> list[list[np.ndarray]]:
        """For each replica, the arrays of a batch. Nothing changes these arrays afterwards.

        Raises:
            InputsError: the batch differs from the first in structure, dtypes or shapes.
        """
        if batch == () == self._skeleton:  # steps without inputs
            return self._nothing
        like, columns = _read(batch)
        if like is None or like != self._like:
            columns = self._through_arguments(batch, number)
        size = self._arguments.size
        return [[column[replica % len(column)] for column in columns] for replica in range(size)]

    def _through_arguments(self, batch: tuple, number: int) -> list[list[np.ndarray]]:
        first = self._arguments
        given = Arguments(self._in_order(batch), {}, first.size, numbers=True)
        if given.key != first.key:
            unlike = difference(given.slots, [slot.name for slot in first.slots], first.slots)
            raise InputsError(
                f"Batch {number} for `{self._name}` differs from the first batch of this run: {unlike}. A device "
                "loop is one program for all of its batches: give every batch the same keys, lengths and dtypes."
            )
        for slot, wanted in zip(given.slots, first.slots, strict=True):
            for value in slot.values:
                if value.shape != wanted.shape:
                    raise InputsError(
                        f"{slot.name} of batch {number} for `{self._name}` has the shape {value.shape}, but in the "
                        f"first batch of this run it has the shape {wanted.shape}. A device loop runs steps of one "
                        "shape: batch with drop_remainder=True, or pad the last batch."
                    )
        return given.numpy()

    def _in_order(self, batch: tuple) -> tuple:
        """A batch whose dictionaries have their keys in the same order as in the first batch."""
        try:
            tf.nest.assert_same_structure(self._skeleton, batch)
        except (ValueError, TypeError):
            return batch
        return tf.nest.pack_sequence_as(self._skeleton, tf.nest.flatten(batch))


def _read(batch: Any) -> tuple[Any, list[list[np.ndarray]]]:
    """The structure of a batch with dtypes and shapes, and for each tensor the replicas' arrays, or one for all.

    The structure is None if the batch holds anything but tensors and arrays.
    """
    leaves, spec = flatten(batch, what="the batches")
    like: list[Any] = [spec.key]
    columns: list[list[np.ndarray]] = []
    for leaf in leaves:
        column = []
        for part in leaf.values if isinstance(leaf, distribute.PerReplica) else (leaf,):
            if isinstance(part, tf.__internal__.EagerTensor) and not xla_ops.is_host_only(part.dtype):
                array = view(part)
            elif type(part) is np.ndarray:
                array = np.array(part, order="C")  # a copy: the iterator may reuse its array for the next batch
            else:
                return None, []
            # Strings, and numbers in the other byte order: `Arguments` converts them.
            if array.dtype.kind in "OSU" or not array.dtype.isnative:
                return None, []
            column.append(array)
            like.append((array.dtype, array.shape))
        like.append(len(column))
        columns.append(column)
    return like, columns


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
        # What the user's iterator raises may be anything. The loop raises it; this thread must live on for the next
        # loop.
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
        state = thread_state.read_thread_state()
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
