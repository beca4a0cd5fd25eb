"""A function to be traced, with the options of a `tf.function` around it, and the key it is found by."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import tensorflow as tf

from replica_engine.errors import InputsError, ReplicaValueError, base
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import function_graphs
from replica_engine.values.structure import PLAIN, ById, constant_key
from replica_engine.xla.arguments import Arguments, Shapes

RETURNS = "_replica_engine_returns"
"""The attribute of a function in which `xla.returns` keeps what it declares."""

Hosts = frozenset[CodeType]
"""Code objects of functions that `outside_compilation` runs."""


@dataclass(frozen=True)
class FunctionSpec:
    """A function to be traced.

    Attributes:
        fn: the Python function.
        autograph: whether AutoGraph converts it.
        reduce_retracing: whether to trace it once for unknown dimensions, instead of once for each shape.
        signature: the specs of its arguments that it was declared with, or None.
        declared: identifies the `tf.function` that it was taken from; None if there was none.
        returns_tensors: whether numbers and strings that it returns become tensors, as those of a `tf.function` do.
        step: if it is a loop, what the loop calls; what that uses decides whether two loops are the same.
    """

    fn: Callable[..., Any]
    autograph: bool = True
    reduce_retracing: bool = False
    signature: Any = None
    declared: Any = None
    returns_tensors: bool = False
    step: FunctionSpec | None = None

    @classmethod
    def from_callable(cls, fn: Callable[..., Any]) -> FunctionSpec:
        """The spec of any callable. A `tf.function` is unwrapped, and its options are kept.

        Raises:
            ReplicaValueError: `fn` cannot be called.
        """
        if function_graphs.is_tf_function(fn):
            return cls(fn.python_function, *function_graphs.options(fn), ById(fn), True)  # type: ignore[attr-defined]
        if not callable(fn):
            raise ReplicaValueError.no_function(fn)
        return cls(fn)

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.fn, "__name__", type(self.fn).__name__).replace("<lambda>", "lambda")

    @property
    def code(self) -> Any:
        """Equal for functions with one code; for a callable without Python code, for itself."""
        if self.step is not None:
            return self.step.code
        fn: Any = self.fn
        while isinstance(fn, (MethodType, functools.partial)):
            fn = fn.__func__ if isinstance(fn, MethodType) else fn.func
        code = getattr(fn, "__code__", None)
        return code if isinstance(code, CodeType) else self.declared or ById(fn)

    def key(self, hosts: Hosts) -> Any:
        """Hashable; equal for functions that would be traced to the same graph.

        Args:
            hosts: the code of functions in it that run on the host; what only they use does not affect the key.
        """
        if self.step is not None:
            return self.declared, self.step.key(hosts)
        return function_key(self.fn, hosts) if self.declared is None else self.declared

    def used(self, hosts: Hosts) -> list[Any] | None:
        """The objects that `key` depends on: while they are the very same, so is the key. None if it may change."""
        return used_objects(self.fn, hosts) if self.declared is None else None

    def arguments(self, args: Any, kwargs: Any, size: int) -> tuple[Arguments, Shapes]:
        """The arguments, taken apart, and the shapes that the function should be traced for.

        Raises:
            InputsError: the arguments do not fit the function's input signature.
        """
        if self.signature is None:
            arguments = Arguments(args, kwargs, size)
            return arguments, arguments.shapes
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        # A signature may be shorter than the parameters: the others have defaults, and are compiled in.
        specs = tf.nest.flatten(self.signature)
        values = tf.nest.flatten(bound.args[: len(self.signature)])
        if len(specs) != len(values):
            raise InputsError(
                f"`{self.name}` was called with {len(values)} tensors, but the input_signature has {len(specs)}."
            )
        names = [f"args[{index}]" for index, spec in enumerate(self.signature) for _ in tf.nest.flatten(spec)]
        cast = [self._fit(*each) for each in zip(names, specs, values, strict=True)]
        packed = tf.nest.pack_sequence_as(list(bound.args[: len(self.signature)]), cast)
        arguments = Arguments((*packed, *bound.args[len(self.signature) :]), {}, size)
        declared = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
        # Specs of ragged and sparse tensors declare no shape of a slot, and each is several slots.
        if len(declared) != len(arguments.slots):
            return arguments, arguments.shapes
        for slot, shape in zip(arguments.slots, declared, strict=True):
            if not shape.is_compatible_with(slot.shape):
                given, wanted = f"of shape {slot.shape}", f"the shape {shape}"
                raise InputsError.not_of_signature(self.name, slot.name, given, wanted)
        return arguments, tuple(declared)

    def _fit(self, name: str, spec: Any, value: Any) -> Any:
        """A value converted to its spec in the signature. `name` is the path of the argument."""
        if not isinstance(spec, tf.TensorSpec):
            return value
        wanted = f"dtype {spec.dtype.name} and shape {spec.shape}"
        if isinstance(value, distribute.DistributedValues):
            unlike = [part for part in value.values if tf.as_dtype(part.dtype) != spec.dtype]
            if unlike:
                raise InputsError.not_of_signature(self.name, name, _described(unlike[0]), wanted)
            return value
        try:
            return tf.convert_to_tensor(value, spec.dtype)
        except (TypeError, ValueError):
            raise InputsError.not_of_signature(self.name, name, _described(value), wanted) from None


def _described(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"of dtype {tf.as_dtype(value.dtype).name} and shape {tf.TensorShape(value.shape)}"
    return base.brief(value)


def function_key(fn: Any, hosts: Hosts, depth: int = 3) -> Any:
    """Equal for functions that would be traced to the same graph.

    Two functions are equal if they have the same code and use the same objects: globals, defaults, closed-over objects.
    So a lambda or nested function that each call defines again has the same key each time. `depth` is how far to look
    into functions that a function closes over. For functions in `hosts`, see `_host_key`.
    """
    if depth == 0:
        return ById(fn)

    def key(value: Any) -> Any:
        is_function = isinstance(value, (FunctionType, MethodType, functools.partial))
        return function_key(value, hosts, depth - 1) if is_function else constant_key(value)

    if isinstance(fn, functools.partial):
        # Sorted, since keywords in another order make the same call.
        rest = tuple((name, key(value)) for name, value in sorted(fn.keywords.items()))
        return "partial", function_key(fn.func, hosts, depth), tuple(map(key, fn.args)), rest
    if isinstance(fn, MethodType):
        return "method", function_key(fn.__func__, hosts, depth), ById(fn.__self__)
    if not isinstance(fn, FunctionType):
        return ById(fn)
    code = fn.__code__
    if code in hosts:
        return _host_key(fn)
    cells = tuple(
        _host_cell_key(code, name, cell) if hosts and _is_for_hosts(code, name, hosts) else _cell_key(cell, key)
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True)
    )
    defaults = tuple(map(key, fn.__defaults__ or ()))
    named = tuple((name, key(value)) for name, value in sorted((fn.__kwdefaults__ or {}).items()))
    # fn.__dict__ as well: functools.wraps keeps the wrapped function there, and AutoGraph its settings.
    marks = tuple((name, key(value)) for name, value in sorted(fn.__dict__.items()))
    used = tuple((name, constant_key(fn.__globals__[name])) for name in _names(code, hosts) if name in fn.__globals__)
    return code, used, cells, defaults, named, marks


_BOUND = (MethodType, functools.partial)


def used_objects(fn: Any, hosts: Hosts, depth: int = 3) -> list[Any] | None:
    """The objects that `function_key` looks at; None if one may change and stay the same object."""
    if type(fn) is not FunctionType:
        return None
    code = fn.__code__
    found: list[Any] = [code, fn.__globals__]
    cells = fn.__closure__ or ()
    if hosts:  # then a cell may count, and not what is in it
        found += cells
    try:
        values = [cell.cell_contents for cell in cells]
    except ValueError:  # not yet assigned
        return None
    if fn.__defaults__:
        values += fn.__defaults__
    for named in (fn.__kwdefaults__, fn.__dict__):
        if named:
            found += named
            values += named.values()
    for value in values:
        found.append(value)
        kind = type(value)
        if kind in PLAIN or issubclass(kind, _BOUND):  # not isinstance: it asks modules of TensorFlow for their class
            return None
        if kind is FunctionType and depth > 1:
            inner = used_objects(value, hosts, depth - 1)
            if inner is None:
                return None
            found += inner
    for name in _names(code, hosts):
        # `_names` stands for a missing global, such as a builtin or the name of an attribute: no global can be that.
        value = fn.__globals__.get(name, _names)
        found.append(value)
        if type(value) in PLAIN:
            return None
    return found


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType, hosts: Hosts) -> tuple[str, ...]:
    """The globals and attributes that a function and the functions inside it use; those inside `hosts` are left out."""
    inner = [name for each in _inner(code) if each not in hosts for name in _names(each, hosts)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


@functools.lru_cache(maxsize=4096)
def _is_for_hosts(code: CodeType, name: str, hosts: Hosts) -> bool:
    """Whether only host functions use the variable of this name that a function closes over."""
    if any(each.argval == name and each.opname in _USES for each in dis.get_instructions(code)):
        return False
    inner = [each for each in _inner(code) if name in each.co_freevars]
    return bool(inner) and all(each in hosts or _is_for_hosts(each, name, hosts) for each in inner)


def _host_key(value: Any) -> Any:
    """A key for a value that runs on the host, or is used there.

    Such a value is used after the trace too, so objects count by identity. Globals are looked up in each call. A
    closed-over variable that a host function assigns to counts by its cell.
    """
    if isinstance(value, FunctionType):
        code = value.__code__
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        settings = (value.__defaults__ or (), tuple((value.__kwdefaults__ or {}).items()))
        of_cells = tuple(_host_cell_key(code, name, cell) for name, cell in cells)
        return code, ById(value.__globals__), of_cells, _host_key(settings), repr(value.__dict__.get(RETURNS))
    if type(value) is tuple:
        return tuple(map(_host_key, value))
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return constant_key(value)
    return ById(value)


def _host_cell_key(code: CodeType, name: str, cell: CellType) -> Any:
    return ById(cell) if assigns(code, name) else _cell_key(cell, _host_key)


@functools.lru_cache(maxsize=4096)
def assigns(code: CodeType, name: str) -> bool:
    """Whether a function, or a function inside it, assigns to the variable of this name that it closes over."""
    if any(each.argval == name and each.opname == "STORE_DEREF" for each in dis.get_instructions(code)):
        return True
    return any(assigns(each, name) for each in _inner(code) if name in each.co_freevars)


# LOAD_CLASSDEREF until Python 3.11, LOAD_FROM_DICT_OR_DEREF since 3.12: a class body that reads the variable.
_USES = ("LOAD_DEREF", "STORE_DEREF", "DELETE_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _cell_key(cell: CellType, key: Callable[[Any], Any]) -> Any:
    try:
        return key(cell.cell_contents)
    except ValueError:  # not yet assigned
        return ById(cell)
