"""The calls of functions in which replicas run: what TensorFlow's graph optimizer does to them, and who watches them.

Grappler works on a function when it is called for the first time. Its dozen of passes go over the whole graph, twice,
and the graph grows with the number of replicas. For a large model on several replicas that is more than half of the
first call. On CPU devices most of this work changes nothing: the second time, the choice of layouts, the plan for the
memory of GPUs, and the detour through MLIR. `LIGHT` leaves these out.

TensorFlow passes the options of Grappler with each call of a function, from its context. A function in which replicas
run gets a context that changes these options, and nothing else. All other functions of the process keep theirs.
Options that the user has set with `tf.config.optimizer` always stay.

The same context enters a watch around each call, because nothing else of this library runs in a step that is traced. A
function with a loop in which replicas run is not watched: it may be a whole epoch. Of functions of all strategies,
`batches` looks at the inputs that go whole to all replicas. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

# structured_function: traces the functions of tf.data.
from tensorflow.python.data.ops import structured_function

# FunctionCallOptions: what TensorFlow passes with a call of a function; Grappler's options are a part of it.
from tensorflow.python.eager.context import FunctionCallOptions

# from_func_graph: makes what is called of a graph that has been traced.
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework.func_graph import FuncGraph

# WhileBodyFuncGraph: the graph of the body of a loop.
from tensorflow.python.ops.control_flow_v2_func_graphs import WhileBodyFuncGraph

from replica_engine._tf import batches
from replica_engine._tf.graphs import function

FULL = "full"
LIGHT = "light"
OFF = "off"
LEVELS = (OFF, LIGHT, FULL)
"""From the least work to the most. Where strategies of different levels share a function, the most counts."""

Around = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Takes the name of a function; what it returns is entered around a call."""

_LEVEL = "_replica_engine_optimizer"
_AROUND = "_replica_engine_around"
_LOOPS = "_replica_engine_loops"
_REPLICAS = "_replica_engine_replicas"
notes = 0
"""Counts `note_replicas`. If it has changed while a function was called, replicas may run in its trace that failed."""
_Rewriter = rewriter_config_pb2.RewriterConfig
_LEFT_OUT = {
    "meta_optimizer_iterations": _Rewriter.ONE,
    "layout_optimizer": _Rewriter.OFF,
    "memory_optimization": _Rewriter.NO_MEM_OPT,
    "disable_tfg_optimizer": True,
}


def install() -> None:
    """Makes TensorFlow call functions that `choose` has marked with their own options, and `batches.watch` with a look.

    Only once per process.
    """
    original = atomic_function.from_func_graph
    if hasattr(original, _LEVEL):
        return

    @functools.wraps(original)
    def made(name: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        function = original(name, graph, *args, **kwargs)
        level = getattr(graph, _LEVEL, None)
        if level is not None:
            around = None if hasattr(graph, _LOOPS) else functools.partial(getattr(graph, _AROUND), graph.name)
            function._bound_context = _Context(function._bound_context, level, around or contextlib.nullcontext)
        batches.watch_calls(function, graph)
        return function

    setattr(made, _LEVEL, FULL)
    atomic_function.from_func_graph = made


def choose(graph: Any, level: str, around: Around) -> None:
    """Chooses for the function that is being traced into a graph, and for those around it.

    Args:
        graph: the graph in which replicas are about to run.
        level: how much Grappler does to the functions.
        around: makes what is entered around each call of one of them from eager code.
    """
    note_replicas(graph)
    in_loop = _in_data_function()
    while isinstance(graph, FuncGraph):
        setattr(graph, _LEVEL, max(level, getattr(graph, _LEVEL, OFF), key=LEVELS.index))
        setattr(graph, _AROUND, around)
        if in_loop:
            setattr(graph, _LOOPS, True)
        in_loop = in_loop or isinstance(graph, WhileBodyFuncGraph)
        graph = graph.outer_graph


def note_replicas(graph: Any) -> None:
    """Notes that replicas run in the function that is being traced into a graph, and so in those around it."""
    global notes
    notes += 1
    while isinstance(graph, FuncGraph):
        setattr(graph, _REPLICAS, True)
        graph = graph.outer_graph


def has_replicas(fn: Any) -> bool:
    """Whether replicas of this library run in a trace of a `tf.function`."""
    try:
        return any(hasattr(graph, _REPLICAS) for _, graph in function.graphs_of(fn))
    except Exception:  # TensorFlow cannot list the traces if the first one failed after it had made a variable
        return False


def _in_data_function() -> bool:
    """Whether a function of tf.data is being traced, such as the body of a `for` over a dataset: that is a loop too."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == structured_function.__file__:
            return True
        frame = frame.f_back
    return False


class _Context:
    """TensorFlow's context, for the calls of one function: with other options for Grappler, and watched.

    Args:
        own: the context.
        level: one of `LEVELS`.
        around: makes what is entered around a call.
    """

    def __init__(
        self,
        own: Any,
        level: str,
        around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ):
        self._own = own
        self._level = level
        self._around = around
        self._given: tuple[Any, Any] | None = None
        self._changed = FunctionCallOptions()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def __repr__(self) -> str:
        return repr(self._own)

    def call_function(self, *args: Any, **kwargs: Any) -> Any:
        """Calls a function in eager mode. Options belong to a thread, so no other call sees these."""
        own, given = self._own, self._own.function_call_options
        own.function_call_options = ours = self._options(given)
        try:
            with self._around():
                return own.call_function(*args, **kwargs)
        finally:
            if own.function_call_options is ours:  # else the function has set others, which must stay
                own.function_call_options = given

    def _options(self, given: FunctionCallOptions) -> FunctionCallOptions:
        """The options of the user or of TensorFlow, with fewer passes; kept until the user sets others."""
        if self._level == FULL:
            return given
        key = given.executor_type, given.config_proto_serialized
        if key != self._given:
            config = config_pb2.ConfigProto.FromString(key[1])
            _leave_out(config.graph_options.rewrite_options, self._level)
            self._given, self._changed = key, FunctionCallOptions(key[0], config)
        return self._changed


def _leave_out(options: Any, level: str) -> None:
    if level == OFF:
        options.disable_meta_optimizer = True
        return
    for name, value in _LEFT_OUT.items():
        if not getattr(options, name):  # 0 is "default" for each of them
            setattr(options, name, value)
