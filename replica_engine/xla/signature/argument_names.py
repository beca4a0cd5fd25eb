"""Names of a body's arguments, for errors about tensors that come from them."""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from replica_engine._tf import variables
from replica_engine._tf.graphs import subgraphs
from replica_engine.process import scoped

_PLACE = re.compile(r"(args|kwargs)\[(?:(\d+)|'(\w+)')\](.*)", re.DOTALL)
_thread = threading.local()


@contextlib.contextmanager
def named(
    fn: Callable[..., object], tensors: Sequence[tf.Tensor], places: Sequence[str], skip: int = 0
) -> Iterator[None]:
    """Inside, errors about these tensors name them as arguments of a function.

    Args:
        fn: the function.
        tensors: placeholders for the tensors among its arguments.
        places: the paths of the tensors in the arguments: "args[0]['x']".
        skip: how many arguments come before the first one that `places` counts.
    """
    described = [f"the argument `{_parameter(fn, place, skip)}` of `{_name(fn)}`" for place in places]
    graph = getattr(_thread, "graph", None) if skip else variables.graph()  # with `skip` it is only a part of the body
    with (
        scoped.attribute(_thread, "named", [*_named(), *zip(tensors, described, strict=True)]),
        scoped.attribute(_thread, "graph", graph),
    ):
        yield


def of(placeholder: tf.Tensor) -> str:
    """A placeholder in words: "the argument `x` of `step`"."""
    for tensor, described in _named():
        if tensor is placeholder:
            return described
    # A placeholder of a nested tf.function, which knows the name that the user gave it.
    name = placeholder.op.node_def.attr["_user_specified_name"].s.decode() or placeholder.op.name
    return f"the argument `{name}` of `{placeholder.graph.name}`"


def behind(tensor: tf.Tensor, wanted: Callable[[tf.Tensor], bool]) -> list[str]:
    """The arguments, and tensors from outside, that a tensor of a body depends on and that are `wanted`; in words."""
    found: dict[str, None] = {}
    for each in _tensors_behind(tensor):
        if each.op.type == "Placeholder" and wanted(each):
            outside = subgraphs.captured(each)
            found[of(each) if outside is None else _of_outside(outside)] = None
    return sorted(found)


def comes_from_loop(tensor: tf.Tensor) -> bool:
    """Whether a tensor in a loop depends on a value of unknown shape that the loop changes."""
    return any(
        each.op.type == "Placeholder"
        and not each.shape.is_fully_defined()
        and variables.is_loop_body(each.graph)
        and subgraphs.captured(each) is None
        for each in _tensors_behind(tensor)
    )


def ops_behind(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The ops of a body that a tensor depends on, including the op that makes it."""
    return (each.op for each in _tensors_behind(tensor) if each.op.type != "Placeholder")


def _tensors_behind(tensor: tf.Tensor) -> Iterator[tf.Tensor]:
    """A tensor and all tensors of the body that it depends on. Captures of functions in the body are followed."""

    def behind(each: tf.Tensor) -> list[tf.Tensor]:
        if each.op.type != "Placeholder":
            return list(each.op.inputs)
        return [outside] if tf.is_symbolic_tensor(outside := _outside(each)) else []

    found = subgraphs.reached([tensor] if tf.is_symbolic_tensor(tensor) else [], behind)
    return (each for each in found if each.op.type != "Placeholder" or _outside(each) is None)


def _outside(placeholder: tf.Tensor) -> tf.Tensor | None:
    """What a placeholder in a function of the body stands for; None for an input of the body, or of a function."""
    is_input = placeholder.graph is getattr(_thread, "graph", None)
    return None if is_input else subgraphs.captured(placeholder)


def _of_outside(tensor: tf.Tensor) -> str:
    if tensor.op.type == "Placeholder" and subgraphs.captured(tensor) is None:
        return of(tensor)
    return f"the tensor `{tensor.name}` of `{tensor.graph.name}`"


def _named() -> list[tuple[tf.Tensor, str]]:
    return getattr(_thread, "named", None) or []


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__name__", type(fn).__name__).replace("<lambda>", "lambda")


def _parameter(fn: Callable[..., object], place: str, skip: int) -> str:
    """ "x['ids']" for "args[0]['ids']", where the function's first parameter is x."""
    match = _PLACE.match(place)
    if match is None:
        return place
    _, index, name, rest = match.groups()
    if name is not None:
        return name + rest
    try:
        bound = inspect.signature(fn).bind_partial(*range(int(index) + skip + 1))
    except (TypeError, ValueError):  # the function is not a Python function, or takes fewer arguments
        return place
    name, value = bound.arguments.popitem()  # the last one; the parameter *rows has all values that it takes
    return f"{name}[{len(value) - 1}]{rest}" if isinstance(value, tuple) else name + rest
