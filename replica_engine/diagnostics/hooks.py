"""Where both backends look on while TensorFlow works: what serves errors and warnings about replicas.

On a thread that runs a replica, each wrapper calls TensorFlow's function unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import batches, collectives, patches
from replica_engine._tf.eager import is_replaced_interrupt
from replica_engine._tf.graphs import calls, control_flow, function
from replica_engine._tf.graphs.python_ops import raised_in_op
from replica_engine.diagnostics.suspicions import asked_for
from replica_engine.diagnostics.tracebacks import shortened, shortened_of_graph, without_ours
from replica_engine.diagnostics.user_frames import FOLDERS
from replica_engine.engine import current_replica
from replica_engine.errors import ReplicaEngineError


def install() -> None:
    """Puts the functions of this module around TensorFlow's, once."""
    patches.hide_frames(FOLDERS)
    for name, around in (
        ("call", _call),
        ("push_tape", _push_tape),
        ("pop_tape", _pop_tape),
        ("tape_gradient", _tape_gradient),
        ("next", batches.noted),
        ("scan", batches.element_noted),
        ("trace", function.trace_noted),
    ):
        control_flow.wrap(control_flow.BY_BOTH[name], around)
    calls.install()


def _call(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a `tf.function`, whose errors may be those of replicas in it."""
    if current_replica() is not None:
        return original(self, *args, **kwargs)
    notes = calls.notes
    try:
        result = original(self, *args, **kwargs)
        collectives.ended()
        return result
    except BaseException as error:
        collectives.left(error)
        if not isinstance(error, (Exception, KeyboardInterrupt)):
            raise
        ours = calls.notes != notes or calls.has_replicas(self)
        if ours and is_replaced_interrupt(error):
            raise KeyboardInterrupt from error
        own = raised_in_op(error)
        if own is not None:
            raise shortened(own) from None
        ours = ours or isinstance(error, ReplicaEngineError)
        raise shortened_of_graph(error, self) if ours else without_ours(error)


def _push_tape(original: Callable[..., Any], self: tf.GradientTape) -> Any:
    if current_replica() is None:
        control_flow.note_outer_tape(self, begins=True)
    return original(self)


def _pop_tape(original: Callable[..., Any], self: tf.GradientTape) -> Any:
    if current_replica() is None:
        control_flow.note_outer_tape(self, begins=False)
    return original(self)


def _tape_gradient(
    original: Callable[..., Any], self: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any
) -> Any:
    if current_replica() is not None:
        return original(self, target, sources, *args, **kwargs)
    with asked_for(sources):
        return original(self, target, sources, *args, **kwargs)
