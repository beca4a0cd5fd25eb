"""Many steps in a few launches: loops on the devices, with batches that a thread fetches ahead.

The batches of a launch are its arguments (`chunk_launches`). They lie ready, since a thread fetches batches ahead of
the steps (`prefetch`). Small batches make a launch of many steps. A large batch is a launch of its own, and so is one
whose step calls the host.

With several workers, each has its own batches. Before each launch the workers agree on the number of its steps: the
smallest that any of them can make. So all end after the same step.

Steps are always whole. If the inputs end early, the iterator fails, or a host call of a step fails, the results of the
steps before are kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.errors import HostAccessError, HostResultError, InputsError, LoweringError, ReplicaEngineError
from replica_engine.upstream.data_pulls import Pulls
from replica_engine.upstream.graphs import xla_ops
from replica_engine.xla.arguments import Arguments
from replica_engine.xla.calls.chunk_launches import (
    ChunkBody,
    ChunkProgram,
    Chunks,
    StepCallsHost,
    arguments_like,
    batch_bytes,
)
from replica_engine.xla.calls.prefetch import BatchReader, InputQueue, Prefetcher
from replica_engine.xla.calls.program_table import Entry, ProgramTable
from replica_engine.xla.function_spec import FunctionSpec
from replica_engine.xla.soft_placement.host_op_kinds import add_caller

_MOST_STEPS = 128  # the most steps of a launch
_MOST_BYTES = 1 << 21  # the most bytes of a replica's part of a chunk: its batches are copied into one array
_MOST_BYTES_SENT = 1 << 22  # the same where a chunk is sent whole: devices with a queue, or several devices a replica


class LoopOutcome(NamedTuple):
    """The outcome of a device loop.

    Attributes:
        steps: how many steps ran; fewer than requested if the inputs ended early.
        results: gives for each replica what the last step returned; waits for it.
        later: what the replicas returned, regrouped, if it may not be there yet; otherwise None.
        error: the exception that the iterator raised, or a host call of a step after the first; or None.
    """

    steps: int
    results: Callable[[], list[Any]]
    later: Any
    error: BaseException | None


def run_loop(
    programs: ProgramTable,
    source: FunctionSpec,
    mode: Any,
    step: Callable[[Callable[..., Any], Any, dict[str, Any]], Any],
    first: tuple,
    rest: Iterator[tuple],
    iterations: int,
    prefetch: int | None,
    pulls: Pulls | None = None,
) -> LoopOutcome:
    """Runs up to `iterations` steps.

    Args:
        programs: the table to compile with.
        source: the function that is one step.
        mode: anything else that the trace depends on; hashable.
        step: takes the function, and the args and kwargs of a batch; calls the function. What it returns is, for the
            last step, the result of the loop.
        first: the inputs of the first step: its arguments.
        rest: the inputs of the other steps, of the same structure and shapes.
        iterations: how many steps to run.
        prefetch: how many batches are fetched ahead at most; None for two chunks.
        pulls: takes the inputs of the other steps as arrays; None if only `rest` can.

    Raises:
        Exception: the step raised it while it was traced, or a host call of the first step raised it.
    """
    devices = programs.devices
    arguments = Arguments(first, {}, devices.size, numbers=True)
    shapes = [_shape(slot, source.name, programs.body.moves_ops) for slot in arguments.slots]
    specs = tuple(tf.TensorSpec(shape, slot.dtype) for slot, shape in zip(arguments.slots, shapes, strict=True))
    reader = BatchReader(first, arguments, source.name, pulls)
    # With a limit nothing shows that a launch makes progress, and a single step may be as slow as the limit allows.
    alone = programs.body.limits.timeout is not None

    def program_for(calls_host: bool) -> ChunkProgram:
        at_once = 2 if devices.has_queue and prefetch != 1 and not calls_host else 1
        most = 1 if alone or calls_host else _chunk(specs, prefetch, devices.has_queue or devices.mesh, at_once)
        body = ChunkBody(source, step, arguments, specs, calls_host, devices.has_queue)
        declared = ("device loop", mode, arguments.key, tuple(shapes), most, calls_host)
        given = Arguments(arguments_like(specs, most, devices.size, calls_host), {}, devices.size, numbers=True)
        count = len(given.slots)
        of_all = add_caller(given, given.shapes)
        call = FunctionSpec(body, autograph=False, declared=declared, step=source), given, of_all
        return ChunkProgram(body, call, given.numpy()[count:], most, at_once, calls_host)

    entry, program = _found(programs, program_for, any(spec.dtype == tf.string for spec in specs))
    most, at_once = program.most, program.at_once
    # As many as are ahead of the running step, besides those on the devices.
    queue = InputQueue(max((prefetch or (at_once + 1) * most) - at_once * most + 1, 1))
    queue.put(reader.parts(first, 0))
    prefetcher = Prefetcher(queue, reader, rest, iterations, programs.body.name)
    compiled = programs.compiled(entry, list(map(tuple, program.call[2])))
    chunks, failed = Chunks(compiled, queue, specs, program), None
    try:
        with compiled.writing():
            if iterations > 1:
                prefetcher.start()
            else:
                queue.close()
            chunks.run()
    except Exception as error:  # what the user's function on the host raises may be anything
        if not (program.calls_host and chunks.made and _is_of_host_call(error)):
            raise
        failed = error
    finally:
        # In this order: the thread may be waiting for room in the queue.
        queue.stop()
        prefetcher.end()
    later = entry.traced.grouped_results(chunks.columns) if chunks.is_late else None
    results = functools.partial(entry.traced.replicas_results, chunks.columns)
    return LoopOutcome(chunks.made, results, later, failed or prefetcher.error)


def _is_of_host_call(error: Exception) -> bool:
    """Whether a host call raised an exception, and not the launch around it. Then the steps before it are kept."""
    return isinstance(error, HostResultError | HostAccessError) or not isinstance(error, ReplicaEngineError)


def _found(
    programs: ProgramTable, program_for: Callable[[bool], ChunkProgram], calls_host: bool
) -> tuple[Entry, ChunkProgram]:
    """The trace of a loop, made now or before. Only a trace tells that a step calls the host."""
    sought = found = program_for(calls_host)
    try:
        entry = programs.entry(*sought.call)
        if not calls_host and not entry.traced.stacked:
            found = program_for(True)
    except StepCallsHost:
        found = program_for(True)
        entry = programs.entry(*found.call)
        programs.file(*sought.call, entry)  # the next loop finds that the step calls the host
    found.body.forget()
    return entry, found


def _chunk(specs: Sequence[tf.TensorSpec], prefetch: int | None, is_sent: Any, at_once: int) -> int:
    """How many batches a launch may have: so few that as many can be fetched meanwhile.

    Args:
        specs: specs of the inputs of a step.
        prefetch: how many batches are fetched ahead at most.
        is_sent: whether sending batches to the devices takes long.
        at_once: how many times as many are on the devices. They count as fetched ahead, but for that of the step.
    """
    most = _MOST_BYTES_SENT if is_sent else _MOST_BYTES
    fitting = min(_MOST_STEPS, most // max(1, batch_bytes(specs)))
    return max(1, fitting if prefetch is None else min(fitting, (prefetch + 1) // (at_once + 1)))


def _shape(slot: Any, name: str, moves_ops: bool) -> tuple[int, ...]:
    if xla_ops.is_host_only(slot.dtype) and not (moves_ops and slot.dtype == tf.string):
        raise LoweringError.host_only(name, slot.name, slot.dtype.name)
    if not slot.shape.is_fully_defined():  # the replicas' shapes differ
        shapes = [str(value.shape) for value in slot.values]
        raise InputsError(
            f"{slot.name} has the shapes {', '.join(shapes)} on the replicas, but a device loop runs steps of one "
            "shape. Batch with drop_remainder=True and a batch size that is a multiple of the number of replicas."
        )
    return tuple(slot.shape)
