"""Where both backends look on while TensorFlow works: what serves errors about replicas.

On a thread that runs a replica, each wrapper calls TensorFlow's function unchanged; but for calls of a `tf.function`,
where replicas on threads may have to merge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from replica_engine._tf import collectives, value_methods
from replica_engine._tf.eager import is_replaced_interrupt
from replica_engine._tf.graphs import calls, control_flow, function
from replica_engine._tf.graphs.python_ops import raised_in_op
from replica_engine._tf.hook import hide_frames
from replica_engine.diagnostics import several_values
from replica_engine.diagnostics.tracebacks import shortened, shortened_of_graph, without_ours
from replica_engine.diagnostics.user_frames import FOLDERS
from replica_engine.engine import current_replica
from replica_engine.errors import ReplicaEngineError


def install() -> None:
    """Puts the functions of this module around TensorFlow's, once."""
    hide_frames(FOLDERS)
    value_methods.install_numbers()
    several_values.install()
    control_flow.CALL.around(_call)
    function.TRACE.around(function.trace_noted)
    calls.install()


def install_nested(call: Callable[..., object]) -> None:
    """Has `call(original, function, *args, **kwargs)` make the calls of a `tf.function` by a replica on a thread.

    One function of ours stands around each call of a `tf.function`, whichever backends the program uses.
    """
    global _nested
    _nested = call


_nested: Callable[..., object] | None = None


def _call(original: Callable[..., object], self: Any, *args: object, **kwargs: object) -> object:
    """A call of a `tf.function`, whose errors may be those of replicas in it."""
    if function.is_inlining():
        return self.python_function(*args, **kwargs)
    if current_replica() is not None:
        return original(self, *args, **kwargs) if _nested is None else _nested(original, self, *args, **kwargs)
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
