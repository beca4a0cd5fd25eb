"""The graph in which one replica traces what is copied for all. Checked on TensorFlow 2.21.0.

At trace time this graph knows as much of a tensor from outside as the graph of the run does: a tensor whose value is
known there is a constant here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# OpDef by name: whether ops of a type have seeds.
from tensorflow.python.framework import op_def_registry as _op_def_registry

# _graph_to_seed_dict: how many seeds were drawn for the ops of a graph.
from tensorflow.python.framework import random_seed as _random_seed

# FuncGraph: the graph of a function. ALLOWLIST_COLLECTIONS: what it has in common with the graph around it.
from tensorflow.python.framework.func_graph import ALLOWLIST_COLLECTIONS
from tensorflow.python.framework.func_graph import FuncGraph as FuncGraph

# copy_handle_data: the shape and dtype of the variable behind a handle.
from tensorflow.python.ops.handle_data_util import copy_handle_data as copy_handle_data

from replica_engine._tf import components, eager

HANDLES = (tf.resource, tf.variant)
SEED = "seed2"
# Attributes of a graph that scopes set for ops, and that losses leave for optimizers of TensorFlow 1.
_OF_SCOPES = ("_attr_scope_map", "_op_to_kernel_label_map", "_gradient_override_map", "_gradient_function_map")
_LEFT = ("_container", "_last_loss_reduction", "_is_loss_scaled_by_optimizer")
_SEEING = "_replica_engine_seeing"
_LARGEST_CONSTANT = 4096  # elements


def placeholder(graph: Any, like: tf.Tensor) -> tf.Tensor:
    """A placeholder of a graph, of the dtype and static shape of a tensor; a handle keeps what it is a handle of."""
    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        made = tf.compat.v1.placeholder(like.dtype, like.shape)
    if like.dtype in HANDLES:
        copy_handle_data(like, made)
    return made


def constant(graph: Any, of: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """A constant in a graph of the value that tensors are known to have while the program is traced.

    Returns:
        None if the value of a tensor is unknown or too large, or if the tensors have different values.
    """
    first, values = of[0], []
    if first.dtype in HANDLES or not first.shape.is_fully_defined() or first.shape.num_elements() > _LARGEST_CONSTANT:
        return None
    for each in of:
        values.append(tf.get_static_value(each))
        if values[-1] is None or not _same(values[0], values[-1]):
            return None
    with graph.as_default(), tf.control_dependencies(None), tf.device(None):
        return tf.constant(values[0], first.dtype, first.shape)


def is_partly_known(tensor: tf.Tensor) -> bool:
    """Whether the value of a tensor, or a part of it, is known while the program is traced."""
    return tensor.dtype not in HANDLES and tf.get_static_value(tensor, partial=True) is not None


def counted_seeds(graph: Any) -> int:
    """How many seeds TensorFlow has drawn for the ops of a graph."""
    return _random_seed._graph_to_seed_dict.get(graph, 0)


def count_seeds(graph: Any, number: int) -> None:
    """Sets how many seeds TensorFlow has drawn for the ops of a graph."""
    _random_seed._graph_to_seed_dict[graph] = number


def seed_of_op(op: tf.Operation) -> int | None:
    """The seed that a random op has of its own, besides the global one; None for ops without seeds."""
    return op.get_attr(SEED) if _has_seed(op.type) else None


def new_graph(target: Any, see_seed: Callable[[], None]) -> Any:
    """A function graph whose ops are to be copied to another, the default graph.

    Args:
        target: the other graph.
        see_seed: a method that is called when the program sets the seed of the graph.
    """
    graph = _Source("replica")
    graph.target = weakref.ref(target)
    for name in _OF_SCOPES:
        setattr(graph, name, getattr(target, name))
    hand_over(target, graph)
    graph.see_seed = weakref.WeakMethod(see_seed)  # the registry of custom gradients holds graphs forever
    # cond and while look whether they are in a graph that puts stateful ops in order.
    graph._add_control_dependencies = target._add_control_dependencies
    return graph


def hand_over(graph: Any, other: Any) -> None:
    """Sets what ops have left in one graph for later ops in another one."""
    for name in _LEFT:
        setattr(other, name, getattr(graph, name))


def watched_variables(graph: Any) -> list[Any]:
    """The variables that ops of a graph have read."""
    return list(graph._watched_variables)


def collected(graph: Any) -> dict[str, int]:
    """How many values each collection of a graph has, except those of summaries, which nobody reads in TensorFlow 2."""
    return {
        key: len(graph.get_collection_ref(key))
        for key in graph.get_all_collection_keys()
        if key != tf.compat.v1.GraphKeys._SUMMARY_COLLECTION and key not in ALLOWLIST_COLLECTIONS
    }


def size(graph: Any) -> int:
    """The number of ops of a graph."""
    return len(graph.get_operations())


def made_since(graph: Any, size: int) -> list[tf.Operation]:
    """The ops of a graph that were made since it had a number of ops."""
    return list(graph.get_operations()[size:])


@contextlib.contextmanager
def on_no_device(graph: Any) -> Iterator[None]:
    """Inside the block, ops of a graph get no device, and the functions that they call are traced for such ops alone.

    TensorFlow looks up a traced function by the device scopes around its call, and `_anywhere` is one of them here.
    """
    with graph.device(None), graph.device(_anywhere):
        graph._device_function_stack.peek_top_obj().is_null_merge = True  # it changes nothing, and need not be called
        yield


def is_passed_by_reference(graph: Any) -> bool:
    """Whether a graph captures Python values that are looked up at each call."""
    return bool(graph._function_captures.by_ref_internal)


def control_captures(graph: Any) -> bool:
    """Whether ops of a graph were to wait for ops of another graph."""
    return bool(graph._function_captures.control)


def on_capture(graph: Any, source: Any, see: Callable[[Any], Any]) -> None:
    """Passes each tensor and op of another graph that a function graph uses to `see`, which returns the one to use.

    Twins of components are for copies: in the function graph, the component itself is used.

    Args:
        graph: the function graph.
        source: the other graph.
        see: takes the tensor, or the op that is to be waited for.
    """
    seeing = getattr(graph, _SEEING, None)
    if seeing is not None:
        seeing[id(source)] = weakref.ref(source), see
        return
    seeing = {id(source): (weakref.ref(source), see)}
    setattr(graph, _SEEING, seeing)
    capture, control_dependencies = graph.capture, graph.control_dependencies

    def seen(made: Any) -> Any:
        origin = made.graph
        found = seeing.get(id(origin))
        return found[1](made) if found is not None and found[0]() is origin else made

    def captured(tensor: Any, name: str | None = None, shape: Any = None) -> Any:
        if not eager.is_eager(tensor):
            tensor = seen(tensor)
        elif tensor.dtype == tf.resource:
            found = components.component(tensor)
            if found is not None and found.is_twin:
                tensor = found.of(found.replica)
        return capture(tensor, name, shape)

    def waited_for(inputs: Any) -> Any:
        if inputs is not None:
            inputs = [
                seen(each)
                if isinstance(each, tf.Operation) or (isinstance(each, tf.Tensor) and not eager.is_eager(each))
                else each
                for each in inputs
            ]
        return control_dependencies(inputs)

    graph.capture, graph.control_dependencies = captured, waited_for


class _Source(FuncGraph):
    """A graph whose ops are copied; says when the program sets its seed."""

    see_seed: weakref.WeakMethod[Callable[[], None]] | None = None
    own_seed: int | None = None
    target: weakref.ref[Any] | None = None

    def capture(self, tensor: Any, name: str | None = None, shape: Any = None) -> tf.Tensor:
        """The tensor of this graph for one of another graph: a constant if its value is known, as TensorFlow does it
        for small eager tensors, because an op in the other graph would know it too."""
        if self.target is not None and not eager.is_eager(tensor) and tensor.graph is self.target():
            captures = self._function_captures
            if id(tensor) not in captures.by_val_internal:
                known = constant(self, [tensor])
                if known is not None:
                    captures.add_or_replace(key=id(tensor), external=tensor, internal=known, is_by_ref=False)
                    self.inputs.append(known)
        return super().capture(tensor, name, shape)

    @property
    def seed(self) -> int | None:
        """The seed of random ops."""
        return self.own_seed

    @seed.setter
    def seed(self, value: int | None) -> None:
        see = None if self.see_seed is None else self.see_seed()
        if see is not None:
            see()
        self.own_seed = value


def _anywhere(op: tf.Operation) -> str:
    """The device that an op has already."""
    return op.device


def _same(value: Any, other: Any) -> bool:
    value, other = np.asarray(value), np.asarray(other)
    return value.dtype == other.dtype and value.shape == other.shape and repr(value.tolist()) == repr(other.tolist())


@functools.cache
def _has_seed(kind: str) -> bool:
    definition = _op_def_registry.get(kind)
    return definition is not None and any(attribute.name == SEED for attribute in definition.attr)
