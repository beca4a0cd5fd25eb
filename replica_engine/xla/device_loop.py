"""Many steps in one launch: a loop on the devices, with the inputs of the steps fed in from the host.

The program is a loop around the step. Before each step it calls the host for the next batch, which lies ready there:
a thread fetches batches ahead of the steps (`InputQueue`). Whether there is another one is an answer of the host too,
so one program serves any number of steps. Steps are always whole. When the inputs end early, or fail, the steps that
ran are kept; when a host call of the step fails, none is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine._compat import autograph, xla_ops
from replica_engine.errors import HostAccessError, InputsError, LoweringError
from replica_engine.pjrt.group import needed_by_a_program
from replica_engine.telemetry import timeline
from replica_engine.telemetry.trace_file import Track
from replica_engine.xla.arguments import Arguments
from replica_engine.xla.batches import BatchReader
from replica_engine.xla.body import host_calls
from replica_engine.xla.host_call import HostCall, HostCalls
from replica_engine.xla.input_queue import InputQueue
from replica_engine.xla.program import Programs
from replica_engine.xla.source import Source
from replica_engine.xla.user_lines import user_line

_JOIN = 1.0  # seconds that a run waits for its feeding thread, which may be in the user's iterator


class Outcome(NamedTuple):
    """What a device loop came to.

    Attributes:
        steps: how many ran; fewer than were asked for if the inputs ended early.
        results: for each replica what the last step returned.
        error: what the iterator raised.
    """

    steps: int
    results: list[Any]
    error: BaseException | None


def run_loop(
    programs: Programs,
    source: Source,
    mode: Any,
    step: Callable[[Callable[..., Any], Any, dict[str, Any]], Any],
    first: tuple,
    rest: Iterator[tuple],
    iterations: int,
    depth: int,
) -> Outcome:
    """Runs up to `iterations` steps in one launch.

    Args:
        programs: what to compile with.
        source: the function that is a step.
        mode: what else the trace is for; hashable.
        step: calls it, of the function, args and kwargs of a batch; what it returns comes out of the last step.
        first: the inputs of the first step: its arguments.
        rest: those of the others, of the same structure and shapes.
        iterations: how many steps.
        depth: how many batches are fetched ahead at most.

    Raises:
        Exception: what the step raised while it was traced, or a host call of it.
    """
    arguments = Arguments(first, {}, programs.devices.size, numbers=True)
    shapes = [_shape(slot, source.name) for slot in arguments.slots]
    loop = _Loop(source, step, arguments, shapes)
    none = Arguments((), {}, arguments.size)

    def of_loop() -> Source:
        key = ("device loop", mode, programs.key(source), arguments.key, tuple(shapes))
        return Source(loop, autograph=False, declared=key)

    program = programs.find(of_loop(), none, ())
    loop.forget()
    programs.learn(source, program)
    programs.keep(of_loop(), none, program)
    compiled = program.find([])
    queue = InputQueue(arguments.size, depth)
    reader = BatchReader(first, arguments, source.name)
    queue.put(reader.parts(first, 0))
    feeder = _Feeder(queue, reader, rest, iterations, program.traced.body.name)
    try:
        with compiled.writing():
            if iterations > 1:
                feeder.start()
            else:
                queue.close()
            arrays = compiled.launch([], feed=queue)
        results = program.traced.results([programs.devices.fetch_all(array) for array in arrays])
    finally:
        queue.stop()
        if feeder.ident is not None:
            feeder.join(_JOIN)
    return Outcome(queue.begun, results, feeder.error)


class _Loop:
    """The body of the program: a function without arguments, for `trace`."""

    def __init__(self, source: Source, step: Callable[..., Any], like: Arguments, shapes: Sequence[tuple[int, ...]]):
        self.__name__ = source.name
        self._fn = source.fn
        self._step: Any = step
        self._rebuild: Any = like.rebuild
        self._specs = [tf.TensorSpec(shape, slot.dtype) for slot, shape in zip(like.slots, shapes, strict=True)]

    def forget(self) -> None:
        """It has been traced: the first batch, which is in what was needed for that, need not live on."""
        self._rebuild = self._step = None

    def __call__(self) -> Any:
        packed: list[Any] = []

        def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
            args, kwargs = self._rebuild(tensors)
            with autograph.as_outside():  # this function is not converted, the step is
                value = self._step(self._fn, args, kwargs)
            packed.append(value)
            return [tf.identity(each) for each in tf.nest.flatten(value) if tf.is_tensor(each)]

        feed = _Feed(host_calls(), self.__name__, self._specs)
        # Traced by itself first, since a loop has to know beforehand what its body returns.
        step = tf.function(flat, autograph=False).get_concrete_function(*self._specs)
        for index, output in enumerate(step.outputs):
            if not output.shape.is_fully_defined():
                raise LoweringError.dynamic_result(self.__name__, index, user_line(output))
        zeros = [tf.zeros(each.shape, each.dtype) for each in step.outputs]

        def body(_: Any, inputs: list[tf.Tensor], __: Any) -> tuple:
            outputs = list(step(*inputs)) if zeros else (step(*inputs), [])[1]
            return (*feed.emit(), outputs)

        *_, outputs = tf.while_loop(lambda more, *_: more, body, (*feed.emit(), zeros))
        found = iter(outputs)
        return tf.nest.map_structure(lambda each: next(found) if tf.is_tensor(each) else each, packed[-1])


class _Feed(HostCall):
    """The host call that brings a replica its part of the next batch, and whether there is one."""

    is_users = False

    def __init__(self, calls: HostCalls, name: str, specs: Sequence[tf.TensorSpec]):
        super().__init__(calls, "feed", "", [tf.TensorSpec([], tf.bool), *specs])

    def describe(self) -> str:
        """For messages."""
        return "the wait for the next batch"

    def emit(self) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds a call to the graph under construction."""
        _, (more, *inputs) = self.calls.emit(self, [])
        return more, inputs

    def __call__(self, position: np.ndarray, *_: np.ndarray) -> tuple[np.ndarray, ...]:
        """As of every host call; quicker, and it goes on in a run that has failed until all replicas may stop."""
        run = self.calls.run
        assert run is not None, "set before the launch"
        here = int(position)
        replica = here % run.size
        following = np.asarray(here + run.size)
        try:
            with needed_by_a_program(HostAccessError.in_inputs):
                parts = run.next_step(self, replica)
        except BaseException as error:
            run.note(error, replica, self)
            parts = None
        if parts is None:
            return (following, *self.zeros)
        return (following, _TRUE, *parts)


_TRUE = np.asarray(True)


class _Feeder(threading.Thread):
    """Fetches batches ahead of the steps.

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
        super().__init__(name="replica_engine: inputs of a device loop", daemon=True)
        self.error: BaseException | None = None
        self._queue = queue
        self._reader = reader
        self._batches = batches
        self._iterations = iterations
        self._of = name  # `_name` is the thread's own

    def run(self) -> None:
        """The thread."""
        try:
            with needed_by_a_program(HostAccessError.in_inputs):
                self._fetch()
        except BaseException as error:
            self.error = error
        finally:
            self._queue.close()

    def _fetch(self) -> None:
        for number in range(1, self._iterations):
            if not self._queue.wait_for_room():
                return
            with timeline.span(Track(self._of, "feeding", order=-1), f"batch {number}", "feeding"):
                batch = next(self._batches, None)
            if batch is None:
                return
            self._queue.put(self._reader.parts(batch, number))


def _shape(slot: Any, name: str) -> tuple[int, ...]:
    if xla_ops.is_host_only(slot.dtype):
        raise LoweringError.host_only(name, slot.name, slot.dtype.name)
    if not slot.shape.is_fully_defined():  # replicas have different ones
        raise InputsError.uneven_batch(slot.name, [str(value.shape) for value in slot.values])
    return tuple(slot.shape)
