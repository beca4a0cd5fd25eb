"""The function that the user wrote, for a function that AutoGraph converted.

A function defined inside a converted function is converted with it. In the converted one, `int(x)` of a tensor is a
tensor, and a loop over a tensor follows the rules of `tf.while_loop`. That is right for a graph, and wrong on the host,
where a function must run as it was written. Its code is still in the file it was written in, and the variables that it
closes over have kept their names. So the function can be rebuilt.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterator
from types import CodeType, FunctionType

from replica_engine._tf.graphs import autograph


def original_of(fn: FunctionType) -> FunctionType:
    """The function as it was written; `fn` itself if it was not converted, or if its source cannot be found."""
    code = fn.__code__
    if autograph.OPERATORS not in code.co_freevars:
        return fn
    file, first = autograph.first_line(code)
    if autograph.is_generated(file):
        return fn
    cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=True))
    arguments = _arguments(code)
    candidates = [
        found
        for found in _codes_of(file, "".join(linecache.getlines(file)))
        if found.co_name == code.co_name and _arguments(found) == arguments and set(found.co_freevars) <= set(cells)
        # A decorated function begins at its decorator, and a lambda of several lines may be mapped to a later line.
        if 0 <= first - found.co_firstlineno <= 20
    ]
    nearest = [found for found in candidates if found.co_firstlineno == max(each.co_firstlineno for each in candidates)]
    if len(nearest) != 1:
        return fn
    closure = tuple(cells[name] for name in nearest[0].co_freevars)
    made = FunctionType(nearest[0], fn.__globals__, fn.__name__, fn.__defaults__, closure)
    made.__kwdefaults__ = fn.__kwdefaults__
    made.__qualname__ = fn.__qualname__
    made.__dict__.update((name, value) for name, value in fn.__dict__.items() if not name.startswith("autograph"))
    return made


def _arguments(code: CodeType) -> tuple[str, ...]:
    flags = code.co_flags & 0x0C  # *args, **kwargs
    count = code.co_argcount + code.co_kwonlyargcount + (flags & 4 > 0) + (flags & 8 > 0)
    return code.co_varnames[:count]


@functools.lru_cache(maxsize=32)
def _codes_of(file: str, source: str) -> list[CodeType]:
    """All code objects of a file. `source` is the file's text, since the text may change in a notebook."""
    try:
        return list(_within(compile(source, file, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):  # for example the syntax of a notebook
        return []


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)
