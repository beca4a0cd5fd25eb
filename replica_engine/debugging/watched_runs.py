"""Runs in debug mode: what the replicas have computed is gathered, and compared at the end of each step.

In eager mode the ops of replicas on threads are noted as they run. In a graph these replicas stand side by side, and an
op at the end of the run takes what is compared of all of them. A compiled body stands for all replicas: each calls the
host with its own, and the last one compares.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.debugging import trails
from replica_engine.debugging.findings import Step
from replica_engine.debugging.trails import EagerTrail, GraphTrail, Op, Reduction
from replica_engine.upstream import eager
from replica_engine.upstream.graphs import function_graphs, graph_walk
from replica_engine.values import structure


class _OfThread(threading.local):
    reductions: list[Reduction] | EagerTrail | None = None  # where those of the replica on this thread are noted
    called_at: str | None = None  # the user's line that has called `run`; None elsewhere, as in `fit`


_thread = _OfThread()
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def called_at(where: str | None) -> Iterator[None]:
    """Inside, the user's line runs a function on the replicas."""
    outer, _thread.called_at = _thread.called_at, where
    try:
        yield
    finally:
        _thread.called_at = outer


def note_reduction(kind: str, value: Any, result: Any) -> None:
    """Called after each `all_reduce` of a replica."""
    if isinstance(_thread.reductions, EagerTrail):
        _thread.reductions.reduced(Reduction(kind, value, result))
    elif _thread.reductions is not None:
        _thread.reductions.append(Reduction(kind, value, result))


class _Said(NamedTuple):
    """What is compared of a replica: tensors, and their values when the step has run.

    Attributes:
        finite: which of its tensors are finite.
        drawn: digests of what it drew.
        rows: the numbers of rows of its arguments.
        batch: digests of its arguments.
        reduced: of what went into each reduction, a digest.
        copies: digests of its copies of the variables that it used.
    """

    finite: Any
    drawn: Any
    rows: Any
    batch: Any
    reduced: Any
    copies: Any


class WatchedRun:
    """One run of a function by replicas; see `observer.ObservedRun`.

    Args:
        name: the name of the function.
        devices: the names of the devices of the replicas.
    """

    def __init__(self, name: str, devices: Sequence[str]):
        self._step, size = Step(name, devices), len(devices)
        self._is_eager, self._called_at = tf.executing_eagerly(), _thread.called_at
        self._first = 0 if self._is_eager else len(tf.compat.v1.get_default_graph().get_operations())
        self._eager = [EagerTrail(size) for _ in range(size)]
        self._coordinated = EagerTrail(size)
        self._reductions: list[list[Reduction]] = [[] for _ in range(size)]
        self._batches: list[dict[int, tf.Tensor]] = [{} for _ in range(size)]

    def coordinated(self) -> contextlib.AbstractContextManager[object]:
        """Inside, the coordinator writes variables for the replicas."""
        return graph_walk.noted(self._coordinated.note) if self._is_eager else _NOTHING

    def call(self, index: int | None, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls the function of a replica."""
        trail = self._eager[index or 0]
        is_noted = self._is_eager and index is not None
        with (
            self._reductions_noted(trail if is_noted else self._reductions[index or 0]),
            graph_walk.noted(trail.note) if is_noted else _NOTHING,
        ):
            results = fn(*args, **kwargs)
        leaves, _ = structure.flatten((args, kwargs), what="the arguments")
        self._batches[index or 0] = {
            place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor) and leaf.shape.rank
        }
        if index is None:
            self._end_of_body(results)
        return results

    @contextlib.contextmanager
    def _reductions_noted(self, noted: Any) -> Iterator[None]:
        outer, _thread.reductions = _thread.reductions, noted
        try:
            yield
        finally:
            _thread.reductions = outer

    def end(self, results: Sequence[Any]) -> None:
        """Compares what replicas on threads have computed, or adds the op that does so in each step."""
        if self._is_eager:
            self._end_of_eager(results)
            return
        graph = tf.compat.v1.get_default_graph()
        ops, found = graph.get_operations()[self._first :], list[GraphTrail]()
        for device, of, reductions in zip(self._step.devices, results, self._reductions, strict=True):
            own = [op for op in ops if op.device.endswith(f":{device}")]
            found.append(GraphTrail(own, trails.tensors_in(of), reductions, len(results)))
        used = [trails.Write(each.handle, "") for each in eager.used_in(graph)]
        written = trails.used_variables([*used, *(write for trail in found for write in trail.writes)])
        lines = [(each.name, each.where) for each in written]
        with tf.control_dependencies([op for op in ops if op.type.startswith("Assign")]):
            copies = [
                [trails.digest(each.variable._values[index].read_value()) for each in written]
                for index in range(len(found))
            ]
        said = [_said(*each) for each in zip(found, self._batches, copies, strict=True)]
        count = len(_Said._fields)

        def compare(*arrays: np.ndarray) -> None:
            every = [_Said(*arrays[start : start + count]) for start in range(0, len(arrays), count)]
            self._judge(found, every, lines)

        function_graphs.python_op(compare, [tensor for each in said for tensor in each], [])

    def _end_of_eager(self, results: Sequence[Any]) -> None:
        written = trails.used_variables([write for each in (*self._eager, self._coordinated) for write in each.writes])
        makers = [trail.maker(trails.tensors_in(of)) for trail, of in zip(self._eager, results, strict=True)]
        every = [
            _Said(
                (),
                [digest for *_, digest in trail.drawn],
                [each.shape[0] for each in batch.values()],
                [trails.digest_of(each.numpy()) for each in batch.values()],
                [trails.digest_all(each.values) for each in trail.reductions],
                [trails.digest_of(each.variable._values[index].numpy()) for each in written],
            )
            for index, (trail, batch) in enumerate(zip(self._eager, self._batches, strict=True))
        ]
        self._judge(self._eager, every, [(each.name, each.where) for each in written], makers)

    def _end_of_body(self, results: Any) -> None:
        """Adds the host call with which each replica of a compiled body says what it has computed."""
        from replica_engine import xla  # not at module level: it needs jax

        graph = tf.compat.v1.get_default_graph()
        aside = function_graphs.set_aside(graph)
        ops = [op for op in graph.get_operations() if op.name not in aside]
        trail = GraphTrail(ops, trails.tensors_in(results), self._reductions[0], len(self._step.devices))
        written = trails.used_variables(trail.writes)
        copies = [
            trails.digest(tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype))
            for variable, handle, _ in written
        ]
        lines = [(each.name, each.where) for each in written]  # and no handle: the host call would take it
        lock, said, size = threading.Lock(), dict[int, _Said](), len(self._step.devices)

        def compare(*tensors: tf.Tensor) -> None:
            with lock:
                said[int(xla.replica_id())] = _Said(*(each.numpy() for each in tensors))
                if len(said) < size:
                    return
                every = [said[replica] for replica in sorted(said)]
                said.clear()
            self._judge([trail] * size, every, lines)

        xla.outside_compilation(compare, *_said(trail, self._batches[0], copies))

    def _judge(
        self,
        found: Sequence[trails.Trail],
        said: Sequence[_Said],
        written: Sequence[tuple[str, str]],
        makers: Sequence[Op | None] | None = None,
    ) -> None:
        """Compares what the replicas have said.

        Raises:
            DebugError: something is wrong.
        """
        step = self._step
        if makers is None:
            makers = [
                trail.first_maker(each.finite, trail.returned)  # type: ignore[attr-defined]
                for trail, each in zip(found, said, strict=True)
            ]
        step.check_finite(makers)
        digests = zip(*[each.copies for each in said], strict=True)
        step.check_copies([(*each, of) for each, of in zip(written, digests, strict=True)])
        places = [list(each) for each in self._batches]
        rows = [
            dict(zip(places[index % len(places)] or places[0], each.rows, strict=False))
            for index, each in enumerate(said)
        ]
        step.check_rows(rows, found[0].reductions)
        step.check_reductions(found[0].reductions, [each.reduced for each in said])
        if self._called_at is not None and any(self._batches):  # Keras deals the batch out in the step
            step.check_batches(
                [hash((*each.batch, *each.reduced)) for each in said],
                any(where for _, where in written),
                self._called_at,
            )
        step.check_drawn(found[0].drawn, [each.drawn for each in said])


def _said(trail: GraphTrail, batch: dict[int, tf.Tensor], copies: Sequence[tf.Tensor]) -> _Said:
    rows = [tf.shape(each, tf.int64)[0] for each in batch.values()]
    drawn = [digest for *_, digest in trail.drawn]
    graph = tf.compat.v1.get_default_graph()
    batches, reduced = (
        map(trails.digest, batch.values()),
        [trails.digest_all(each.values, graph) for each in trail.reductions],
    )
    digests = [drawn, rows, list(batches), reduced, copies]
    return _Said(_packed(trail.finite, tf.bool), *(_packed(each, tf.int64) for each in digests))


def _packed(values: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    return tf.stack(values) if values else tf.zeros([0], dtype)
