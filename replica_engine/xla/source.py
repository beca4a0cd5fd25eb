"""A function to be traced, with what a `tf.function` around it asks for, and how to know it again."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import tensorflow as tf

from replica_engine._compat import distribute, function
from replica_engine.errors import InputsError
from replica_engine.xla.arguments import Arguments, ById, Shapes, constant_key


@dataclass(frozen=True)
class Source:
    """A function to be traced.

    Attributes:
        fn: the Python function.
        autograph: whether AutoGraph converts it.
        seldom: trace it for unknown dimensions rather than for many shapes (`reduce_retracing`).
        signature: specs of its arguments that it was declared with, if it was.
        declared: the `tf.function` that it was taken from, to know it by.
    """

    fn: Callable[..., Any]
    autograph: bool = True
    seldom: bool = False
    signature: Any = None
    declared: Any = None

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Source:
        """Of any callable; a `tf.function` is taken off, and what it asks for is kept."""
        if function.is_tf_function(fn):
            return cls(fn.python_function, *function.options(fn), ById(fn))  # type: ignore[attr-defined]
        return cls(fn)

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.fn, "__name__", type(self.fn).__name__).replace("<lambda>", "lambda")

    @property
    def key(self) -> Any:
        """Hashable; equal for functions that would be traced to the same graph."""
        return function_key(self.fn) if self.declared is None else self.declared

    def arguments(self, args: Any, kwargs: Any, size: int) -> tuple[Arguments, Shapes]:
        """Arguments for it, and the shapes that it is to be traced for.

        Raises:
            InputsError: they do not fit its input signature.
        """
        if self.signature is None:
            arguments = Arguments(args, kwargs, size)
            return arguments, arguments.shapes
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        specs = tf.nest.flatten(self.signature)
        values = tf.nest.flatten(bound.args[: len(self.signature)])
        if len(specs) != len(values):
            raise InputsError.not_of_signature(self.name, str(self.signature))
        cast = [self._fit(spec, value) for spec, value in zip(specs, values, strict=True)]
        packed = tf.nest.pack_sequence_as(list(bound.args[: len(self.signature)]), cast)
        arguments = Arguments((*packed, *bound.args[len(self.signature) :]), {}, size)
        declared = [spec.shape for spec in specs if isinstance(spec, tf.TensorSpec)]
        if len(declared) != len(arguments.slots):
            return arguments, arguments.shapes
        if not all(shape.is_compatible_with(slot.shape) for shape, slot in zip(declared, arguments.slots, strict=True)):
            raise InputsError.not_of_signature(self.name, str(self.signature))
        return arguments, tuple(declared)

    def _fit(self, spec: Any, value: Any) -> Any:
        if not isinstance(spec, tf.TensorSpec):
            return value
        try:
            if isinstance(value, distribute.DistributedValues):
                if any(tf.as_dtype(part.dtype) != spec.dtype for part in value.values):
                    raise InputsError.not_of_signature(self.name, str(self.signature))
                return value
            return tf.convert_to_tensor(value, spec.dtype)
        except (TypeError, ValueError) as error:
            raise InputsError.not_of_signature(self.name, str(self.signature)) from error


def function_key(fn: Any, depth: int = 3) -> Any:
    """Equal for functions that would be traced to the same graph.

    Functions are equal that have the same code and use the same objects: globals, defaults, closed-over ones. So a
    lambda or nested function that is made anew for each call is the same one. `depth` is how far to look into
    functions that a function closes over.
    """
    if depth == 0:
        return ById(fn)
    if isinstance(fn, functools.partial):
        rest = tuple((name, _key(value, depth)) for name, value in sorted(fn.keywords.items()))
        return "partial", function_key(fn.func, depth), tuple(_key(value, depth) for value in fn.args), rest
    if isinstance(fn, MethodType):
        return "method", function_key(fn.__func__, depth), ById(fn.__self__)
    if not isinstance(fn, FunctionType):
        return ById(fn)
    cells = tuple(_cell_key(cell, depth) for cell in fn.__closure__ or ())
    defaults = tuple(_key(value, depth) for value in fn.__defaults__ or ())
    named = tuple((name, _key(value, depth)) for name, value in sorted((fn.__kwdefaults__ or {}).items()))
    # fn.__dict__ as well: functools.wraps keeps the wrapped function there, and AutoGraph its settings.
    marks = tuple((name, _key(value, depth)) for name, value in sorted(fn.__dict__.items()))
    used = tuple((name, constant_key(fn.__globals__[name])) for name in _names(fn.__code__) if name in fn.__globals__)
    return fn.__code__, used, cells, defaults, named, marks


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """The names of globals, and of attributes, that a function and those in it use."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


def _cell_key(cell: CellType, depth: int) -> Any:
    try:
        return _key(cell.cell_contents, depth)
    except ValueError:  # not yet assigned
        return ById(cell)


def _key(value: Any, depth: int) -> Any:
    is_function = isinstance(value, (FunctionType, MethodType, functools.partial))
    return function_key(value, depth - 1) if is_function else constant_key(value)
