"""Calls of functions: their arguments; what the graph optimizer does to those in which replicas run; who watches those.

Grappler works on a function when it is called for the first time. Its dozen of passes go over the whole graph, twice,
and the graph grows with the number of replicas. For a large model on several replicas that is more than half of the
first call. On CPU devices most of this work changes nothing: the second time, the choice of layouts, the plan for the
memory of GPUs, and the detour through MLIR. `LIGHT` leaves these out.

TensorFlow passes the options of Grappler with each call of a function, from its context. A function in which replicas
run gets a context that changes these options, and nothing else. All other functions of the process keep theirs.
Options that the user has set with `tf.config.optimizer` always stay.

The same context lets `supervise` make each call, because nothing else of this library runs in a step that is traced: it
watches the call, and can cancel it. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

# structured_function: the module that traces the functions of tf.data.
from tensorflow.python.data.ops import structured_function as _structured_function

# cancellation: ends what waits in a call of a function.
from tensorflow.python.eager import cancellation

# FunctionCallOptions: what TensorFlow passes with a call of a function; Grappler's options are a part of it.
from tensorflow.python.eager.context import FunctionCallOptions

# execute_with_cancellation: calls a function so that it can be ended.
from tensorflow.python.eager.execute import execute_with_cancellation

# function_type_utils: binds arguments as a tf.function with an input signature does.
from tensorflow.python.eager.polymorphic_function import function_type_utils as _function_type_utils

from replica_engine.upstream import eager
from replica_engine.upstream.graphs import function_graphs
from replica_engine.upstream.hook import FIRST, Hook, StandIn

MAKE_CALLED = Hook(
    "tensorflow.python.eager.polymorphic_function.atomic_function",
    "from_func_graph",  # makes what is called of a graph that has been traced
    why="the graph optimizer does less to functions in which replicas run, see `graph_optimizer`; calls are watched",
    since=FIRST,
    until="passes on to TensorFlow for all other functions",
)

FULL = "full"
LIGHT = "light"
OFF = "off"
LEVELS = (OFF, LIGHT, FULL)
"""From the least work to the most. Where strategies of different levels share a function, the most counts."""

Supervise = Callable[[Any], Callable[[Callable[[], Any]], Any]]
"""Begins a call. It takes the `CancellationManager` that can end the call, or None for a call that nothing can end.

It returns what makes the call: a function that takes the call, which may be made on any thread, and returns its result.
"""

_LEVEL = "_replica_engine_optimizer"
_RUNS = "_replica_engine_traced_runs"
notes = 0
"""Counts `choose`. If it has changed while a function was called, replicas may run in its trace that failed."""
_Rewriter = rewriter_config_pb2.RewriterConfig
_LEFT_OUT = {
    OFF: {"disable_meta_optimizer": True},
    LIGHT: {
        "meta_optimizer_iterations": _Rewriter.ONE,
        "layout_optimizer": _Rewriter.OFF,
        "memory_optimization": _Rewriter.NO_MEM_OPT,
        "disable_tfg_optimizer": True,
    },
}


def install() -> None:
    """Makes TensorFlow call functions that `choose` has marked with their own options; only once per process."""
    MAKE_CALLED.around(_make)


def _make(original: Callable[..., Any], name: Any, graph: Any, attrs: Any, *args: Any, **kwargs: Any) -> Any:
    function = original(name, graph, function_graphs.read_final_attributes(graph, attrs), *args, **kwargs)
    level, runs = getattr(graph, _LEVEL, None), getattr(graph, _RUNS, None)
    if runs is not None:
        supervise, found = runs
        call = supervise(graph, found)
        function._bound_context = _Context(function._bound_context, level or FULL, call)
    return function


def choose(graph: Any, level: str | None, run: Any, supervise: Callable[[Any, Sequence[Any]], Supervise]) -> None:
    """Chooses for the function that is being traced into a graph, and for those around it.

    Args:
        graph: the graph in which replicas are about to run.
        level: how much Grappler does to the functions; None leaves it to TensorFlow.
        run: what `supervise` needs to know of these replicas.
        supervise: takes the graph of a function and the `run` of all replicas in it; what it returns begins each call
            of the function from eager code.
    """
    global notes
    notes += 1
    for each in eager.function_graphs(graph):
        if level is not None:
            setattr(each, _LEVEL, max(level, getattr(each, _LEVEL, OFF), key=LEVELS.index))
        function_graphs.kept_on(each, _RUNS, lambda: (supervise, []))[1].append(run)


def is_in_loop(graph: Any) -> bool:
    """Whether a graph that is being traced is in a loop, or in a function of tf.data, which is a loop too."""
    return any(map(eager.is_loop_body, eager.function_graphs(graph))) or in_dataset()


def in_dataset() -> bool:
    """Whether a function of tf.data is being traced around this call, such as the body of a `for` over a dataset."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(frame.f_code.co_filename == _structured_function.__file__ for frame in frames)


def has_replicas(fn: Any) -> bool:
    """Whether replicas of this library run in a trace of a `tf.function`."""
    return any(hasattr(graph, _RUNS) for _, graph in function_graphs.list_traced_graphs(fn))


def runs_eagerly(fn: Any) -> bool:
    """Whether a `tf.function` calls its Python function at each call."""
    return bool(fn._run_functions_eagerly)


def bound_arguments(fn: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments as a `tf.function` passes them to its Python function; an input signature converts them."""
    if fn.input_signature is None:
        return args, kwargs
    bound = _function_type_utils.canonicalize_function_inputs(
        args, kwargs, fn._function_type, fn._default_values, fn._is_pure
    )
    return bound.args, bound.kwargs


@contextlib.contextmanager
def unlocked_afterwards(fn: Any) -> Iterator[None]:
    """Inside the block, a `tf.function` is called. After an error it does not keep its lock.

    TensorFlow keeps the lock if the arguments do not fit the signature. A call on another thread, such as that of the
    next replica, would then wait for ever.
    """
    held = fn._lock._is_owned()
    try:
        yield
    finally:
        if not held and fn._lock._is_owned():
            fn._lock.release()


def forget_first_call(fn: Any) -> None:
    """Makes the next call of a `tf.function` its first one, because the first trace was given up."""
    fn._created_variables = fn._variable_creation_config = None


def manager() -> Any:
    """What can end a call; None if the user's code has said what ends calls now (`CancellationManagerContext`)."""
    return cancellation.CancellationManager() if cancellation.context() is None else None


class _Context(StandIn):
    """TensorFlow's context, for the calls of one function: with other options for Grappler, and supervised.

    Args:
        own: the context.
        level: one of `LEVELS`.
        supervise: begins each call.
    """

    def __init__(self, own: Any, level: str, supervise: Supervise):
        super().__init__(own)
        self._level = level
        self._supervise = supervise
        self._given: tuple[Any, Any] | None = None
        self._changed = FunctionCallOptions()

    def __repr__(self) -> str:
        return repr(self._own)

    def call_function(self, name: bytes, tensor_inputs: Sequence[Any], num_outputs: int) -> Any:
        """Calls a function in eager mode."""
        own, ends = self._own, manager()
        call = self._supervise(ends)
        options = self._options(own.function_call_options)
        uncut = functools.partial(self._with_options, options, name, tensor_inputs, num_outputs)
        if ends is None:
            return call(uncut)
        attributes = tuple(itertools.chain(*options.as_attrs().items()))
        execute = functools.partial(execute_with_cancellation, name.decode(), num_outputs, tensor_inputs, attributes)
        # What a call needs of the context, as this thread has it: the call may be made on another one.
        place = SimpleNamespace(_handle=own._handle, device_name=own.device_name, ensure_initialized=_initialized)
        execute = functools.partial(execute, place, ends)
        if own.op_callbacks:
            execute = functools.partial(self._shown, uncut, execute)
        return call(execute) or None

    def _shown(self, uncut: Callable[[], Any], execute: Callable[[], Any]) -> Any:
        """A debugger of ops is one of a thread, and sees only calls that cannot be ended."""
        return uncut() if self._own.op_callbacks else execute()

    def _with_options(self, options: FunctionCallOptions, *call: Any) -> Any:
        own, given = self._own, self._own.function_call_options
        own.function_call_options = options  # of this thread, so no other call sees them
        try:
            return own.call_function(*call)
        finally:
            if own.function_call_options is options:  # else the function has set others, which must stay
                own.function_call_options = given

    def _options(self, given: FunctionCallOptions) -> FunctionCallOptions:
        """The options of the user or of TensorFlow, with fewer passes; kept until the user sets others."""
        if self._level == FULL:
            return given
        key = given.executor_type, given.config_proto_serialized
        if key != self._given:
            config = config_pb2.ConfigProto.FromString(key[1])
            rewrites = config.graph_options.rewrite_options
            for name, value in _LEFT_OUT[self._level].items():
                if not getattr(rewrites, name):  # 0 is "default" for each of them
                    setattr(rewrites, name, value)
            self._given, self._changed = key, FunctionCallOptions(key[0], config)
        return self._changed


def _initialized() -> None:
    """Does nothing: the context of a call is initialized."""
