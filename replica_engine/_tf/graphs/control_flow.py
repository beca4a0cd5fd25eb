"""The operators of control flow, and where this library looks on when a replica enters one.

`wrap` puts a function around one of TensorFlow's. Each backend wraps what it needs itself when it is first used
(`threads.joint.hooks`, `xla.hooks`), and `diagnostics.hooks` what both need; `patches.PATCHES` lists what is replaced.
A name that a TensorFlow does not have is left out: there, a merge call inside that operator is refused. Checked on
TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

# TFE_Py_TapeSetIsEmpty: whether a tape records on this thread.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# _TRANSPILER: has the operators that converted functions call. operators: these, and while_stmt is one.
from tensorflow.python.autograph import operators as _autograph_all
from tensorflow.python.autograph.impl import api as _autograph_api

# _try_handling_undefineds: traces the body of a loop once to find the types of variables that are undefined before it.
from tensorflow.python.autograph.operators import control_flow as _autograph_operators

# structured_function: the module that traces the functions of tf.data.
from tensorflow.python.data.ops import structured_function as _structured_function

# function_type_utils: binds arguments as a tf.function with an input signature does.
from tensorflow.python.eager.polymorphic_function import function_type_utils as _function_type_utils

# record_operation: tells tapes the gradient of some tensors with respect to others.
from tensorflow.python.eager.record import record_operation as record_operation

# gradient_registry: the gradients of If, Case and While ops, and of each tf.custom_gradient in a graph.
from tensorflow.python.framework.ops import gradient_registry as _gradient_registry

# repeat_with_axis: tf.repeat; ragged_util has it under another name.
from tensorflow.python.ops import array_ops as _array_ops

# cond_v2, indexed_case, while_loop: they make If, Case and While ops. _graph_mode_decorator: tf.custom_gradient in a
# graph. _GradientsHelper: the gradient of ops, which the gradients of If and While call for their branches and bodies.
from tensorflow.python.ops import cond_v2 as _cond_v2

# control_flow_util: whether a graph is made for XLA.
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.ops import custom_gradient as _custom_gradient
from tensorflow.python.ops import gradients_util as _gradients_util
from tensorflow.python.ops import while_v2 as _while_v2

# ControlFlowFuncGraph: the class of the graphs of branches and loops.
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph as _ControlFlowFuncGraph

# _pfor_impl: tf.vectorized_map, and the jacobians of a tape.
from tensorflow.python.ops.parallel_for import control_flow_ops as _parallel_for
from tensorflow.python.ops.ragged import ragged_util as _ragged_util

# variable_accessed: tells tapes that a variable was read.
from tensorflow.python.ops.resource_variable_ops import variable_accessed as variable_accessed

from replica_engine._tf.graphs import captures, function
from replica_engine._tf.graphs.kept import keep
from replica_engine._tf.handled import cell_of

_Function: Any = tf.__internal__.function.Function
_FuncGraph: Any = tf.__internal__.FuncGraph


class Wrapped(NamedTuple):
    """A function of TensorFlow that `wrap` puts a function around.

    Attributes:
        owner: the class or module.
        name: the attribute.
        why: the reason.
    """

    owner: Any
    name: str
    why: str


BY_BOTH = {
    "call": Wrapped(_Function, "__call__", "errors of replicas in a tf.function show the lines of the user"),
    "trace": Wrapped(function.TRACES, function.TRACE, "knows whether a function with jit_compile=True is being traced"),
}
"""What both backends wrap: it serves errors."""

BY_XLA = {
    "custom_gradient": Wrapped(_custom_gradient, "_graph_mode_decorator", "compiled bodies can be freed"),
    "watch_variable": Wrapped(
        tf.__internal__.FuncGraph, "watch_variable", "a graph that lists its variables does not use them"
    ),
    "binomial": Wrapped(tf.random.Generator, "binomial", "its op has neither a kernel of XLA nor a seed for the host"),
    "ragged": Wrapped(tf.RaggedTensor, "__init__", "how many values the rows of a ragged tensor have together"),
    "repeat": Wrapped(_array_ops, "repeat_with_axis", "repeats something for each value of a row of a ragged tensor"),
    "repeat_rows": Wrapped(_ragged_util, "repeat", "sums along the rows of a ragged tensor"),
}
"""What compiled replicas need."""

BY_KERAS = {
    "call_flat": Wrapped(
        captures.OWNER,
        captures.NAME,
        "a function that was traced before, called in a callback, has the weights of then",
    ),
}
"""What `replicate_model` wraps."""

BY_THREADS = {
    "cond": Wrapped(_cond_v2, "cond_v2", "merge calls in tf.cond, and in `if` on a tensor"),
    "switch_case": Wrapped(_cond_v2, "indexed_case", "merge calls in tf.switch_case"),
    "while_loop": Wrapped(
        _while_v2, "while_loop", "merge calls in tf.while_loop, and in `for` and `while` on a tensor"
    ),
    "trial": Wrapped(_autograph_operators, "_try_handling_undefineds", "the same, with variables undefined before it"),
    "while_stmt": Wrapped(_autograph_all, "while_stmt", "merge calls in the condition of a `while`"),
    "call": Wrapped(_Function, "__call__", "merge calls in a nested tf.function"),
    "initialize": Wrapped(_Function, "_initialize", "a first call of a nested tf.function that is left"),
    "vectorize": Wrapped(_parallel_for, "_pfor_impl", "refuses merge calls in tf.vectorized_map and jacobians"),
    "custom_gradient": Wrapped(_custom_gradient, "_graph_mode_decorator", "custom gradients that make merge calls"),
    "gradients": Wrapped(_gradients_util, "_GradientsHelper", "gradients of branches and loops with merge calls"),
    "gradient_types": Wrapped(_gradients_util, "PossibleTapeGradientTypes", "tapes count as without this library"),
    "push_tape": Wrapped(tf.GradientTape, "_push_tape", "tapes outlast an attempt to enter a branch alone"),
    "pop_tape": Wrapped(tf.GradientTape, "_pop_tape", "how many tapes record a nested tf.function"),
    "tape_gradient": Wrapped(tf.GradientTape, "gradient", "tapes outlast an attempt to enter a branch alone"),
}
"""What replica threads need; idle outside a replica."""

_TYPES = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")
_ORIGINAL = "_replica_engine_original"
_AROUND = "_replica_engine_around"


def wrap(wrapped: Wrapped, around: Callable[..., Any]) -> None:
    """Calls `around(original, *args, **kwargs)` wherever TensorFlow calls a function; each `around` once."""
    owner, attribute, _ = wrapped
    original = getattr(owner, attribute, None)
    cell = cell_of(original)
    if cell is not None:
        original = cell.cell_contents
    before = original
    while before is not None and getattr(before, _AROUND, None) is not around:
        before = getattr(before, _ORIGINAL, None)
    if original is None or before is not None:
        return

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(replacement, _ORIGINAL, original)
    setattr(replacement, _AROUND, around)
    if cell is None:
        setattr(owner, attribute, replacement)
    else:
        cell.cell_contents = replacement
    if owner is _autograph_all:  # Converted functions call a copy, which AutoGraph makes with the first of them.
        setattr(_autograph_api._TRANSPILER.get_extra_locals()["ag__"], attribute, replacement)


def wrap_gradients(around: Callable[..., Any]) -> None:
    """Calls `around(original, op, *grads)` for the gradient of each If, Case and While op."""
    registered = getattr(_gradient_registry, "_registry", {})
    for kind in _TYPES:
        entry = registered.get(kind, {})
        original = entry.get("type")
        if original is not None and not hasattr(original, _ORIGINAL):
            gradient = functools.partial(around, original)
            setattr(gradient, _ORIGINAL, original)
            entry["type"] = gradient


def keep_by_graph(results: Any) -> None:
    """Lets the gradient that `tf.custom_gradient` has registered for its results go with their graph.

    TensorFlow keeps it for the life of the process, and with it the graph, to whose tensors it refers.
    """
    tensors = [each for each in tf.nest.flatten(results, expand_composites=True) if tf.is_symbolic_tensor(each)]
    if not tensors or tensors[0].op.type != "IdentityN":
        return
    name, graph = tensors[0].op.get_attr("_gradient_op_type").decode(), tensors[0].graph
    registered = getattr(_gradient_registry, "_registry", {})
    gradient = registered.get(name, {}).get("type")
    if gradient is None or not keep(graph, gradient):
        return
    reference = weakref.ref(gradient)

    def of_graph(op: tf.Operation, *upstream: Any) -> Any:
        known = reference()
        assert known is not None, "kept by the graph of the op"
        return known(op, *upstream)

    registered[name]["type"] = of_graph
    weakref.finalize(gradient, registered.pop, name, None).atexit = False


def in_body() -> bool:
    """Whether the graph under construction is that of a body for XLA."""
    return bool(_control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def is_branch_or_loop(graph: Any) -> bool:
    """Whether a graph is that of a branch, or of the condition or the body of a loop."""
    return isinstance(graph, _ControlFlowFuncGraph)


def graphs_inside(op: tf.Operation) -> list[Any]:
    """The graphs of the branches, or of the condition and the body, of an op that was made in this process."""
    if op.type not in _TYPES:
        return []
    names = ["_true_graph", "_false_graph", "_cond_graph", "_body_graph"]
    if op.type.endswith("Case"):
        names = [f"_branch_graph_{index}" for index in range(len(op.get_attr("branches")))]
    return [getattr(op, name) for name in names if hasattr(op, name)]


def gradients_of_ops(*args: Any, **kwargs: Any) -> list[Any]:
    """`tf.gradients` for any graph, without what `wrap` put around it."""
    helper = _gradients_util._GradientsHelper
    return getattr(helper, _ORIGINAL, helper)(*args, **kwargs)


def has_tape() -> bool:
    """Whether a gradient tape records on this thread."""
    return not _pywrap_tfe.TFE_Py_TapeSetIsEmpty()


def only_first_order(kind: int) -> int:
    """Corrects TensorFlow's answer to the question which gradients its tapes may be asked for: first order only.

    `kept_after_gradient` makes a tape persistent for a while. TensorFlow assumes that a persistent tape may be asked
    for gradients of gradients. It would then make functions of loops and branches, and more outputs of functions, that
    the tape does not need.
    """
    several = _gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER
    return _gradients_util.POSSIBLE_GRADIENT_TYPES_FIRST_ORDER if kind == several else kind


def as_recording(tape: tf.GradientTape) -> tuple[Any, bool]:
    """The state of a tape that `restore_tape` sets again."""
    return tape._tape, tape._recording


def restore_tape(tape: tf.GradientTape, before: tuple[Any, bool]) -> None:
    """Restores a tape to its state before `gradient` was called: `gradient` ends a tape that is not persistent."""
    tape._tape, recording = before
    if recording and not tape._recording:
        tape._push_tape()


class kept_after_gradient:
    """Inside the block, a tape begins to record in such a way that `restore_tape` can undo its end."""

    def __init__(self, tape: tf.GradientTape):
        self._tape = tape

    def __enter__(self) -> None:
        self._before, self._tape._persistent = self._tape._persistent, True

    def __exit__(self, *_: object) -> None:
        self._tape._persistent = self._before


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
    except BaseException:
        if not held and fn._lock._is_owned():
            fn._lock.release()
        raise


def forget_first_call(fn: Any) -> None:
    """Makes the next call of a `tf.function` its first one, because the first trace was given up."""
    fn._created_variables = fn._variable_creation_config = None


def try_gradient(gradient: Callable[..., Any], results: Sequence[Any]) -> None:
    """Calls the gradient of a tf.custom_gradient in a graph that is thrown away; `MergeNeeded` leaves the call."""
    graph = _FuncGraph("trial")
    with graph.as_default(), contextlib.suppress(Exception):  # the real call raises its errors again
        takes_variables = "variables" in inspect.signature(gradient).parameters
        upstream = [tf.compat.v1.placeholder(each.dtype, each.shape) for each in results]
        gradient(*upstream, **({"variables": []} if takes_variables else {}))


def in_dataset() -> bool:
    """Whether the calling code is in a function of tf.data, which is being traced."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _structured_function.__file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def runs_eagerly(fn: Any) -> bool:
    """Whether a `tf.function` calls its Python function at each call."""
    return bool(fn._run_functions_eagerly)
