"""A device loop whose batches are arguments: the way without calls of the host, which take long on TPUs and GPUs.

The program is a loop over a chunk of batches, which is an argument of the launch with the number of batches in it. A
loop of many steps is several launches. On devices with a queue a launch returns before the program has run, so the next
chunk is sent to the devices while the one before runs; at most two chunks are there at a time. Nothing shows that a
launch makes progress, so with `timeout=` each step is a launch, and the wait for its batch has the same limit.

On several CPU devices, `device_loop` calls the host for its batches: one launch for all steps is faster there. On a
single one the program, and such a call, would run on the thread that launches, where another thread may raise an
exception at any instant: the program fails, and the variables that it overwrites are lost. Both ways run the same steps
with the same numbers. A step that calls the host itself stays with the other way: if its host call fails, the results
of no step of the loop are kept.

With several workers whose devices share a model, each takes its own batches, and before a launch they agree on the
number of steps: the smallest that any of them can make. What a worker took for more is the first of its next chunk.
There, a step that calls the host is a launch of its own; if its host call fails, the steps before it are kept.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.diagnostics.failed_run import note_failed_run
from replica_engine.diagnostics.flight_record import launch_records
from replica_engine.errors import CoordinatorRow, ReplicaRow, ReplicaTimeoutError
from replica_engine.errors.base import add_note
from replica_engine.errors.timeouts import FOR_BATCH, FOR_BATCH_OF_WORKER
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.telemetry.watchdog import Watch
from replica_engine.xla.infeed import InputQueue
from replica_engine.xla.loop.step import LoopBody
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.results import Column

always: bool | None = None
"""Whether batches are arguments on all devices (True), or on none (False). None: on all but several CPUs. For tests."""


class StepCallsHost(Exception):
    """Ends the trace of a loop whose step calls the host, which was not known."""


def are_arguments(devices: DeviceGroup, timed: bool, calls_host: bool = False) -> bool:
    """Whether the batches of a loop on these devices are arguments.

    Args:
        devices: the devices.
        timed: whether launches have a limit. Then no variable is overwritten.
        calls_host: whether the step is known to call the host.
    """
    if calls_host:  # a batch that several workers divide cannot come out of a call of one of them
        return devices.mesh is not None and devices.member is not None
    if devices.mesh is not None:  # a host call has whole batches, on one device
        return True
    if devices.member is not None:  # the workers agree on the number of steps in the program, which calls the host
        return False
    if always is not None:
        return always
    return devices.has_queue or (devices.size == 1 and not timed)


def most_bytes(devices: DeviceGroup) -> int:
    """The most bytes of a replica's part of a chunk with more than one batch.

    A chunk has one size, however many batches are in it, so that one program serves any number of steps. It is always
    sent whole.
    """
    return 1 << 22 if devices.has_queue or devices.mesh is not None else 1 << 18


def at_once(devices: DeviceGroup, prefetch: int | None) -> int:
    """How many chunks are on the devices at a time. Of their batches, all but that of the running step are ahead."""
    return 2 if devices.has_queue and prefetch != 1 else 1


class ChunkBody(LoopBody):
    """The body of the program: takes how many batches a chunk has, and for each input the stacked values.

    Args:
        calls_host: whether the step is known to call the host. Then there is one batch in each chunk.

    Attributes:
        stacked: how many dimensions of an argument come before those of a batch.
    """

    stacked = 1

    def __init__(self, *of_loop: Any, calls_host: bool):
        super().__init__(*of_loop)
        self._calls_host = calls_host

    def __call__(self, count: tf.Tensor, *inputs: tf.Tensor) -> Any:
        """Called by `trace`.

        Raises:
            StepCallsHost: the step calls the host, which was not known.
        """
        step = self._traced_step()
        if self._calls_host:
            return step.value(step.run(*[each[0] for each in inputs]))
        if step.calls_host:
            raise StepCallsHost

        def one(number: tf.Tensor, _: list[tf.Tensor]) -> tuple:
            taken = step.run(*[each[number] for each in inputs])
            return number + 1, list(taken) if step.zeros else []

        _, outputs = tf.while_loop(lambda number, _: number < count, one, (0, step.zeros))
        return step.value(outputs)


def arguments_like(specs: Sequence[tf.TensorSpec], most: int, size: int) -> tuple:
    """Arguments of the shapes and dtypes that the body takes, for its trace."""
    values = [
        np.full([most, *spec.shape], "" if spec.dtype == tf.string else 0, spec.dtype.as_numpy_dtype) for spec in specs
    ]
    return (np.int32(0), *(distribute.PerReplica([value] * size) for value in values))


class Chunks:
    """Runs the chunks of one loop.

    Args:
        compiled: the program.
        queue: the queue of batches.
        specs: specs of the inputs of a step.
        others: values of the program's parameters behind those of the batches.
        most: the most batches in a chunk.
        at_once: the most chunks on the devices.

    Attributes:
        made: how many steps are known to have ended.
        columns: for each result of the body, the replicas' values after the last of them.
    """

    def __init__(
        self,
        compiled: Compiled,
        queue: InputQueue,
        specs: Sequence[tf.TensorSpec],
        others: Sequence[list[np.ndarray]],
        most: int,
        at_once: int,
    ):
        self.made = 0
        self.columns: list[Column] = []
        self._compiled = compiled
        self._queue = queue
        self._specs = specs
        self._others = others
        self._most = most
        self._at_once = at_once
        self._size = compiled.devices.size
        self._more = True
        self._left: list[Sequence[Any]] = []  # batches that other workers had none to go with
        self._over = False  # a worker has no more

    def run(self) -> None:
        """Runs all steps.

        Raises:
            ReplicaTimeoutError: a launch, or the wait for a batch of this worker or of another, took longer than
                `timeout`.
        """
        running: deque[tuple[Callable[[], list[Column]], int]] = deque()
        while chunk := self._take():
            running.append((self._compiled.launch(self._stacked(chunk), feed=self._queue), len(chunk)))
            if len(running) == self._at_once:
                self._end(*running.popleft())
        while running:
            self._end(*running.popleft())

    def _end(self, launch: Callable[[], list[Column]], steps: int) -> None:
        """Waits for the end of a launch of some steps."""
        self.columns = launch()
        self.made += steps
        if self._compiled.devices.member is not None:
            self._compiled.devices.member.progress(self._compiled.program.body.steps + self.made)

    def _take(self) -> list[Sequence[Any]]:
        """Waits for the next chunk: as many batches as fit, or those that are left; for each replica, the arrays."""
        if self._over:
            return []
        name, limits = self._compiled.program.name, self._compiled.program.body.limits
        chunk, self._left = self._left, []
        several = "" if self._compiled.devices.member is None else ", or for that of another worker,"

        def slow(seconds: float) -> str:
            waited = f"{seconds:.3g} s. No step runs meanwhile."
            return f"The device loop `{name}` has been waiting for its next batch{several} for {waited}"

        watch = Watch(slow, limits.warn_after)
        try:  # no `with`: an exception of another thread may come in `__exit__`
            watch.__enter__()
            while self._more and (room := self._most - len(chunk)):
                if not self._queue.comes_within(limits.timeout):
                    raise self._late(watch.waited, FOR_BATCH)
                taken = [self._queue.take(replica, room) for replica in range(self._size)]
                chunk.extend(zip(*[parts for parts, _ in taken], strict=True))
                self._more = taken[0][1]
            if several:
                chunk = self._agreed(chunk, watch)
            watch.__exit__(None, None, None)
        except BaseException:
            watch.__exit__(None, None, None)
            raise
        return chunk

    def _agreed(self, chunk: list[Sequence[Any]], watch: Watch) -> list[Sequence[Any]]:
        """The batches of a chunk for which all workers have one."""
        member, program = self._compiled.devices.member, self._compiled.program
        assert member is not None, "asked before"
        name = f"the next steps of `{program.name}`"
        offers = member.exchange(name, [len(chunk), self._more], program.body.limits.timeout)
        if offers is None:
            error = self._late(watch.waited, FOR_BATCH_OF_WORKER)
            add_note(error, member.describe())
            raise error
        count = min(offered for offered, _ in offers)
        self._over = not all(more or offered > count for offered, more in offers)
        self._left = chunk[count:]
        return chunk[:count]

    def _late(self, waited: float, state: str) -> ReplicaTimeoutError:
        """The error that no batch has come within the limit."""
        devices, body = self._compiled.devices, self._compiled.program.body
        rows = [
            ReplicaRow(replica, self._size, name, state, self.made, "", waited, points="step")
            for replica, name in enumerate(devices.names)
        ]
        coordinator = CoordinatorRow(threading.current_thread().name, state, waited)
        error = ReplicaTimeoutError.after(body.limits.timeout or 0.0, rows, coordinator)
        note_failed_run(error, lambda: launch_records(body.launches, devices.names, body.KEPT), None)
        return error

    def _stacked(self, chunk: Sequence[Sequence[Any]]) -> list[list[np.ndarray]]:
        """The values of the program's parameters. What lies behind the last batch is never used."""
        slots = [[np.asarray(len(chunk), np.int32)]]
        for index, spec in enumerate(self._specs):
            slots.append([self._of_replica(chunk, replica, index, spec) for replica in range(self._size)])
        return [*slots, *self._others]

    def _of_replica(self, chunk: Sequence[Sequence[Any]], replica: int, index: int, spec: tf.TensorSpec) -> np.ndarray:
        if self._most == 1:  # without a copy
            return np.expand_dims(chunk[0][replica][index], 0)
        stacked = np.zeros([self._most, *spec.shape], spec.dtype.as_numpy_dtype)
        for number, batch in enumerate(chunk):
            stacked[number] = batch[replica][index]
        return stacked
