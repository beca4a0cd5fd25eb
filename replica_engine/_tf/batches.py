"""Tells whether a tensor came out of a dataset that was not distributed. Checked on TensorFlow 2.21.0.

A tensor does not know where it came from. So this module wraps the iterators of plain datasets: they note the tensors
that they return, by an attribute of the tensors. No dictionary has them: one with weak references would call Python
when a tensor goes, in each step, and what a handler of a signal raises there is lost. A `for` over a dataset, in a
function that AutoGraph has converted, has no iterator: TensorFlow traces its body once, with an element that is noted
in the same way.

While a function is traced, its inputs are placeholders, which only a call tells to be batches. So `watch` keeps on the
graph which inputs are of interest, and each call of the function looks at the tensors that it passes for these. If that
call is itself traced, the tensors may be inputs of the function around it, and are watched in turn.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# dataset_autograph: traces the body of a `for` over a dataset, in a function that AutoGraph has converted.
from tensorflow.python.data.ops import dataset_autograph as _dataset_autograph

# OwnedIterator: the iterator of a tf.data.Dataset; `_next_internal` gives its next element.
from tensorflow.python.data.ops.iterator_ops import OwnedIterator as _OwnedIterator

from replica_engine._tf.graphs import autograph

_GIVEN = "_replica_engine_given"
_any_given = False
_GET_NEXT = ("IteratorGetNext", "IteratorGetNextSync")
_WATCHED = "_replica_engine_watched"

Found = Callable[[tf.Tensor], None]
"""Takes a tensor that a plain dataset gave."""

OWNER, NAME = _OwnedIterator, "_next_internal"
LOOPS, SCAN = _dataset_autograph, "_general_purpose_scan"


def noted(original: Callable[..., Any], self: Any) -> Any:
    """Notes the tensors that an iterator gives; wrapped around `OWNER.NAME`."""
    global _any_given
    element = original(self)
    if tf.executing_eagerly():
        _any_given = True
        kind = type(element)
        for leaf in element if kind is tuple else element.values() if kind is dict else (element,):
            if isinstance(leaf, tf.Tensor):
                setattr(leaf, _GIVEN, True)
    return element


@autograph.artifact
def element_noted(original: Callable[..., Any], dataset: Any, state: Any, body: Callable[[Any, Any], Any]) -> Any:
    """Notes the element with which the body of a `for` over a dataset is traced; wrapped around `LOOPS.SCAN`."""

    @autograph.artifact
    def noted_body(loop_state: Any, element: Any) -> Any:
        for leaf in tf.nest.flatten(element):
            if isinstance(leaf, tf.Tensor):
                setattr(leaf, _GIVEN, True)
        return body(loop_state, element)

    return original(dataset, state, noted_body)


def any_given() -> bool:
    """Whether a plain dataset has given a tensor to eager code so far."""
    return _any_given


def is_of_dataset(value: Any) -> bool:
    """Whether a value is a tensor that a plain dataset gave: as an element, or in a tuple or a dict."""
    if not isinstance(value, tf.Tensor):
        return False
    if hasattr(value, _GIVEN):
        return True
    return not isinstance(value, tf.__internal__.EagerTensor) and value.op.type in _GET_NEXT


def watch(value: Any, key: Any, found: Found) -> None:
    """Calls `found` if a value is a tensor of a plain dataset: now, or as an input of the function that is traced.

    Args:
        value: any value; only inputs of a function are kept.
        key: an input is watched once for each key.
        found: what is called, at each call of the function with such a tensor. The graph keeps it.
    """
    if is_of_dataset(value):
        found(value)
    elif tf.is_symbolic_tensor(value) and value.op.type == "Placeholder":
        for outside, inside in getattr(value.graph, "captures", ()):
            if inside is value:
                watch(outside, key, found)
                return
        if not hasattr(value.graph, _WATCHED):
            setattr(value.graph, _WATCHED, {})
        getattr(value.graph, _WATCHED)[id(value), key] = value, found


def watch_calls(function: Any, graph: Any) -> None:
    """Makes calls of a function look at the inputs that `watch` has kept.

    Args:
        function: TensorFlow's atomic function that was made of the graph.
        graph: the graph, completely traced.
    """
    watched = getattr(graph, _WATCHED, None)
    if not watched:
        return
    numbers = {id(each): index for index, each in enumerate(graph.inputs)}
    inputs = [(numbers[number], key, found) for (number, key), (_, found) in watched.items() if number in numbers]
    # TensorFlow calls the function through this method, in eager mode and while another function is traced. The
    # function is kept weakly: it must go when it is used no more, and not only with the next collection of garbage.
    function.call_flat = functools.partial(_looked_at, weakref.ref(function), inputs)


def _looked_at(alive: weakref.ref[Any], inputs: list[tuple[int, Any, Found]], *args: Any) -> Any:
    """A call of a function, of whose inputs some are watched."""
    if _any_given or not tf.executing_eagerly():
        for index, key, found in inputs:
            watch(args[index], key, found)
    function = alive()
    assert function is not None, "it is being called"
    return type(function).call_flat(function, *args)
