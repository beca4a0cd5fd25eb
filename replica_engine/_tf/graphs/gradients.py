"""The gradient of values in a graph, instead of `tf.custom_gradient`. Checked on TensorFlow 2.21.0.

In a graph, `tf.custom_gradient` registers each gradient under a name of its own, for as long as the process lives. The
gradient refers to the tensors that it was made with, and so keeps their graph for ever. It also searches all ops behind
the results for variables. Here a name is registered once, and a graph keeps its gradients itself.
"""

from __future__ import annotations

import functools
import itertools
import threading
import types
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# record_operation: tells tapes the gradient of some tensors with respect to others.
from tensorflow.python.eager import record as _record

# gradient_registry: the functions that compute the gradients of TensorFlow's ops, by the type of the op.
from tensorflow.python.framework import ops as _ops

from replica_engine._tf.graphs.kept import keep

_REGISTERED = f"ReplicaEngineGradient_{uuid.uuid4().hex}"  # unique also after a reload
_NUMBER = "_replica_engine_gradient"  # attribute of an op: the number of its gradient, which copies of the op have too
_numbers = itertools.count()

OF_PYTHON = ("_gradient_op_type", _NUMBER)
"""Attributes of ops that name a gradient in Python. What they say belongs to this process, and no program needs it."""


def _gradient(results: int, compute: Callable[..., Any]) -> Callable[..., list[Any]]:
    """The gradient of an op whose outputs are some results, followed by the inputs of these.

    Args:
        results: how many results there are.
        compute: takes the upstream gradient of each result, and returns the gradient of each input.
    """

    def gradient(*upstream: Any) -> list[Any]:
        found = compute(*upstream[:results])
        return [None] * results + (list(found) if isinstance(found, (list, tuple)) else [found])

    return gradient


_registering = threading.Lock()
_gradients: weakref.WeakValueDictionary[int, Callable[..., list[Any]]] = weakref.WeakValueDictionary()  # by number


@functools.cache
def _register() -> None:
    tf.RegisterGradient(_REGISTERED)(lambda op, *upstream: _gradients[op.get_attr(_NUMBER)](*upstream))


def _registered() -> str:
    """The name of what looks up the gradient of an op by its number, which is registered when it is first needed."""
    with _registering:
        _register()
    return _REGISTERED


def differentiable(
    results: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], gradient: Callable[..., Any]
) -> list[tf.Tensor]:
    """Returns tensors equal to `results` whose gradient with respect to `inputs` is `gradient`.

    Args:
        results: tensors of the graph under construction.
        inputs: the tensors to differentiate with respect to.
        gradient: takes the upstream gradient of each result, and returns the gradient of each input: a sequence, or a
            tensor if there is one input. The graph keeps it.
    """
    found = _gradient(len(results), gradient)
    number = next(_numbers)
    known = _passed_on(results, inputs, _registered())
    known[0].op._set_attr(_NUMBER, tf.compat.v1.AttrValue(i=number))
    keep(known[0].graph, found)
    _gradients[number] = found
    _record.record_operation(_REGISTERED, known, [*results, *inputs], found)
    return known[: len(results)]


def in_place_of(op: tf.Operation, results: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Tensors equal to `results` with the gradient that TensorFlow gives the results of an op.

    What computes `results` may have another gradient, since it chooses between values.
    """
    try:
        compute = _ops.gradient_registry.lookup(op.type)
    except LookupError:
        compute = None
    if compute is None:
        return list(results)
    # The op as functions that compute gradients see it, with other results than its own.
    seen = types.SimpleNamespace(type=op.type, inputs=op.inputs, get_attr=op.get_attr, outputs=list(results))
    return differentiable(results, op.inputs, functools.partial(compute, seen))


def _passed_on(results: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], registered: str) -> list[tf.Tensor]:
    with tf.compat.v1.get_default_graph().gradient_override_map({"IdentityN": registered}):
        known: list[tf.Tensor] = tf.identity_n([*results, *inputs])
    return known


def with_gradient(
    results: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    registered: str,
    gradient: Callable[..., Sequence[Any]],
    in_order: Callable[..., tuple],
) -> list[tf.Tensor]:
    """Like `differentiable`, for replicas that are traced one after the other, and for graphs that may be saved.

    All that the replicas have computed is behind a sum over replicas: for ResNet-50 with four replicas, the search of
    `tf.custom_gradient` for variables took 10 s.

    Args:
        results: tensors of any ops.
        inputs: the tensors to differentiate with respect to.
        registered: the name under which `tf.RegisterGradient` registered the gradient, for `tf.gradients`: the gradient
            of an op whose results are `results`, followed by `inputs`.
        gradient: the same gradient for tapes: takes the upstream gradient of each result, and returns the gradient of
            each input.
        in_order: adds tokens to the outputs, inputs and gradient that tapes see; see `ReplicaContext.in_order`.
    """
    known = _passed_on(results, inputs, registered)
    of_tape = _gradient(len(results), gradient)
    _record.record_operation(registered, *in_order(known, [*results, *inputs], of_tape))
    return known[: len(results)]
