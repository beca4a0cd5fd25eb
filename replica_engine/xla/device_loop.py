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

from replica_engine.errors import InputsError
from replica_engine.xla.arguments import Arguments
from replica_engine.xla.batches import BatchReader
from replica_engine.xla.body import host_calls
from replica_engine.xla.host_call import HostCall, HostCalls
from replica_engine.xla.input_queue import InputQueue
from replica_engine.xla.program import Programs
from replica_engine.xla.source import Source

_JOIN = 1.0  # seconds that a run waits for its feeding thread, which may be in the user's iterator


class Outcome(NamedTuple):
    """What a device loop came to.

    Attributes:
        steps: how many ran.
        results: for each replica what the last step returned.
        error: what ended the inputs early: StopIteration if there were no more, or what the iterator raised.
    """

    steps: int
    results: list[Any]
    error: Exception | None


def run_loop(
    programs: Programs,
    source: Source,
    step: Callable[[Callable[..., Any], Any, dict[str, Any]], Any],
    batches: Iterator[tuple],
    iterations: int,
    depth: int,
) -> Outcome:
    """Runs up to `iterations` steps in one launch.

    Args:
        programs: what to compile with.
        source: the function that is a step.
        step: calls it, of the function, args and kwargs of a batch; what it returns comes out of the last step.
        batches: the inputs, for each step its arguments; all of one structure and of the same shapes.
        iterations: how many steps.
        depth: how many batches are fetched ahead at most.

    Raises:
        StopIteration: there is no batch at all.
        Exception: what the step raised while it was traced, a host call of it, or the iterator before the first batch.
    """
    arguments = next(batches)
    first = Arguments(arguments, {}, programs.devices.size)
    shapes = [_shape(slot) for slot in first.slots]
    loop = _Loop(source, step, first, shapes)
    key = ("device loop", source.key, first.key, tuple(shapes))
    program = programs.find(Source(loop, autograph=False, declared=key), Arguments((), {}, first.size), ())
    compiled = program.find([])
    queue = InputQueue(first.size, depth)
    reader = BatchReader(arguments, first, source.name)
    feeder = _Feeder(queue, arguments, reader, batches, iterations)
    if iterations > 1:
        feeder.start()
    else:
        feeder.run()  # there is nothing to fetch
    try:
        arrays = compiled.launch([], feed=queue)
        results = program.traced.results([programs.devices.fetch_all(array) for array in arrays])
    finally:
        queue.stop()
        if iterations > 1:
            feeder.join(_JOIN)
    return Outcome(queue.begun, results, feeder.error)


class _Loop:
    """The body of the program: a function without arguments, for `trace`."""

    def __init__(self, source: Source, step: Callable[..., Any], like: Arguments, shapes: Sequence[tuple[int, ...]]):
        self.__name__ = source.name
        self._fn = source.fn
        self._step = step
        self._rebuild = like.rebuild
        self._specs = [tf.TensorSpec(shape, slot.dtype) for slot, shape in zip(like.slots, shapes, strict=True)]

    def __call__(self) -> Any:
        packed: list[Any] = []

        def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
            args, kwargs = self._rebuild(tensors)
            value = self._step(self._fn, args, kwargs)
            packed.append(value)
            return [tf.identity(each) for each in tf.nest.flatten(value) if tf.is_tensor(each)]

        feed = _Feed(host_calls(), self.__name__, self._specs)
        # Traced by itself first, since a loop has to know beforehand what its body returns.
        step = tf.function(flat, autograph=False).get_concrete_function(*self._specs)
        zeros = [tf.zeros(each.shape, each.dtype) for each in step.outputs]

        def body(_: Any, inputs: list[tf.Tensor], __: Any) -> tuple:
            outputs = list(step(*inputs)) if zeros else (step(*inputs), [])[1]
            return (*feed.emit(), outputs)

        *_, outputs = tf.while_loop(lambda more, *_: more, body, (*feed.emit(), zeros))
        found = iter(outputs)
        return tf.nest.map_structure(lambda each: next(found) if tf.is_tensor(each) else each, packed[-1])


class _Feed(HostCall):
    """The host call that brings a replica its part of the next batch, and whether there is one."""

    def __init__(self, calls: HostCalls, name: str, specs: Sequence[tf.TensorSpec]):
        super().__init__(calls, "feed", "", [tf.TensorSpec([], tf.bool), *specs])

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
        parts = run.next_step(replica)
        if parts is None:
            return (following, *self.zeros)
        return (following, _TRUE, *parts)


_TRUE = np.asarray(True)


class _Feeder(threading.Thread):
    """Fetches batches ahead of the steps.

    Args:
        queue: where to put them.
        first: the first one.
        reader: takes them apart.
        batches: the rest.
        iterations: how many to fetch.

    Attributes:
        error: what ended the inputs early.
    """

    def __init__(self, queue: InputQueue, first: tuple, reader: BatchReader, batches: Iterator[tuple], iterations: int):
        super().__init__(name="replica_engine: inputs of a device loop", daemon=True)
        self.error: Exception | None = None
        self._queue = queue
        self._first = first
        self._reader = reader
        self._batches = batches
        self._iterations = iterations

    def run(self) -> None:
        """The thread."""
        try:
            for number in range(self._iterations):
                batch = next(self._batches) if number else self._first
                if not self._queue.put(self._reader.parts(batch, number)):
                    return
        except Exception as error:
            self.error = error
        finally:
            self._queue.close()


def _shape(slot: Any) -> tuple[int, ...]:
    if not slot.shape.is_fully_defined():  # replicas have different ones
        raise InputsError.uneven_batch(slot.name, [str(value.shape) for value in slot.values])
    return tuple(slot.shape)
