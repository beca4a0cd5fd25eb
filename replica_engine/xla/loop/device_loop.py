"""Many steps in one launch: a loop on the devices, with the inputs of the steps fed in from the host.

There are two ways for the inputs. On TPUs and GPUs, and where a replica has several devices, they are arguments of
several launches (`chunks`). On CPU devices, with several workers, and where a step calls the host, the program itself
fetches them, in one launch for all steps. The rest of this text is about the second way. Where replicas have devices of
several workers, only the first serves, and a step that calls the host is a launch.

The program is two loops around the step. The outer loop calls the host for the next batches, a chunk. They lie ready
there, since a thread fetches batches ahead of the steps (`InputQueue`). The inner loop runs a step for each batch. A
call of the host takes as long as many small steps, so small batches come many at a time. Large batches, and those of a
step that calls the host itself, come one by one. The host also answers how many batches a chunk has and whether more
will follow, so one program serves any number of steps.

With several workers, each has its own batches. The workers agree on the number of steps of each chunk, in the program:
the smallest that any of them can make. So all end after the same step.

Steps are always whole. If the inputs end early, or the iterator fails, the results of the steps that ran are kept. If
a host call of a step fails, the results of no step of the launch are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine._tf.data_pulls import Pulls
from replica_engine._tf.graphs import xla_ops
from replica_engine._tf.graphs.python_ops import python_op
from replica_engine.errors import HostAccessError, InputsError, LoweringError, ReplicaEngineError
from replica_engine.pjrt.group import needed_by_a_program
from replica_engine.xla import soft_placement
from replica_engine.xla.body import host_call_site, in_body
from replica_engine.xla.host_calls.call import HostCall, HostCalls
from replica_engine.xla.infeed import InputQueue, Pace
from replica_engine.xla.loop import chunks
from replica_engine.xla.loop.batches import BatchReader
from replica_engine.xla.loop.prefetch import Prefetcher
from replica_engine.xla.loop.step import LoopBody
from replica_engine.xla.signature.arguments import Arguments
from replica_engine.xla.signature.function_spec import FunctionSpec
from replica_engine.xla.soft_placement import OWN_LOOP
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.program_cache import ProgramCache, TracedProgram

_MOST_STEPS = 128  # the most steps of a chunk
_MOST_BYTES = 1 << 18  # the most bytes of a replica's part of a chunk; the program gets it whole, however few the steps


class Outcome(NamedTuple):
    """The outcome of a device loop.

    Attributes:
        steps: how many steps ran; fewer than requested if the inputs ended early.
        results: for each replica, what the last step returned.
        error: the exception that the iterator raised, or a host call of a step that is a launch; or None.
    """

    steps: int
    results: list[Any]
    error: BaseException | None


def run_loop(
    programs: ProgramCache,
    source: FunctionSpec,
    mode: Any,
    step: Callable[[Callable[..., Any], Any, dict[str, Any]], Any],
    first: tuple,
    rest: Iterator[tuple],
    iterations: int,
    prefetch: int | None,
    pulls: Pulls | None = None,
) -> Outcome:
    """Runs up to `iterations` steps in one launch.

    Args:
        programs: the cache to compile with.
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
        Exception: the step raised it while it was traced, or a host call of the step raised it.
    """
    arguments = Arguments(first, {}, programs.devices.size, numbers=True)
    shapes = [_shape(slot, source.name, programs.moves_ops) for slot in arguments.slots]
    specs = [tf.TensorSpec(shape, slot.dtype) for slot, shape in zip(arguments.slots, shapes, strict=True)]
    has_text = any(spec.dtype == tf.string for spec in specs)
    reader = BatchReader(first, arguments, source.name, pulls)
    key = ("device loop", mode, programs.key(source), arguments.key, tuple(shapes))
    # The sign of life for the watchdog is that a batch is taken, and a single step may be as slow as the limit allows.
    timed = programs.limits.timeout is not None
    calls_host = has_text or programs.calls_host(key)
    while chunks.are_arguments(programs.devices, timed, calls_host):
        at_once = 1 if calls_host else chunks.at_once(programs.devices, prefetch)
        most = 1 if timed or calls_host else _chunk(specs, prefetch, chunks.most_bytes(programs.devices), at_once)
        body = chunks.ChunkBody(source, step, arguments, specs, most, calls_host=calls_host)
        given = Arguments(chunks.arguments_like(specs, most, arguments.size), {}, arguments.size, numbers=True)
        try:
            program = _found(programs, source, body, (*key, "arguments", most, calls_host), given)
        except chunks.StepCallsHost:
            programs.note_host_calls(key)
            calls_host = True
        else:
            others = given.numpy()[1 + len(specs) :]
            return _run_chunks(
                program, reader, first, rest, iterations, specs, others, most, at_once, calls_host, prefetch
            )
    most = 1 if timed else _chunk(specs, prefetch, _MOST_BYTES)
    loop = _Loop(source, step, arguments, specs, most)
    none = Arguments((), {}, arguments.size)
    program = _found(programs, source, loop, (*key, most), none)
    compiled = program.find([tuple(slot.shape) for slot in none.slots])
    pace = _feed_of(program).pace
    several = programs.devices.member is not None  # then the batches of a chunk are in the queue until its end
    depth = max(prefetch or 2 * pace.most, pace.most) + 1 if several else _depth(prefetch, pace.most)
    queue = InputQueue(arguments.size, depth, pace)
    queue.put(reader.parts(first, 0))
    prefetcher = Prefetcher(queue, reader, rest, iterations, program.traced.body.name)
    with _fed(compiled, queue, prefetcher, iterations):
        columns = compiled.run(none.numpy(), feed=queue)
        queue.over()
        steps, results = zip(*program.traced.replicas_results(columns), strict=True)
    made = int(steps[0]) if several else queue.begun
    _note_steps(program, made)
    return Outcome(made, list(results), prefetcher.error)


def _found(
    programs: ProgramCache, source: FunctionSpec, body: _Loop | chunks.ChunkBody, key: tuple, arguments: Arguments
) -> TracedProgram:
    """The program of a loop, traced now or before."""
    shapes = soft_placement.add_caller(arguments, arguments.shapes)

    def of_loop() -> FunctionSpec:
        declared = (*key[:2], programs.key(source), *key[3:], arguments.key)
        return FunctionSpec(body, autograph=False, declared=declared)

    program = programs.find(of_loop(), arguments, shapes)
    if body.was_traced:  # now it is known which functions in the step run on the host, which changes the step's key
        programs.learn(source, program)
        programs.keep(of_loop(), arguments, program)
    body.forget()
    return program


def _run_chunks(
    program: TracedProgram,
    reader: BatchReader,
    first: tuple,
    rest: Iterator[tuple],
    iterations: int,
    specs: Sequence[tf.TensorSpec],
    others: list[list[np.ndarray]],
    most: int,
    at_once: int,
    calls_host: bool,
    prefetch: int | None,
) -> Outcome:
    """Runs a loop whose batches are arguments; `others` are the values of arguments that are not batches."""
    size = program.devices.size
    queue = InputQueue(size, _depth(prefetch, most, at_once), Pace(most))
    queue.put(reader.parts(first, 0))
    prefetcher = Prefetcher(queue, reader, rest, iterations, program.traced.body.name)
    shapes = [(), *((most, *spec.shape) for spec in specs), *(values[0].shape for values in others)]
    compiled = program.find(shapes)
    steps, failed = chunks.Chunks(compiled, queue, specs, others, most, at_once), None
    try:
        with _fed(compiled, queue, prefetcher, iterations):
            steps.run()
    except Exception as error:
        if not (calls_host and steps.columns) or isinstance(error, ReplicaEngineError):
            raise
        failed = error  # a host call's, in a step after others, which are kept
    finally:
        _note_steps(program, steps.made)
    return Outcome(steps.made, program.traced.replicas_results(steps.columns), failed or prefetcher.error)


def _note_steps(program: TracedProgram, made: int) -> None:
    program.traced.body.steps += made
    if program.devices.member is not None:
        program.devices.member.progress(program.traced.body.steps)


@contextlib.contextmanager
def _fed(compiled: Compiled, queue: InputQueue, prefetcher: Prefetcher, iterations: int) -> Iterator[None]:
    """Inside, batches are fetched into the queue while the program runs."""
    try:
        with compiled.writing():
            if iterations > 1:
                prefetcher.start()
            else:
                queue.close()
            yield
    finally:
        queue.stop()
        prefetcher.end()


def _depth(prefetch: int | None, most: int, at_once: int = 1) -> int:
    """How many batches the queue holds, so that with those on the devices no more are ahead of the running step."""
    return max((prefetch or (at_once + 1) * most) - at_once * most + 1, 1)


def _chunk(specs: Sequence[tf.TensorSpec], prefetch: int | None, most_bytes: int, at_once: int = 1) -> int:
    """How many batches may come at a time: so few that as many can be fetched meanwhile.

    Args:
        specs: specs of the inputs of a step.
        prefetch: how many batches are fetched ahead at most.
        most_bytes: the most bytes of a replica's part of them.
        at_once: how many times as many are on the devices. They count as fetched ahead, but for that of the step.
    """
    if any(spec.dtype == tf.string for spec in specs):  # the host keeps the strings of one batch for each replica
        return 1
    size = sum(np.dtype(spec.dtype.as_numpy_dtype).itemsize * spec.shape.num_elements() for spec in specs)
    fitting = min(_MOST_STEPS, most_bytes // max(1, size))
    return max(1, fitting if prefetch is None else min(fitting, (prefetch + 1) // (at_once + 1)))


class _Loop(LoopBody):
    """The body of the program: a function without arguments."""

    def __call__(self) -> Any:
        step, body = self._traced_step(), in_body()
        # A host call of a step reports the step it was in. So each step that calls the host is its own chunk.
        feed = _Feed(step.calls, self._specs, 1 if step.calls_host else self._most)

        def chunk(_: tf.Tensor, done: tf.Tensor, outputs: list[tf.Tensor]) -> tuple:
            count, more, inputs = feed.emit(done)
            if feed.offers:
                assert body is not None, "a loop is traced in one"
                count, total = tf.unstack(
                    xla_ops.all_reduce(
                        tf.stack([count, count + tf.cast(more, tf.int32)]), [list(range(body.size))], "Min"
                    )
                )
                more = total > count  # every worker has more
                done += count

            def one(number: tf.Tensor, _: list[tf.Tensor]) -> tuple:
                taken = step.run(*[each if each.dtype == tf.string else each[number] for each in inputs])
                return number + 1, list(taken) if step.zeros else []

            _, outputs = tf.while_loop(lambda number, _: number < count, one, (0, outputs), name=OWN_LOOP)
            return more, done, outputs

        _, done, outputs = tf.while_loop(lambda more, *_: more, chunk, (True, 0, step.zeros), name=OWN_LOOP)
        return (done if feed.offers else 0), step.value(outputs)


class _Feed(HostCall):
    """The host call that brings a replica its parts of the next batches.

    Its results are how many batches there are, whether more will follow, and for each input the stacked values.

    Strings stay on the host, where the ops that use them run (`soft_placement`).

    Args:
        calls: the host calls of the body.
        specs: specs of the inputs of a step.
        most: how many batches may come at a time; 1 if there are strings among the inputs.

    Attributes:
        pace: determines how many batches come at a time.
        offers: whether the workers agree on how many of the batches they use; see `InputQueue.offer`.
    """

    is_users = False
    first_own = 2

    def __init__(self, calls: HostCalls, specs: Sequence[tf.TensorSpec], most: int):
        self._specs = specs
        self._numbers = [index for index, spec in enumerate(specs) if spec.dtype != tf.string]
        stacked = [tf.TensorSpec([most, *specs[index].shape], specs[index].dtype) for index in self._numbers]
        super().__init__(calls, "feed", "", [tf.TensorSpec([], tf.int32), tf.TensorSpec([], tf.bool), *stacked])
        self.pace = Pace(most)
        body = in_body()
        self.offers = body is not None and body.own < body.size

    def describe(self) -> str:
        """The call in words, for messages."""
        return "the wait for the next batch"

    def emit(self, done: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        """Adds a call to the graph under construction; `done` is the number of steps that all workers have made."""
        _, (count, more, *numbers) = self.calls.emit(self, [done] if self.offers else [])
        found = iter(numbers)
        inputs = [
            self._text(index) if spec.dtype == tf.string else next(found) for index, spec in enumerate(self._specs)
        ]
        return count, more, inputs

    def _text(self, index: int) -> tf.Tensor:
        """A string input: the host's strings of the replica's current batch."""

        def take() -> np.ndarray:
            side, run = host_call_site(), self.calls.run
            assert side is not None, "it runs on the host"
            assert run is not None, "set before the launch"
            return run.kept[int(side.replica) - run.first].texts[index]

        text = python_op(take, [], tf.string)
        text.set_shape(self._specs[index].shape)
        return text

    def __call__(self, position: np.ndarray, *done: np.ndarray) -> tuple[np.ndarray, ...]:
        """See `HostCall.__call__`. Quicker, and in a failed run it still works until all replicas may stop."""
        run = self.calls.run
        assert run is not None, "set before the launch"
        here = int(position)
        replica = here % run.size
        following = np.asarray(here + run.size)
        try:
            with needed_by_a_program(HostAccessError.in_inputs):
                batches, more = run.next_steps(self, replica, int(done[0]) if done else None)
                if batches and len(self._numbers) < len(self._specs):
                    run.kept[replica].texts = batches[0]
                stacked = self._stacked([[batch[index] for index in self._numbers] for batch in batches])
        except BaseException as error:
            run.note(error, replica, self)
            return (following, *self.zeros)
        return (following, np.asarray(len(batches), np.int32), np.asarray(more), *stacked)

    def _stacked(self, batches: Sequence[Sequence[np.ndarray]]) -> Sequence[np.ndarray]:
        if not batches:
            return self.zeros[2:]
        if self.pace.most == 1:  # without a copy
            return [np.expand_dims(value, 0) for value in batches[0]]
        stacked = [np.empty_like(zeros) for zeros in self.zeros[2:]]
        for into, *values in zip(stacked, *batches, strict=True):
            for index, value in enumerate(values):
                into[index] = value
        return stacked


def _feed_of(program: Any) -> _Feed:
    """The host call of a program that brings its inputs."""
    return next(call for call in program.traced.host_calls.calls if isinstance(call, _Feed))


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
