"""Nested `tf.function`s with merge calls.

In a graph, the Python function is called in the graph where the replica stands: inlined, with its input signature and
AutoGraph as the `tf.function` has them. In eager mode, one `tf.function` with the same options goes around all
replicas; it is remembered, so that later calls run its graph and no Python.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine._tf.graphs import autograph, control_flow, function
from replica_engine.errors import MergeCallGraphError
from replica_engine.threads.function_record import record_of
from replica_engine.threads.joint.gradients import Backward, recording
from replica_engine.threads.joint.graphs import Notes, notes_of
from replica_engine.threads.joint.operator import Built, JointOperator, differentiable, is_differentiable
from replica_engine.values.regroup import parts as parts_of
from replica_engine.values.regroup import regroup


class FunctionCall(NamedTuple):
    """What a replica brings: a `tf.function`, and its arguments."""

    function: Any
    args: tuple
    kwargs: dict[str, Any]


def inlined(fn: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Calls the Python function of a `tf.function` in the current graph; returns tensors, as a `tf.function` does."""
    own_args, own_kwargs = control_flow.bound_arguments(fn, args, kwargs)
    return tf.nest.map_structure(_as_result, _plain(fn)(*own_args, **own_kwargs))


def own_arguments(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments as tensors that only this replica has, so that each replica has a gradient of its own for them."""

    def own(leaf: Any) -> Any:
        return tf.identity(leaf) if isinstance(leaf, tf.Tensor) and is_differentiable(leaf) else leaf

    return tf.nest.map_structure(own, (args, kwargs))


def build_call(operator: JointOperator) -> list[Built]:
    """Calls a `tf.function` that goes around all replicas, in eager mode."""
    payloads: list[FunctionCall] = operator.payloads
    parts = operator.parts
    strategy, size = parts[0].context.strategy, len(parts)
    known = record_of(payloads[0].function).joint
    fns = [each.function for each in payloads]
    around, of = known.get(strategy, (None, ()))
    if [reference() for reference in of] != fns:
        around = function.clone_for_any(fns[0], _around(size))
        known[strategy] = around, [weakref.ref(fn) for fn in fns]
    what = f"The arguments of the tf.function ({operator.where})"
    args = regroup([each.args for each in payloads], what, "args")
    kwargs = regroup([each.kwargs for each in payloads], what, "kwargs")
    depth = max(len(part.context.attempts.recording_tapes()) for part in parts)
    is_taped = any(part.taped for part in parts)
    if is_taped and not depth:
        raise MergeCallGraphError(
            "A tf.autodiff.ForwardAccumulator is around a nested tf.function with merge calls, at "
            f"{operator.where}. Such a function runs once for all replicas, and has no forward-mode derivative for "
            "each. Call its Python function, f.python_function(x), or use tf.GradientTape."
        )
    _calling.operator = operator
    try:
        if not is_taped:
            return [Built(value) for value in parts_of(around(*args, **kwargs), size, "result")]
        notes = notes_of(around.get_concrete_function(*args, **kwargs).graph) or Notes()
        used = [differentiable([each.args, each.kwargs]) for each in payloads]
        captured = [list(of) for of in used]
        for replica, tensor, alias in notes.closures:
            if is_differentiable(tensor):
                used[replica].append(tensor)
                captured[replica].append(alias)
        # One tape for each order of gradients that the replicas' own tapes can be asked for.
        tapes = [tf.GradientTape(persistent=True) for _ in range(depth)]
        with operator.building(), recording(tapes, captured):
            values = parts_of(around(*args, **kwargs), size, "result")
    finally:
        _calling.operator = None
    variables = tapes[0].watched_variables()
    for replica, handle in notes.resources:
        if any(variable.handle is handle for variable in variables):
            used[replica].append(handle)
            captured[replica].append(handle)
    backward = Backward(None, [differentiable(value) for value in values], captured, notes.shared, tapes, variables)
    return [Built(value, backward, of) for value, of in zip(values, used, strict=True)]


_calling = threading.local()


def _around(size: int) -> Callable[..., Any]:
    @autograph.artifact
    def on_all_replicas(*args: Any, **kwargs: Any) -> Any:
        """Traces each replica's function in one graph."""
        operator: JointOperator = _calling.operator
        own = list(zip(parts_of(args, size, "args"), parts_of(kwargs, size, "kwargs"), strict=True))
        graph = thread_state.default_graph()
        calls = [
            functools.partial(_plain(payload.function), *each_args, **each_kwargs)
            for payload, (each_args, each_kwargs) in zip(operator.payloads, own, strict=True)
        ]
        results = operator.trace(calls, own, creators=thread_state.variable_creators(graph))
        Notes.on(graph).shared = list(operator.captures.shared)
        return regroup(results)

    return on_all_replicas


def _plain(fn: Any) -> Callable[..., Any]:
    converts, _, _ = function.options(fn)
    return autograph.convert_always(fn.python_function) if converts else fn.python_function


def _as_result(value: Any) -> Any:
    is_result = value is None or (tf.is_tensor(value) and not isinstance(value, tf.Variable))
    return value if is_result else tf.convert_to_tensor(value)
