"""TensorFlow's operators of control flow, and AutoGraph, which makes them of Python.

AutoGraph converts the user's function. It leaves library code alone, and the user's exceptions are restored
(`as_user_raised`). Where a replica enters an operator, hooks let this library look on. Each backend installs the hooks
that it needs itself when it is first used (`threads.control_flow.entering`, `xla.body`), and
`traced_steps.supervised_call` those that both need. A name that a TensorFlow does not have is left out: there, a merge
call inside that operator is refused. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import tensorflow as tf

# TFE_Py_TapeSetIsEmpty: whether a tape records on this thread.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# _TRANSPILER: has a copy of the operators, which converted functions call.
from tensorflow.python.autograph import operators as _operators

# ConversionOptions: what AutoGraph converts, and how. Its list of functions to leave alone has these as a key.
from tensorflow.python.autograph.core import converter as _converter

# ControlStatusCtx, Status: set AutoGraph's status; a tf.function that is not converted has the status "disabled".
from tensorflow.python.autograph.core.ag_ctx import ControlStatusCtx as _ControlStatusCtx
from tensorflow.python.autograph.core.ag_ctx import Status as _Status
from tensorflow.python.autograph.impl import api as _autograph_api

# cache_allowlisted: adds a function to the list of those that AutoGraph leaves alone under certain options.
from tensorflow.python.autograph.impl import conversion as _conversion

# _TRANSPILER: keeps converted functions, with the maps from generated lines to the user's lines. The maps in `tf_stack`
# below are gone when an exception has left the converted function.
from tensorflow.python.autograph.impl.api import _TRANSPILER as _transpiler

# _attach_error_metadata: asks an exception for its text; its frame shows which exception that was.
from tensorflow.python.autograph.impl.api import _attach_error_metadata

# `tf.autograph.experimental.do_not_convert` on library code would also switch AutoGraph off for the user's function
# that this code calls. An artifact itself is not converted, but the functions that it calls are.
from tensorflow.python.autograph.impl.api import autograph_artifact as _artifact

# structured_function: the module that traces the functions of tf.data.
from tensorflow.python.data.ops import structured_function as _structured_function

# py_func_from_autograph: converts a function as tf.function does.
from tensorflow.python.eager.polymorphic_function import autograph_util as _autograph_util

# function_type_utils: binds arguments as a tf.function with an input signature does.
from tensorflow.python.eager.polymorphic_function import function_type_utils as _function_type_utils

# record_operation: tells tapes the gradient of some tensors with respect to others.
from tensorflow.python.eager.record import record_operation as record_operation

# gradient_registry: the gradients of If, Case and While ops, and of each tf.custom_gradient in a graph.
from tensorflow.python.framework.ops import gradient_registry as _gradient_registry
from tensorflow.python.ops import gradients_util as _gradients_util

# ControlFlowFuncGraph: the class of the graphs of branches and loops.
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph as _ControlFlowFuncGraph

# variable_accessed: tells tapes that a variable was read.
from tensorflow.python.ops.resource_variable_ops import variable_accessed as variable_accessed

# _source_mapper_stacks: for each thread, maps from lines of generated code to the user's lines.
from tensorflow.python.util import tf_stack

# StackTraceFilter, StackTraceMapper: change the lines that are kept of each op.
from tensorflow.python.util.tf_stack import StackTraceFilter as _StackTraceFilter
from tensorflow.python.util.tf_stack import StackTraceMapper as _StackTraceMapper

from replica_engine.errors.base import add_note
from replica_engine.process import threads
from replica_engine.upstream.graphs import graph_walk
from replica_engine.upstream.graphs.function_graphs import in_body as in_body
from replica_engine.upstream.graphs.function_graphs import keep
from replica_engine.upstream.hook import FIRST, FIRST_COMPILED, FIRST_THREADS, Hook

F = TypeVar("F", bound=Callable)
E = TypeVar("E", bound=BaseException)

# AutoGraph.

_GENERATED = "__autograph_generated_file"  # the start of names of files that AutoGraph generates
_CONVERTED = "outer_factory.<locals>.inner_factory.<locals>.tf__"  # the start of names of converted functions
_HEAD = "in user code:\n\n"  # the start of AutoGraph's messages, and of our notes

# This feature adds name scopes, which nothing here depends on. With it, host functions have options that no
# tf.function has by default, so `float` and `int` are left alone in host functions only.
_HOST_FEATURES = (tf.autograph.experimental.Feature.NAME_SCOPES,)


@functools.cache
def _leave_numbers_alone() -> None:
    options = _converter.ConversionOptions(recursive=True, optional_features=_HOST_FEATURES)
    for number in (float, int):
        _conversion.cache_allowlisted(number, options)


OPERATORS = "ag__"
"""The variable that converted functions close over; it holds AutoGraph's operators."""


def convert(fn: F) -> F:
    """`fn` as converted by AutoGraph if the caller's own function was converted; otherwise `fn` itself."""
    return tf.__internal__.autograph.tf_convert(fn, tf.__internal__.autograph.control_status_ctx())


def is_out_of_play() -> bool:
    """Whether AutoGraph converts nothing here: in eager mode, outside converted functions."""
    return tf.executing_eagerly() and tf.__internal__.autograph.control_status_ctx().status is _Status.UNSPECIFIED


def convert_always(fn: F) -> F:
    """Converts `fn` as tf.function converts its function."""
    return _autograph_util.py_func_from_autograph(fn)


def convert_for_host(fn: F) -> F:
    """Converts `fn` as tf.function converts its function, but leaves `float(x)` and `int(x)` alone.

    AutoGraph would make ops of them, whose results are tensors. On the host they give Python numbers, which the
    function may put in a list or a file. So they raise a TypeError here, as they do without AutoGraph.
    """
    _leave_numbers_alone()
    return _autograph_util.py_func_from_autograph(fn, _HOST_FEATURES)


def as_outside() -> contextlib.AbstractContextManager[Any]:
    """Inside the block, functions are converted as if no caller had set a status for AutoGraph."""
    return _ControlStatusCtx(_Status.UNSPECIFIED)


def artifact(fn: F) -> F:
    """Marks `fn` as library code: AutoGraph does not convert it, but still converts the functions that it calls."""
    return _artifact(fn)


def is_generated(filename: str) -> bool:
    """Whether AutoGraph generated the file."""
    return _GENERATED in filename


def original_location(filename: str, lineno: int, function: str, threads: tuple[int, ...]) -> tuple[str, int, str]:
    """The user's file, line and function for a line that may be in code that AutoGraph generated.

    A function that is defined inside a converted function is converted with it. So the map may belong to the thread
    that called `run`; `threads` are the idents of the threads whose maps are searched.
    """
    for thread in threads:
        for mapper in reversed(tf_stack._source_mapper_stacks.get(thread, ())):
            place = mapper.get_effective_source_map().get((filename, lineno))
            if place is not None:
                return place[0], place[1], place[2] or function
    return filename, lineno, function


def written(filename: str, number: int) -> str:
    """The user's line for a line of generated code, as in a traceback; "" if there is none."""
    line = _written(filename, number) if is_generated(filename) else None
    return "" if line is None else str(line)[2:].replace("\n  ", "\n")


def written_at(filename: str, number: int) -> str:
    """The place of the user's line for a line of generated code, "train.py:12 in step"; "" if there is none."""
    line = _written(filename, number) if is_generated(filename) else None
    return "" if line is None else f"{line.file}:{line.number} in {line.function}"


def first_line(code: CodeType) -> tuple[str, int]:
    """The user's file and first line of a function, also if AutoGraph generated its code."""
    file, first = code.co_filename, code.co_firstlineno
    if is_generated(file):
        for number in (first, first + 1):  # AutoGraph adds a decorator, whose line the user did not write
            line = _written(file, number)
            if line is not None:
                return line.file, line.number
    return file, first


def source_map() -> dict[tuple[str, int], tuple[str, int, str]]:
    """Maps each generated line of the converted functions around this call to the user's file, line and function."""
    known: dict[tuple[str, int], tuple[str, int, str]] = {}
    for mapper in tf_stack._source_mapper_stacks.get(threading.get_ident(), ()):
        known.update(mapper.get_effective_source_map())
    return known


class _LineMaps(_StackTraceMapper):
    """Maps generated lines to the user's on this thread too. The maps of functions converted below it add to these."""

    def __init__(self, known: Mapping[tuple[str, int], tuple[str, int, str]]):
        super().__init__()
        self._known = known

    def get_effective_source_map(self) -> Mapping[tuple[str, int], tuple[str, int, str]]:
        return self._known


class _Hidden(_StackTraceFilter):
    """Leaves files out of the lines that TensorFlow keeps of each op."""

    def __init__(self, files: frozenset[str]):
        super().__init__()
        self._files = files

    def get_filtered_filenames(self) -> frozenset[str]:
        return self._files


@contextlib.contextmanager
def lines_of_ops(known: Mapping[tuple[str, int], tuple[str, int, str]], hidden: frozenset[str]) -> Iterator[None]:
    """Inside the block, ops that this thread makes keep the user's lines, which TensorFlow shows if an op fails.

    Args:
        known: `source_map` of the thread that made the functions: a function that is defined inside a converted one is
            in its generated file.
        hidden: files whose lines say nothing to the user.
    """
    with _LineMaps(known), _Hidden(hidden):
        yield


def as_user_raised(error: E, is_internal: Callable[[str], bool]) -> E:
    """Returns the exception that user code raised, whatever AutoGraph made of it.

    When an exception leaves a converted function, AutoGraph replaces it by a new one with a longer message. If
    AutoGraph cannot build one of the user's type, the new one has another type. This function finds the original, adds
    the user's source lines as a note, and tells AutoGraph to leave the exception alone from here on (`ag_pass_through`;
    the exceptions of this library have that attribute from the start).

    Args:
        error: the exception that left the function.
        is_internal: whether a file does not belong to the user.
    """
    original: Any = error
    while (failed := _whose_text_failed(original)) is not None and failed is not original:  # `__str__` may raise itself
        original = failed
    while _is_copy(original) and isinstance(original.__context__, Exception):
        original = original.__context__
    _name_as_written(original)
    metadata = getattr(error, "ag_error_metadata", None)
    note = "" if metadata is None else metadata.get_message().strip()  # used if no lines are found
    if '  File "' not in note:
        note = ""
    with contextlib.suppress(Exception):  # a failure here must not hide the exception itself
        note = _format_user_lines(original, is_internal) or note
    if note:
        add_note(original, _with_deeper_lines(note, original))
    original.__dict__.pop("ag_error_metadata", None)
    with contextlib.suppress(Exception):  # AutoGraph will change an exception that takes no attributes
        original.ag_pass_through = True
    return original


def _whose_text_failed(error: BaseException) -> BaseException | None:
    """The exception that AutoGraph could not describe, if `error` is what its `__str__` raised then; else None."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is _attach_error_metadata.__code__:
            return frame.f_locals["e"]
    return None


def _name_as_written(error: BaseException) -> None:
    """Calls the function as the user does where Python says that it was called with the wrong arguments."""
    if type(error) is TypeError and error.args and str(error.args[0]).startswith(_CONVERTED):
        error.args = (error.args[0].removeprefix(_CONVERTED), *error.args[1:])


def has_note(error: BaseException) -> bool:
    """Whether an exception has a note of `as_user_raised`."""
    return any(note.startswith(_HEAD) for note in getattr(error, "__notes__", ()))


class _Line(NamedTuple):
    """A line of the user's program."""

    file: str
    number: int
    function: str
    source: str

    def __str__(self) -> str:
        return f'    File "{self.file}", line {self.number}, in {self.function}\n        {self.source.strip()}'


def _format_user_lines(error: BaseException, is_internal: Callable[[str], bool]) -> str:
    """The user's lines that an exception passed through, from the first generated one on; "" if there is none.

    A traceback shows the generated code, whose file is deleted when the process ends.
    """
    lines: list[_Line] = []
    for frame, number in traceback.walk_tb(error.__traceback__):  # TensorFlow breaks extract_tb
        code = frame.f_code
        line: _Line | None = None
        if is_generated(code.co_filename):
            line = _written(code.co_filename, number)
        elif lines and not is_internal(code.co_filename):
            line = _Line(code.co_filename, number, code.co_name, linecache.getline(code.co_filename, number))
        if line is not None and lines[-1:] != [line]:
            lines.append(line)
    return _HEAD + "\n".join(str(line) for line in lines) if lines else ""


def _written(filename: str, number: int) -> _Line | None:
    """The line that the user wrote, for a line of generated code."""
    with _transpiler._cache_lock:
        converted = [each for factories in _transpiler._cache._cache.values() for each in factories.values()]
    for each in converted:
        if each.module.__file__ == filename:
            origin = each.source_map.get((filename, number))
            if origin is None:
                return None
            file, line = origin.loc.filename, origin.loc.lineno
            if is_generated(file):  # a function inside a converted one, converted separately
                return _written(file, line)
            return _Line(file, line, origin.function_name or "a lambda", origin.source_code_line)
    return None


def _with_deeper_lines(note: str, error: BaseException) -> str:
    """Takes earlier notes of an exception, which are about deeper lines, into `note`, and away from the exception."""
    notes = getattr(error, "__notes__", None)
    for each in [each for each in notes or () if isinstance(notes, list) and each.startswith(_HEAD)]:
        notes.remove(each)  # type: ignore[union-attr]
        deeper = _entries(each)
        note = _HEAD + "\n".join([*(entry for entry in _entries(note) if entry not in deeper), *deeper])
    return note


def _entries(note: str) -> list[str]:
    return re.split(r"\n(?=    File )", note.removeprefix(_HEAD))


def _is_copy(error: BaseException) -> bool:
    """Whether AutoGraph made this exception from the one that it was handling; a user's exception has no such text."""
    if not error.__suppress_context__ or error.__cause__ is not None:
        return False
    with contextlib.suppress(Exception):  # the user's exception may fail to make a text
        return str(error).startswith(_HEAD)
    return False


# The operators of control flow, and the hooks around them.

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
    return threads.set_for_block(tape, "_persistent", True)


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


def try_gradient(gradient: Callable[..., Any], results: Sequence[Any]) -> None:
    """Calls the gradient of a tf.custom_gradient in a graph that is thrown away; `MergeNeeded` leaves the call."""
    graph = _FuncGraph("trial")
    with graph.as_default(), contextlib.suppress(Exception):  # the real call raises its errors again
        takes_variables = "variables" in inspect.signature(gradient).parameters
        upstream = [tf.compat.v1.placeholder(each.dtype, each.shape) for each in results]
        gradient(*upstream, **({"variables": []} if takes_variables else {}))


def in_dataset() -> bool:
    """Whether a function of tf.data is being traced around this call, such as the body of a `for` over a dataset."""
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(frame.f_code.co_filename == _structured_function.__file__ for frame in frames)


def runs_eagerly(fn: Any) -> bool:
    """Whether a `tf.function` calls its Python function at each call."""
    return bool(fn._run_functions_eagerly)
