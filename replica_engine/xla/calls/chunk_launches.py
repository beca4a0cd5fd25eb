"""The launches of a device loop: each runs a chunk of steps, whose batches are arguments.

The program is a loop over a chunk of batches. It is given the number of steps to run, and the batches stacked. A chunk
has one size, however few of its batches are used, so one program serves any number of steps. A step that calls the host
is a program without a loop: each step is a launch, and if one fails, the steps before it are kept.

A launch takes about a second at most (`_SECONDS`), as far as the times of earlier launches tell: Ctrl-C and an error of
the inputs wait for its end. The first launch of a program has few steps (`_FIRST`), since nothing is known then.

On devices with a queue a launch returns before the program has run, so the next chunk is sent to the devices while the
one before runs; at most two chunks of a loop are there at a time. The last ones may still run when the loop is over:
who looks at its outputs waits for them. Nothing shows that a launch makes progress, so with `timeout=` each step is a
launch, and the wait for its batch has the same limit.

With several workers, each takes its own batches, and before a launch they agree on the number of steps: the smallest
that any of them can make. What a worker took for more is the first of its next chunk.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics import flight_record, user_frames
from replica_engine.errors import CoordinatorRow, LoweringError, ReplicaRow, ReplicaTimeoutError, base, timeouts
from replica_engine.process import interrupts
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import autograph
from replica_engine.values.structure import flatten
from replica_engine.watch.watchdog import Wait
from replica_engine.xla import arguments, function_spec
from replica_engine.xla.body import gathered_host_calls, in_body
from replica_engine.xla.calls.prefetch import InputQueue, Parts
from replica_engine.xla.soft_placement.host_op_kinds import needs_host
from replica_engine.xla.stages import body_graph
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.launch import Launch
from replica_engine.xla.state import host_memory

_FIRST = 16  # the most steps of a program's first launch
_FIRST_BYTES = 1 << 18  # and the most bytes of a replica's batches in it: steps with large batches may be slow
_SECONDS = 1.0  # the most seconds that a launch of several steps should take


class StepCallsHost(Exception):
    """Ends the trace of a loop whose step calls the host, which was not known."""


class ChunkBody:
    """The body of the program: a function that is traced.

    It takes how many batches a chunk has, and for each input of a step the stacked values. If the step calls the host,
    it takes the inputs of one step.

    Args:
        source: the step.
        step: calls the step with args and kwargs.
        like: the first batch.
        specs: specs of the inputs of a step.
        calls_host: whether the step is known to call the host.
        reads_late: whether the devices have a queue; see `BodyGraph`.

    Attributes:
        stacked: how many dimensions of an argument come before those of a batch.
    """

    def __init__(
        self,
        source: function_spec.FunctionSpec,
        step: Callable[..., Any],
        like: arguments.Arguments,
        specs: Sequence[tf.TensorSpec],
        calls_host: bool,
        reads_late: bool,
    ):
        self.__name__ = source.name
        self.made_of = source.fn  # has the line
        self.stacked = 0 if calls_host else 1
        self.reads_late = reads_late
        self._step: Any = step
        self._rebuild: Any = like.rebuild
        self._places = [slot.name for slot in like.slots]
        self._specs = specs
        self._calls_host = calls_host
        self._returned: Any = None

    def forget(self) -> None:
        """Called when tracing is over: lets go of the first batch, which tracing needed."""
        self._rebuild = self._step = self._returned = None

    def __call__(self, *inputs: tf.Tensor) -> Any:
        """Called while the body is traced.

        Raises:
            StepCallsHost: the step calls the host, which was not known.
        """
        # Traced separately first, since a loop must know in advance what its body returns.
        step = tf.function(self._flat, autograph=False).get_concrete_function(*self._specs)
        for index, output in enumerate(step.outputs):
            if not output.shape.is_fully_defined():
                raise LoweringError.dynamic_result(self.__name__, index, user_frames.user_line(output))
        if self._calls_host:
            return self._value(step(*inputs))
        body = in_body()
        moves = body is not None and body.moves_ops and needs_host(step.graph)
        if gathered_host_calls().calls or moves:
            raise StepCallsHost
        count, *stacked = inputs
        # A loop needs values before its first iteration. Nobody sees these, since a chunk has a batch at least.
        zeros = [tf.zeros(each.shape, each.dtype) for each in step.outputs]

        def one(number: tf.Tensor, _: list[tf.Tensor]) -> tuple:
            taken = step(*[each[number] for each in stacked])
            return number + 1, list(taken) if zeros else []  # a function without results returns no list

        _, outputs = tf.while_loop(lambda number, _: number < count, one, (0, zeros))
        return self._value(outputs)

    def _flat(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """The step, from the tensors of a batch to those that it passes out."""
        args, kwargs = self._rebuild(tensors)
        named = arguments.named(self.made_of, tensors, self._places, skip=1)
        with named, autograph.as_outside():  # AutoGraph converts the step, but not this function
            self._returned = flatten(self._step(self.made_of, args, kwargs))
        return [tf.identity(each) for each in self._returned[0] if tf.is_tensor(each)]

    def _value(self, outputs: Sequence[tf.Tensor]) -> Any:
        """What the step returned, with these tensors."""
        found = iter(outputs or ())
        leaves, spec = self._returned
        return spec.rebuild([next(found) if tf.is_tensor(each) else each for each in leaves])


def batch_bytes(specs: Sequence[tf.TensorSpec]) -> int:
    """The bytes of a replica's batch, by the specs of the inputs of a step."""
    return sum(np.dtype(spec.dtype.as_numpy_dtype).itemsize * spec.shape.num_elements() for spec in specs)


class ChunkProgram(NamedTuple):
    """The program of a chunk, as it is looked for.

    Attributes:
        body: its body.
        call: the body as a function, arguments like those that it gets, and their shapes.
        others: values of its parameters behind those of the batches.
        most: the most batches in a chunk.
        at_once: the most chunks on the devices.
        calls_host: whether it is for a step that calls the host, so that a chunk is one step.
    """

    body: ChunkBody
    call: tuple[function_spec.FunctionSpec, arguments.Arguments, arguments.Shapes]
    others: list[list[np.ndarray]]
    most: int
    at_once: int
    calls_host: bool


@functools.lru_cache(maxsize=8)  # for a launch of few steps, most of the time would go into zeros that nobody reads
def arguments_like(specs: tuple[tf.TensorSpec, ...], most: int, size: int, calls_host: bool) -> tuple:
    """Arguments of the shapes and dtypes that the body takes, for its trace. Each replica has values of its own."""

    def values(spec: tf.TensorSpec) -> Any:
        shape = spec.shape if calls_host else [most, *spec.shape]
        empty = np.full(shape, "" if spec.dtype == tf.string else 0, spec.dtype.as_numpy_dtype)
        with tf.device("CPU:0"):
            # One tensor for all replicas would count as shared, and a sum over replicas of it is an error.
            return distribute.PerReplica([tf.constant(empty) for _ in range(size)])

    return (*(() if calls_host else (np.int32(0),)), *map(values, specs))


class Chunks:
    """Runs the chunks of one loop.

    Args:
        compiled: the program.
        queue: the queue of batches.
        specs: specs of the inputs of a step.
        program: the program of a chunk, which was found.

    Attributes:
        made: how many steps are known to have ended.
        columns: for each result of the body, the replicas' values after the last of them.
        is_late: whether the last launches may not have ended.
    """

    def __init__(self, compiled: Compiled, queue: InputQueue, specs: Sequence[tf.TensorSpec], program: ChunkProgram):
        self.made = 0
        self.columns: list[body_graph.Column] = []
        self.is_late = False
        self._compiled = compiled
        self._queue = queue
        self._specs = specs
        self._program = program
        self._size = compiled.devices.size
        self._left: list[Parts] = []  # batches that other workers had none to go with
        self._over = False  # a worker has no more
        self._ended = 0.0  # when the last launch ended

    def run(self) -> None:
        """Runs all steps.

        Raises:
            ReplicaTimeoutError: a launch, or the wait for a batch of this worker or of another, took longer than
                `timeout`.
        """
        running: deque[tuple[Launch, int]] = deque()
        self._ended, begun = time.perf_counter(), 0
        while chunk := self._take():
            running.append((Launch(self._compiled, begun)(self._stacked(chunk)), len(chunk)))
            begun += len(chunk)
            if len(running) == self._program.at_once:
                self._end(*running.popleft())
        # Workers tell each other how far they are, so they wait. Without a wait, the rest of this loop counts as time
        # of the next one: its launches have fewer steps than they might.
        self.is_late = self._compiled.end is not None and self._compiled.devices.member is None
        while running:
            self._end(*running.popleft())

    def _end(self, launch: Launch, steps: int) -> None:
        """Waits for the end of a launch of some steps; not for that of the last ones, if others may follow these."""
        devices, body = self._compiled.devices, self._compiled.program.body
        self.columns = launch.columns(as_arrays=False if self.is_late else None)
        self.made += steps
        body.steps += steps
        if devices.member is not None:
            devices.member.progress(body.steps)
        if self.is_late:
            return
        before, self._ended = self._ended, time.perf_counter()
        # A slow step is forgotten slowly, since steps may differ. The wait for batches counts: it delays an error too.
        seconds = self._compiled.step_seconds or 0.0
        # Never 0: a second is divided by it.
        self._compiled.step_seconds = max((self._ended - before) / steps, 0.7 * seconds, 1e-9)

    def _take(self) -> list[Parts]:
        """Waits for the next chunk: as many batches as a launch may have, or those that are left."""
        if self._over:
            return []
        name, limits = self._compiled.program.name, self._compiled.program.body.limits
        several = "" if self._compiled.devices.member is None else ", or for that of another worker,"
        seconds = self._compiled.step_seconds
        first = min(_FIRST, _FIRST_BYTES // max(1, batch_bytes(self._specs)))
        room = max(1, min(self._program.most, first if seconds is None else int(_SECONDS / seconds)))

        def slow(seconds: float) -> str:
            waited = f"{seconds:.3g} s. No step runs meanwhile."
            return f"The device loop `{name}` has been waiting for its next batch{several} for {waited}"

        def take() -> list[Parts]:
            chunk, self._left = self._left, []
            if room > len(chunk):
                taken = self._queue.take(room - len(chunk), limits.timeout)
                if taken is None:
                    raise self._late(watch.waited, timeouts.FOR_BATCH)
                chunk += taken
            return self._agreed(chunk, watch) if several else chunk

        watch = Wait(slow, limits.warn_after)
        return interrupts.around(watch, take)

    def _agreed(self, chunk: list[Parts], watch: Wait) -> list[Parts]:
        """The batches of a chunk for which all workers have one."""
        member, program = self._compiled.devices.member, self._compiled.program
        assert member is not None, "asked before"
        name = f"the next steps of `{program.name}`"
        offers = member.exchange(name, [len(chunk), self._queue.has_more], program.body.limits.timeout)
        if offers is None:
            error = self._late(watch.waited, timeouts.FOR_BATCH_OF_WORKER)
            base.add_note(error, member.describe())
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
        flight_record.note_failed_run(error, body.records, None)
        return error

    def _stacked(self, chunk: Sequence[Parts]) -> list[list[np.ndarray]]:
        """The values of the program's parameters. What lies behind the last batch is never used."""
        if self._program.calls_host:
            return [*map(list, zip(*chunk[0], strict=True)), *self._program.others]
        slots = [[np.asarray(len(chunk), np.int32)]]
        for index, spec in enumerate(self._specs):
            slots.append([self._stack_replica(chunk, replica, index, spec) for replica in range(self._size)])
        return [*slots, *self._program.others]

    def _stack_replica(self, chunk: Sequence[Parts], replica: int, index: int, spec: tf.TensorSpec) -> np.ndarray:
        if self._program.most == 1:  # without a copy
            return np.expand_dims(chunk[0][replica][index], 0)
        stacked = host_memory.unset([self._program.most, *spec.shape], np.dtype(spec.dtype.as_numpy_dtype))
        for number, batch in enumerate(chunk):
            stacked[number] = batch[replica][index]
        return stacked
