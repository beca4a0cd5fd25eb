"""What a program was compiled for, in names and values that a user knows: the log says why it is compiled again.

The rows are written beside the program, so they must not tell secrets: of a text they have a hash. They only make a
line of the log, so nothing here may fail a program, take long or copy much.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from replica_engine._tf.graphs import xla_ops
from replica_engine.xla.stages.body_graph import BodyGraph
from replica_engine.xla.stages.program import BodyProgram

_MOST_BYTES = 2**20  # of an array that is hashed
_MOST_DEPTH = 4  # of containers in containers
_MOST_ITEMS = 16


def rows_of(traced: BodyGraph, program: BodyProgram) -> dict[str, str]:
    """What a program was lowered for, besides its text; empty if that cannot be told.

    Args:
        traced: the body.
        program: the lowered body.
    """
    try:
        return _rows(traced, program)
    except Exception:  # objects of the user may raise anything, and the rows only make a line of the log
        return {}


def _rows(traced: BodyGraph, program: BodyProgram) -> dict[str, str]:
    rows = {"the number of replicas": str(program.body.size)}
    for name, slot in zip(program.slot_names, program.slots, strict=True):
        rows[name] = f"{slot.dtype.name} {slot.shape}"
    for path, value in traced.constants:
        rows[path] = _described(value)
    for index, tensor in enumerate(program.tensors):
        rows[f"the captured tensor {index}"] = f"{tensor.dtype.name} {tensor.shape}"
    for index, handle in enumerate(program.handles):
        dtype, shape = xla_ops.variable_dtype_and_shape(handle) or ("?", "?")
        rows[f"the variable {index} ({xla_ops.variable_name(handle)})"] = f"{getattr(dtype, 'name', dtype)} {shape}"
    return rows | _closed_over(traced.fn)


def _closed_over(fn: Any) -> dict[str, str]:
    """The code of a function, and the values that it uses without being given them."""
    rows: dict[str, str] = {}
    while isinstance(fn, functools.partial):
        rows.update((f"the argument {index} of the partial", _described(value)) for index, value in enumerate(fn.args))
        rows.update((f"the argument {name} of the partial", _described(value)) for name, value in fn.keywords.items())
        fn = fn.func
    owner = None
    if isinstance(fn, MethodType):
        owner, fn = fn.__self__, fn.__func__
    if isinstance(fn, FunctionType):
        names = fn.__code__.co_names  # of globals and of attributes
        attributes = getattr(owner, "__dict__", {})
        used = {name: attributes[name] for name in names if name in attributes}
        rows.update((f"self.{name}", _described(value)) for name, value in used.items() if _is_plain(value))
        rows["its code"] = _code(fn.__code__)
        rows.update((f"the closed-over {name}", _described(value)) for name, value in _cells(fn))
        used = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
        rows.update((f"the global {name}", _described(value)) for name, value in used.items())
    return rows


def _cells(fn: FunctionType) -> Iterator[tuple[str, Any]]:
    """The names and values that a function closes over; without names that have no value yet."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # empty: a function that is defined further down, for example
            continue


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or type(value) in (bool, int, float, complex, str, bytes)
        or isinstance(value, (np.bool_, np.number))
    )


def _described(value: Any, depth: int = 0) -> str:
    """A value as text that is the same in each process, and without the text of strings."""
    if type(value) in (str, bytes):
        data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
        return f"a {type(value).__name__} with the hash {_hash(data)}"
    if _is_plain(value):
        return repr(value)[:80]
    if type(value) is np.ndarray:
        text = f"an array {value.dtype} {value.shape}"
        is_hashed = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        return f"{text} with the hash {_hash(np.ascontiguousarray(value).tobytes())}" if is_hashed else text
    if isinstance(value, FunctionType):
        return f"the function {value.__qualname__} {_code(value.__code__)}"
    if depth < _MOST_DEPTH and type(value) in (list, tuple) and len(value) <= _MOST_ITEMS:
        return f"[{', '.join(_described(item, depth + 1) for item in value)}]"
    if depth < _MOST_DEPTH and type(value) is dict and len(value) <= _MOST_ITEMS:
        pairs = ((_described(key, depth + 1), _described(item, depth + 1)) for key, item in value.items())
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}"
    return type(value).__qualname__


def _code(code: CodeType) -> str:
    return f"with the hash {_hash(repr(_parts(code)).encode(errors='surrogatepass'))}"


def _parts(code: CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, [_constant(each) for each in code.co_consts]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _parts(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)  # a set has no order


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
