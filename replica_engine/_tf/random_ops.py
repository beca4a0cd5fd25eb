"""Random ops on their way into a graph, and the global seed. Checked on TensorFlow 2.21.0."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# global_seed, _rng: what tf.random.set_seed set. It makes a new generator each time, also for the same seed.
# _seed: the seed itself, to put back what was there without clearing TensorFlow's caches of kernels.
from tensorflow.python.eager import context as _context

# add_op_callback: sees each op as it is made and may give another result in its place.
from tensorflow.python.framework import op_callbacks as _op_callbacks

Replace = Callable[[str, Sequence[Any], Callable[[str], Any]], tf.Tensor | None]
"""Of an op's type, inputs and attributes (by name): what to take for its result, or None to leave it."""

_ASIDE = "_replica_engine_set_aside"
_ORIGINALS = "_replica_engine_originals"


def set_aside(graph: Any) -> frozenset[str]:
    """Names of the ops of a graph that were replaced, and should not run."""
    return frozenset(getattr(graph, _ASIDE, ()))


def original(tensor: tf.Tensor) -> tf.Tensor | None:
    """What the random op returned that the user wrote, of the tensor that was put in its place; None of any other."""
    return getattr(tensor.graph, _ORIGINALS, {}).get(tensor.op.name)


def _set_aside(graph: Any, op: tf.Operation, result: tf.Tensor) -> None:
    setattr(graph, _ASIDE, {*getattr(graph, _ASIDE, ()), op.name})
    if not hasattr(graph, _ORIGINALS):
        setattr(graph, _ORIGINALS, {})
    getattr(graph, _ORIGINALS)[result.op.name] = op.outputs[0]


def seeding() -> tuple[Any, int | None]:
    """An object that is another one after each tf.random.set_seed, and the seed."""
    return getattr(_context.context(), "_rng", None), _context.global_seed()  # none before the first tf.random.set_seed


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, TensorFlow's global seed is another one; afterwards seed and generator are those of before."""
    context = _context.context()
    before = {name: vars(context)[name] for name in ("_seed", "_rng") if name in vars(context)}
    context._seed, context._rng = seed, random.Random(seed)
    try:
        yield
    finally:
        for name in ("_seed", "_rng"):
            vars(context).pop(name, None)
        vars(context).update(before)


@contextlib.contextmanager
def intercepted(replace: Replace) -> Iterator[None]:
    """Shows random ops that are made inside to `replace`."""

    def callback(
        op_type: str, inputs: Any, attributes: Any, outputs: Any, op_name: str | None = None, graph: Any = None
    ) -> list[tf.Tensor] | None:
        if graph is None or not op_type.startswith(("Random", "Truncated", "Multinomial")):
            return None
        result = replace(op_type, inputs, outputs[0].op.get_attr)
        if result is None:
            return None
        _set_aside(graph, outputs[0].op, result)
        return [result]

    _op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        _op_callbacks.remove_op_callback(callback)
