"""TensorFlow's operators of control flow, their gradients, and the tapes that ask for these.

Where a replica enters an operator, hooks let this library look on. Each backend installs the hooks that it needs itself
when it is first used (`threads.control_flow.entering`, `xla.body`), and `traced_steps.supervised_call` those that both
need. A name that a TensorFlow does not have is left out: there, a merge call inside that operator is refused.
Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# TFE_Py_TapeSetIsEmpty: whether a tape records on this thread.
from tensorflow.python import pywrap_tfe as _pywrap_tfe
from tensorflow.python.autograph import operators as _operators

# _TRANSPILER: has a copy of the operators, which converted functions call.
from tensorflow.python.autograph.impl import api as _autograph_api

# record_operation: tells tapes the gradient of some tensors with respect to others.
from tensorflow.python.eager.record import record_operation as record_operation

# gradient_registry: the gradients of If, Case and While ops, and of each tf.custom_gradient in a graph.
from tensorflow.python.framework.ops import gradient_registry as _gradient_registry
from tensorflow.python.ops import gradients_util as _gradients_util

# ControlFlowFuncGraph: the class of the graphs of branches and loops.
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph as _ControlFlowFuncGraph

# variable_accessed: tells tapes that a variable was read.
from tensorflow.python.ops.resource_variable_ops import variable_accessed as variable_accessed

from replica_engine.process import interrupts
from replica_engine.upstream.graphs import graph_walk
from replica_engine.upstream.graphs.function_graphs import keep
from replica_engine.upstream.hook import FIRST, FIRST_COMPILED, FIRST_THREADS, Hook

_FuncGraph: Any = tf.__internal__.FuncGraph


def _hook(since: str, function: str, why: str) -> Hook:
    owner, _, name = function.rpartition(".")
    return Hook(f"tensorflow.python.{owner}", name, why=why, since=since)


_compiled, _threads = functools.partial(_hook, FIRST_COMPILED), functools.partial(_hook, FIRST_THREADS)
_FUNCTION, _TAPE = "eager.polymorphic_function.polymorphic_function.Function", "eager.backprop.GradientTape"
_DECORATOR = "ops.custom_gradient._graph_mode_decorator"

CALL = _hook(
    FIRST,
    f"{_FUNCTION}.__call__",
    "errors of replicas in a tf.function show the lines of the user; merge calls in a nested tf.function",
)
"""What both backends need: it serves errors, and replica threads."""

FREED_GRADIENT = _compiled(_DECORATOR, "compiled bodies can be freed")
CALL_TRACED = _compiled(
    "eager.polymorphic_function.concrete_function.ConcreteFunction._call_flat",
    "a graph that lists the variables of a function does not use them",
)
RAGGED = _compiled(
    "ops.ragged.ragged_tensor.RaggedTensor.__init__", "how many values the rows of a ragged tensor have together"
)
REPEAT = _compiled("ops.array_ops.repeat_with_axis", "repeats something for each value of a row of a ragged tensor")
REPEAT_ROWS = _compiled("ops.ragged.ragged_util.repeat", "sums along the rows of a ragged tensor")
"""What compiled replicas need."""

COND = _threads("ops.cond_v2.cond_v2", "merge calls in tf.cond, and in `if` on a tensor")
SWITCH_CASE = _threads("ops.cond_v2.indexed_case", "merge calls in tf.switch_case")
WHILE_LOOP = _threads("ops.while_v2.while_loop", "merge calls in tf.while_loop, and in `for` and `while` on a tensor")
TRIAL = _threads(
    "autograph.operators.control_flow._try_handling_undefineds", "the same, with variables undefined before it"
)
WHILE_STATEMENT = _threads("autograph.operators.while_stmt", "merge calls in the condition of a `while`")
INITIALIZE = _threads(f"{_FUNCTION}._initialize", "a first call of a nested tf.function that is left")
VECTORIZE = _threads(
    "ops.parallel_for.control_flow_ops._pfor_impl", "refuses merge calls in tf.vectorized_map and jacobians"
)
CUSTOM_GRADIENT = _threads(_DECORATOR, "custom gradients that make merge calls")
GRADIENTS = _threads("ops.gradients_util._GradientsHelper", "gradients of branches and loops with merge calls")
GRADIENT_TYPES = _threads("ops.gradients_util.PossibleTapeGradientTypes", "tapes count as without this library")
PUSH_TAPE = _threads(
    f"{_TAPE}._push_tape", "tapes outlast an attempt to enter a branch alone; how many record a nested tf.function"
)
TAPE_GRADIENT = _threads(f"{_TAPE}.gradient", "tapes outlast an attempt to enter a branch alone")
"""What replica threads need; idle outside a replica."""

_TYPES = (*graph_walk.BRANCHES, *graph_walk.LOOPS)
_ORIGINAL = "_replica_engine_original"


def convert_with_hooks() -> None:
    """Makes converted functions call the hook of `while`: they call a copy that AutoGraph made with the first one."""
    copied = _autograph_api._TRANSPILER.get_extra_locals()["ag__"]
    setattr(copied, WHILE_STATEMENT.name, getattr(_operators, WHILE_STATEMENT.name))


def wrap_gradients(around: Callable[..., Any]) -> None:
    """Calls `around(original, op, *grads)` for the gradient of each If, Case and While op."""
    registered = getattr(_gradient_registry, "_registry", {})
    for kind in _TYPES:
        # The registry has no way to replace a gradient, so its table is changed.
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

    def call_kept(op: tf.Operation, *upstream: Any) -> Any:
        known = reference()
        assert known is not None, "kept by the graph of the op"
        return known(op, *upstream)

    registered[name]["type"] = call_kept
    weakref.finalize(gradient, registered.pop, name, None).atexit = False


def is_branch_or_loop(graph: Any) -> bool:
    """Whether a graph is that of a branch, or of the condition or the body of a loop."""
    return isinstance(graph, _ControlFlowFuncGraph)


def graphs_inside(op: tf.Operation) -> list[Any]:
    """The graphs of the branches, or of the condition and the body, of an op that was made in this process."""
    if op.type not in _TYPES:
        return []
    # By the attributes that TensorFlow sets: an eager tape asks with a stand-in for the op, which has no graph.
    names = ["_true_graph", "_false_graph", "_cond_graph", "_body_graph"]
    if op.type.endswith("Case"):
        names = [f"_branch_graph_{index}" for index in range(len(op.get_attr("branches")))]
    return [getattr(op, name) for name in names if hasattr(op, name)]


def gradients_of_ops(*args: Any, **kwargs: Any) -> list[Any]:
    """`tf.gradients` for any graph, without what hooks put around it."""
    return GRADIENTS.original(*args, **kwargs)


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


def is_recording(tape: tf.GradientTape) -> bool:
    """Whether a tape records."""
    return bool(tape._recording)


def is_persistent(tape: tf.GradientTape) -> bool:
    """Whether the user has made a tape that may be asked several times."""
    return bool(tape._persistent)


def restore_tape(tape: tf.GradientTape, before: tuple[Any, bool]) -> None:
    """Restores a tape to its state before `gradient` was called: `gradient` ends a tape that is not persistent."""
    tape._tape, recording = before
    if recording and not tape._recording:
        tape._push_tape()


def kept_after_gradient(tape: tf.GradientTape) -> contextlib.AbstractContextManager[bool]:
    """Inside the block, a tape begins to record in such a way that `restore_tape` can undo its end."""
    return interrupts.set_for_block(tape, "_persistent", True)


def try_gradient(gradient: Callable[..., Any], results: Sequence[Any]) -> None:
    """Calls the gradient of a tf.custom_gradient in a graph that is thrown away; `MergeNeeded` leaves the call."""
    graph = _FuncGraph("trial")
    with graph.as_default(), contextlib.suppress(Exception):  # the real call raises its errors again
        takes_variables = "variables" in inspect.signature(gradient).parameters
        upstream = [tf.compat.v1.placeholder(each.dtype, each.shape) for each in results]
        gradient(*upstream, **({"variables": []} if takes_variables else {}))
