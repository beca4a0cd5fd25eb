"""Replaces ops, random ones and those of other numbers, while they are added to a graph, and sets the global seed.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import tensorflow as tf

# global_seed, _rng: the values that tf.random.set_seed set. It makes a new generator each time, even for an equal seed.
# _seed: the seed itself, to restore it without clearing TensorFlow's caches of kernels.
# op_callbacks: the callbacks of this thread.
from tensorflow.python.eager import context as _context

# add_op_callback: calls a function for each new op; the function may return other results to use instead.
from tensorflow.python.framework import op_callbacks as _op_callbacks

from replica_engine._tf.graphs import gradients
from replica_engine._tf.graphs.kept import kept_on
from replica_engine._tf.hook import FIRST_THREADS, Hook
from replica_engine.process import scoped

Replace = Callable[[str, Sequence[Any], Callable[[str], Any]], list[tf.Tensor] | None]
"""Takes an op's type, its inputs and a getter of its attributes; returns replacements of its results, or None."""

Draw = Callable[[Sequence[Any], tf.Tensor], list[tf.Tensor] | None]
"""Takes the inputs and the result of an op that reads the state of a generator and moves it on; as `Replace`."""

GET_SEED = Hook(
    "tensorflow.python.framework.random_seed",
    "get_seed",  # the pair of seeds of a random op, from the global seed and that of the op
    why="what a replica draws follows from the global seed and its id, not from how many replicas drew before",
    since=FIRST_THREADS,
    until="passes on to TensorFlow outside replicas on threads, and for ops with a seed of their own",
)
_DRAWS = "RngReadAndSkip"
_RANDOM = ("Random", "Truncated", "Multinomial", "StatelessRandom", "StatelessTruncated")
_ASIDE = "_replica_engine_set_aside"
_ORIGINALS = "_replica_engine_originals"


def set_aside(graph: Any) -> frozenset[str]:
    """The names of the ops of a graph that were replaced and must not run."""
    return frozenset(getattr(graph, _ASIDE, ()))


def original(tensor: tf.Tensor) -> tf.Tensor | None:
    """The result of the user's op that `tensor` replaced; None if `tensor` replaced nothing."""
    return getattr(tensor.graph, _ORIGINALS, {}).get(tensor.name)


def _note_originals(graph: Any, op: tf.Operation, results: Sequence[tf.Tensor]) -> None:
    originals: dict[str, tf.Tensor] = kept_on(graph, _ORIGINALS, dict)
    originals.update((new.name, old) for new, old in zip(results, op.outputs, strict=True))


def seeding() -> tuple[Any, int | None]:
    """Returns an object that changes with each tf.random.set_seed, and the seed."""
    return getattr(_context.context(), "_rng", None), _context.global_seed()  # None before the first call


def seed_by_replica(seed_in_replica: Callable[[Callable[[], int | None]], int | None]) -> None:
    """Lets replicas choose the seeds of random ops that have none of their own; only once per process.

    Args:
        seed_in_replica: returns the seed of an op that is being made, or None if TensorFlow's own is right. It is given
            a function that draws TensorFlow's own, which is None without a global seed.
    """

    def get_seed_of_replica(get_seed: Callable[[Any], tuple[Any, Any]], op_seed: Any) -> Any:
        if op_seed is None:
            op_seed = seed_in_replica(lambda: get_seed(None)[1])
        return get_seed(op_seed)

    GET_SEED.around(get_seed_of_replica)


def state() -> Any:
    """The global seed and how far its generator is, as plain data; None before the first tf.random.set_seed."""
    generator, seed = seeding()
    return None if generator is None else {"seed": seed, "generator": generator.getstate()}


def has_seed() -> bool:
    """Whether `tf.random.set_seed` was called, so that another process can draw the same numbers."""
    return _context.global_seed() is not None


def restore(state: Any) -> None:
    """Continues with the seeds of a `state`; None changes nothing."""
    if state is None:
        return
    context = _context.context()
    context._seed = state["seed"]
    if getattr(context, "_rng", None) is None:
        context._rng = random.Random()
    context._rng.setstate(state["generator"])


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Sets TensorFlow's global seed inside the block; on leaving, the old seed and generator return."""
    context = _context.context()
    with scoped.attribute(context, "_seed", seed), scoped.attribute(context, "_rng", random.Random(seed)):
        yield


@contextlib.contextmanager
def intercepted(replace: Replace, draw: Draw, kinds: Container[str]) -> Iterator[None]:
    """Calls `replace` for each random op and each op of one of some kinds, when it is made inside the block.

    The gradient of a replaced op is the one that TensorFlow gives its kind. An op that draws from a
    `tf.random.Generator` runs in any case; `draw` may give another result in its place.

    Not to be nested. TensorFlow keeps callbacks in a set, and gives each the answer of the one before, also if it is
    None, with which `tf.debugging.enable_check_numerics` fails. So this callback calls those of others, with what
    replaces an op: what is set aside must not be checked, since it does not run.
    """
    context = _context.context()
    others = [*context.op_callbacks]

    def callback(
        op_type: str, inputs: Any, attributes: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> list[tf.Tensor] | None:
        replaced = None
        if graph is not None and op_type == _DRAWS:
            replaced = draw(inputs, outputs[0])
            if replaced is not None:  # the initial value of a variable is one for all, and draws once
                _note_originals(graph, outputs[0].op, replaced)
        elif graph is not None and (op_type in kinds or op_type.startswith(_RANDOM)):
            op = outputs[0].op
            replaced = replace(op_type, inputs, op.get_attr)
            if replaced is not None:
                replaced = gradients.in_place_of(op, replaced)
                kept_on(graph, _ASIDE, set).add(op.name)
                _note_originals(graph, op, replaced)
        # None if nothing is replaced: TensorFlow gives callbacks a tuple of what an op returns to its caller as a list.
        for other in others:
            given = replaced or outputs
            answer = other(op_type, inputs, attributes, given, op_name=op_name, graph=graph)
            if answer is not None and answer is not given:
                replaced = answer
        return replaced

    _op_callbacks.add_op_callback(callback)
    for each in others:
        _op_callbacks.remove_op_callback(each)
    try:
        yield
    finally:
        for each in others:
            _op_callbacks.add_op_callback(each)
        _op_callbacks.remove_op_callback(callback)
