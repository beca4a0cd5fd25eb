"""The results of a host function: tensors that the body continues with, and the structure around them.

The body can use them if they are known while it is traced: declared by the user, or found by tracing the function. The
function is never called to find them, since no values exist yet, and made-up ones would have its effects: an item taken
from a queue, a line in a file. When the program calls the function, its results are taken apart in the same way, and
compared. If they are not known, the body gets `UnknownResults`, and what the function returns is thrown away.
"""

from __future__ import annotations

import contextlib
import dis
import functools
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from types import BuiltinMethodType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics import tracebacks, user_frames
from replica_engine.errors import HostAccessError, HostResultError, NestedHostCallError, NotInBodyError
from replica_engine.errors.base import at, brief, in_words
from replica_engine.errors.program_errors import at_result
from replica_engine.upstream import distribute, eager, thread_state
from replica_engine.upstream.graphs import autograph, function_graphs, xla_ops
from replica_engine.values.structure import Build, OtherStructure, build_composite, flatten
from replica_engine.xla import arguments, body, function_spec
from replica_engine.xla.host_calls.closures import Closure, find_written_function

F = TypeVar("F", bound=Callable)

_FILLS = ("append", "extend", "add", "insert", "update")  # methods of Python's own lists, sets and dictionaries


def returns(spec: object) -> Callable[[F], F]:
    """Declares the results of a host function, so that `outside_compilation` does not trace it to find them.

    It decorates a function. `xla.returns(spec)(fn)` declares the results of a lambda, or of a function that is defined
    elsewhere: a method of an object, a function of a library.

    Args:
        spec: a `tf.TensorSpec`, or a structure of them; None for a function that returns nothing.

    Raises:
        HostResultError: something in `spec` is neither a spec nor None: a dtype, a shape, an example.

    Example:
        >>> import numpy as np, tensorflow as tf
        >>> from replica_engine import xla
        >>> @xla.returns(tf.TensorSpec([2], tf.float32))
        ... def sort(x):
        ...     return np.sort(x.numpy())
        >>> body = lambda x: xla.outside_compilation(sort, x)
        >>> xla.replicate(body, inputs=[[tf.constant([3.0, 1.0])]])[0].numpy().tolist()
        [1.0, 3.0]
        >>> scalar_max = xla.returns(tf.TensorSpec([], tf.float32))(np.max)
        >>> largest = lambda x: xla.outside_compilation(scalar_max, x)
        >>> float(xla.replicate(largest, inputs=[[tf.constant([3.0, 1.0])]])[0])
        3.0
    """
    _check_declaration(spec)

    def mark(fn: Any) -> Any:
        marked = fn.__func__ if isinstance(fn, (staticmethod, classmethod)) else fn
        if not (isinstance(marked, FunctionType) or function_graphs.is_tf_function(marked)):
            # A method of one object among many, a function that is written in C, an object that takes no attributes.
            fn = marked = functools.partial(fn)
        setattr(marked, function_spec.RETURNS, spec)
        return fn

    return mark


def _check_declaration(spec: object) -> None:
    leaves, structure = flatten(spec, what="the specs of xla.returns")
    for leaf, path in zip(leaves, structure.paths, strict=True):
        if leaf is not None and not isinstance(leaf, tf.TypeSpec):
            raise HostResultError(
                f"xla.returns takes a tf.TensorSpec for each tensor that the function returns; got {brief(leaf)}"
                f"{at(path)}. Write @xla.returns(tf.TensorSpec(shape, dtype)), with the fixed shape and the dtype of "
                "the tensor; for several tensors, a structure of specs; @xla.returns(None) above a function that "
                "returns nothing."
            )


def find_host_results(
    fn: Callable, closure: Closure, side: body.HostCallSite, handles: list[tuple[tf.Tensor, str]]
) -> HostResults | arguments.UnknownResults:
    """The results of a host function, with specs instead of tensors, if they are known.

    Args:
        fn: the function.
        closure: the function and its arguments.
        side: the call.
        handles: a list; the handles of variables that the function is seen to use are added to it.

    Raises:
        HostResultError: a result that no device can have, or a declared shape that is not fixed.
        HostAccessError: the function uses something that is on the devices.
        NestedHostCallError: the function makes a host call.
        NotInBodyError: the function calls what only a body may call, such as a collective.
    """
    # A declaration may be on any layer: on a function inside a partial, for example.
    for each in _layers(fn):
        if function_spec.RETURNS in getattr(each, "__dict__", {}):
            return _checked(HostResults(each.__dict__[function_spec.RETURNS]))
    if _returns_nothing(fn):
        return HostResults(None)
    try:
        with _outside_body():
            results = _trace(closure, side, handles)
    except (HostAccessError, NestedHostCallError, NotInBodyError):
        raise
    # The user's code, which gets tensors without values, may raise anything.
    except Exception as error:
        failure = tracebacks.as_raised(error)
        line = user_frames.raised_at(failure)
        raised = in_words(failure).split("\n")[0].removesuffix(".")
        return _unknown(fn, side.where, f"tracing it raised {raised}{at(line)}.", tracebacks.shortened(failure))
    for name, spec in zip(results.names, results.tensors, strict=True):
        if not spec.shape.is_fully_defined():
            why = (
                f"the result{name} has the shape {spec.shape}, and XLA compiles for fixed shapes. Pad it to a fixed "
                "shape if its shape depends on values."
            )
            return _unknown(fn, side.where, why)
    return _checked(results)


def _unknown(fn: Callable, where: str, why: str, failure: Exception | None = None) -> arguments.UnknownResults:
    name = readable_name(fn)
    name = "a lambda" if name == "lambda" else f"`{name}`"

    def error() -> HostResultError:
        made = HostResultError(
            f"The body uses the results of {name}, which outside_compilation{at(where)} runs on the host, but they are "
            f"not known before the run: {why} Declare them above the function, "
            "@xla.returns(tf.TensorSpec([...], tf.float32)), or, for a lambda or a library's function, in the call, "
            "outside_compilation(xla.returns(...)(fn), x). xla.returns(None) declares none."
        )
        if failure is not None:
            made.failure = made.__cause__ = failure
        return made

    return arguments.UnknownResults(error)


class HostResults:
    """The results of a host function, taken apart.

    Numbers and arrays become tensors. None, and a graph's ops without results (for example of `tf.print`), are None.

    Args:
        value: the value that the function returned, with tensors, arrays or specs of tensors in it.

    Attributes:
        tensors: the tensors, or their specs, in order.
        names: the path of each in the structure: "['loss']".
        rebuild: builds the structure with other tensors.

    Raises:
        HostResultError: some part of the value cannot become a tensor.
        ReplicaValueError: the value contains itself.
    """

    def __init__(self, value: object):
        self.tensors: list[tf.Tensor | tf.TensorSpec] = []
        self.names: list[str] = []
        leaves, self._spec = flatten(value, what="the results of a host function")
        self._kinds: list[str] = []
        builds = []
        for leaf, path in zip(leaves, self._spec.paths, strict=True):
            kind, tensors = _open(leaf, path)
            places = [itemgetter(len(self.tensors) + index) for index in range(len(tensors))]
            builds.append(places[0] if kind == _TENSOR else _build_other_leaf(leaf, places))
            self._kinds.append(kind)
            self.tensors += tensors
            self.names += [path] if kind == _TENSOR else [f"{path} (component {n})" for n in range(len(tensors))]
        self.rebuild: Build = self._spec.builder(builds)

    def select_tensors(self, value: object) -> list[tf.Tensor]:
        """The tensors of another value that the function returned.

        Raises:
            HostResultError: the value has another structure, or some part of it cannot become a tensor.
        """
        if isinstance(value, tf.Tensor) and self._kinds == [_TENSOR] and self._spec.is_leaf:  # the most common case
            return [value]
        try:
            leaves = self._spec.match_leaves(value)
        except OtherStructure as other:
            given = other.given or _open(other.value, other.path)[0]
            wanted = other.wanted or self._kinds[other.leaf]
            raise _other_structure(other.path, given, wanted) from None
        found: list[tf.Tensor] = []
        for leaf, path, wanted in zip(leaves, self._spec.paths, self._kinds, strict=True):
            kind, tensors = _open(leaf, path)
            if kind != wanted:
                raise _other_structure(path, kind, wanted)
            found += tensors
        return found


class AnyResults(HostResults):
    """Results that are not known, and that the body does not use: the function may return anything."""

    def __init__(self) -> None:
        super().__init__(None)

    def select_tensors(self, value: object) -> list[tf.Tensor]:
        """Of no value."""
        return []


_TENSOR = "a tensor"


def _other_structure(name: str, given: str, wanted: str) -> HostResultError:
    return HostResultError(
        f"The host function returned {given}{at_result(name)}, but the body was compiled for {wanted}. A host function "
        "must return the same structure each time."
    )


def _build_other_leaf(leaf: object, builds: Sequence[Build]) -> Build:
    return (lambda _: None) if leaf is None or isinstance(leaf, tf.Operation) else build_composite(leaf, builds)


def _open(value: object, name: str) -> tuple[str, Sequence[tf.Tensor | tf.TensorSpec]]:
    """What a leaf is, for messages, and the tensors in it."""
    if isinstance(value, (tf.Tensor, tf.TensorSpec)):
        return _TENSOR, [value]
    if value is None or isinstance(value, tf.Operation):
        return "None", []
    if isinstance(value, (tf.Variable, np.ndarray, np.generic, bool, int, float, complex, str, bytes)):
        return _TENSOR, [tf.convert_to_tensor(value)]
    if not isinstance(value, (tf.__internal__.CompositeTensor, tf.TypeSpec)):
        raise HostResultError(
            f"The host function returned {brief(value)}{at_result(name)}, which is not a tensor. A host function can "
            "return tensors, arrays, numbers, None, and nested structures of them."
        )
    spec = value if isinstance(value, tf.TypeSpec) else tf.type_spec_from_value(value)
    parts = tf.nest.flatten(value, expand_composites=True)
    return f"a {type(spec).__name__.removesuffix('Spec')} of {len(parts)} components", parts


def _trace(closure: Closure, side: body.HostCallSite, handles: list[tuple[tf.Tensor, str]]) -> HostResults:
    """Finds the results by tracing."""
    found: list[HostResults] = []

    def flat(*tensors: tf.Tensor) -> list[tf.Tensor]:
        with body.on_host(side._replace(replica=tf.constant(0))):
            fn, args, kwargs = closure.build(tensors)
            found.append(HostResults(autograph.convert_for_host(fn)(*args, **kwargs)))
        return found[0].tensors

    graph = xla_ops.trace("host_function", flat, [tf.TensorSpec(each.shape, each.dtype) for each in closure.tensors])
    handles += [(outside, side.where) for outside, _ in graph.captures if outside.dtype == tf.resource]
    for outside, _ in graph.captures:
        # Tensors of arguments and closures have places by now. Only an attribute or a global leads here.
        if tf.is_symbolic_tensor(outside) and outside.dtype != tf.resource:
            raise HostAccessError(
                f"The function that outside_compilation{at(side.where)} runs on the host uses the tensor "
                f"{outside.name!r} of the body through an attribute or a global variable. Pass it as an argument: "
                "outside_compilation(fn, tensor)."
            )
    found[0].tensors = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in graph.outputs]
    return found[0]


def _checked(results: HostResults) -> HostResults:
    for name, spec in zip(results.names, results.tensors, strict=True):
        if xla_ops.is_host_only(spec.dtype):
            raise HostResultError(
                f"The host function's result{at_result(name)} has dtype {spec.dtype.name}, which no device can hold. "
                "Use the tensor in the host function, and return numbers."
            )
        if not spec.shape.is_fully_defined():
            raise HostResultError(
                f"The host function's result{at_result(name)} has the shape {spec.shape}, but XLA compiles for fixed "
                "shapes. Pad the result to a fixed shape, and declare that shape: "
                "@xla.returns(tf.TensorSpec(shape, dtype))."
            )
    return results


@contextlib.contextmanager
def _outside_body() -> Iterator[None]:
    """Inside, nothing that surrounds the body (strategy, tape, graph) takes effect: as when the host function runs."""
    _, *rest = thread_state.locals_of_thread()
    graph = thread_state.default_graph()
    with (
        thread_state.enter_locals(([], *rest)),
        thread_state.graph_and_mode(graph, False),
        thread_state.enter_creators(graph, []),
        thread_state.actual_summaries(),
        distribute.no_strategy(),
        eager.no_tape(),
    ):
        yield


def _layers(fn: Any) -> Iterator[Any]:
    """A callable and the callables inside it: those of a partial, bound method, tf.function, object with `__call__`."""
    while fn is not None:
        yield fn
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        elif function_graphs.is_tf_function(fn):
            fn = fn.python_function
        elif isinstance(fn, (FunctionType, type)):
            fn = getattr(fn, "__wrapped__", None)
        else:
            fn = type(fn).__dict__.get("__call__")
            if not isinstance(fn, FunctionType):
                return


def readable_name(fn: object) -> str:
    """The name of a function, for messages: "lambda" if it has none."""
    names = (getattr(each, "__name__", "") for each in _layers(fn))
    return next(filter(None, names), type(fn).__name__).strip("<>")


def list_codes(fn: object) -> frozenset[CodeType]:
    """The code of a host function and of the Python functions inside it, as the user wrote them."""
    return frozenset(find_written_function(each).__code__ for each in _layers(fn) if isinstance(each, FunctionType))


def _returns_nothing(fn: object) -> bool:
    """Whether no `return` statement of the function has a value."""
    # Code in C tells nothing, and `tf.print` returns an op in graphs: these are called for what they do.
    if fn is print or fn is tf.print or (getattr(fn, "__name__", "") in _FILLS and isinstance(fn, BuiltinMethodType)):
        return True
    functions = [each for each in _layers(fn) if isinstance(each, FunctionType)]
    return len(functions) == 1 and _code_returns_nothing(find_written_function(functions[0]).__code__)


@functools.lru_cache(maxsize=1024)
def _code_returns_nothing(code: CodeType) -> bool:
    loads_none = False  # whether the instruction before does
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return False
        # A jump to the instruction may come with another value than the one loaded before it.
        if instruction.opname == "RETURN_VALUE" and (not loads_none or instruction.is_jump_target):
            return False
        loads_none = instruction.opname == "LOAD_CONST" and instruction.argval is None
    return not code.co_flags & (0x20 | 0x80 | 0x200)  # generators and coroutines
