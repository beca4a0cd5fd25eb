"""Which component of a distributed variable the code of a replica uses, and how. Checked on TensorFlow 2.21.0.

`trace_once` copies what replica 0 has traced for the other replicas. `weight + 1` in a replica reads the component of
that replica, and each copy must read that of its own. But `weight.values[0] + 1` reads the same component on every
replica. In a graph both would be an op with the same handle. So while a replica is watched, a distributed variable
gives it a twin of its component: the same variable behind a second handle. An op has the handle of a twin only if the
program got it from the distributed variable.

The watcher of a thread is also told of what Python code does that a copy cannot repeat. Where Python code asks for a
value that is unknown while tracing, it is a function of its own that is told, for all strategies.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import tensorflow as tf

# The file of all_gather.
from tensorflow.python.distribute import distribute_lib as _distribute_lib

# DistributedValues: asked in a replica for its own value. DistributedVariable: gives out twins.
from tensorflow.python.distribute import values as _values

# The file of tf.function, which asks in eager mode whether variables have values.
from tensorflow.python.eager.polymorphic_function import polymorphic_function as _polymorphic_function

# Function: a tf.function.
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function as _Function

# _get_outer_context_and_inner_device_stack: what tf.init_scope asks first.
from tensorflow.python.framework import ops as _ops

# get_seed: the pair of seeds of a random op.
from tensorflow.python.framework import random_seed as _random_seed

# The file of smart_cond, which runs one branch if the condition is known.
from tensorflow.python.framework import smart_cond as _smart_cond

# _ConstantValue: the value of a tensor that is known at trace time, without the conversions around it.
from tensorflow.python.framework import tensor_util as _tensor_util

# The file of summaries, which TensorFlow lets replica 0 alone write.
from tensorflow.python.ops import summary_ops_v2 as _summary_ops

# BaseResourceVariable: the class of components.
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable as _BaseResourceVariable

from replica_engine._tf import eager

VARIABLE = f"{_values.__name__}.DistributedVariable"
COMPONENT = f"{_BaseResourceVariable.__module__}.BaseResourceVariable"
CONSTANTS, SEEDS = _tensor_util.__name__, _random_seed.__name__
VALUES = f"{_values.__name__}.DistributedValues"
DELEGATES = f"{_values.__name__}.DistributedDelegate"
FUNCTION = f"{_polymorphic_function.__name__}.Function"
GRAPHS, LIFTED = _ops.__name__, "_get_outer_context_and_inner_device_stack"

FUNCTIONS = _polymorphic_function.__file__
"""The file of tf.function, which asks in eager mode whether variables have values."""

_ASKING = frozenset((_tensor_util.__file__, _smart_cond.__file__))

SUMMARIES = _summary_ops.__file__
"""The file of summaries: it asks for the value of whether the replica is replica 0."""

TAPES = {
    tf.GradientTape: ("__init__", "_push_tape", "_pop_tape", "watch", "gradient"),
    tf.autodiff.ForwardAccumulator: ("__init__", "_push_accumulator", "_pop_accumulator", "_watch", "jvp"),
}
"""What records ops, and its methods that make and use it."""

_MARK = "_replica_engine_watched"
_NOTED = "_replica_engine_component"
_TWINS = "_replica_engine_twins"
_CONTAINER = "_distributed_container"
_watching = threading.local()
_making = threading.Lock()


class Component(NamedTuple):
    """The component of a distributed variable that a handle belongs to.

    Attributes:
        variable: the distributed variable, as a weak reference.
        replica: the number of the component.
        is_twin: whether the handle is that of a twin.
    """

    variable: Any
    replica: int
    is_twin: bool

    def of(self, replica: int) -> Any:
        """The handle of the component of another replica; None if there is none."""
        variable = self.variable()
        return variable._values[replica]._handle if variable is not None and replica < len(variable._values) else None


class Watcher(NamedTuple):
    """Callbacks that are told what the code on a thread does.

    Attributes:
        gives_twins: whether a distributed variable gives out a twin now.
        handle: takes a variable whose handle is about to be used.
        place: is called when a distributed variable, a tensor of a graph or an op is asked for its device, a
            distributed variable for its handle, or a tensor for its op.
        constant: takes a tensor whose value was asked for at trace time and is not known, or not all of it.
        value: is called when a distributed value that is no variable is asked for the value of this replica.
        lifted: is called when tf.init_scope is entered.
        attribute: takes a component of which an attribute was asked for through its distributed variable, and the name.
        kept: is called when a traced function is asked for as an object.
        seed: takes the seed that the program gives to a random op.
        tape: takes a tape or an accumulator, and True if it is made now, False if it is used.
    """

    gives_twins: Callable[[], bool]
    handle: Callable[[Any], None]
    place: Callable[[], None]
    constant: Callable[[tf.Tensor], None]
    value: Callable[[], None]
    lifted: Callable[[], None]
    attribute: Callable[[Any, str], None]
    kept: Callable[[], None]
    seed: Callable[[Any], None]
    tape: Callable[[Any, bool], None]


def install() -> None:
    """Lets watchers see what the code on their threads does, from now on; only once per process."""
    variable, values = _values.DistributedVariable, _values.DistributedValues
    if hasattr(variable._get, _MARK):
        return
    handle, own_handle = _BaseResourceVariable.handle.fget, variable.handle.fget
    constant, get, export = _tensor_util._ConstantValue, values._get, variable._export_to_saved_model_graph
    attribute, concrete = _values.DistributedDelegate.__getattr__, _Function.get_concrete_function
    outer, get_seed = _ops._get_outer_context_and_inner_device_stack, _random_seed.get_seed

    @functools.wraps(handle)
    def seen_handle(self: Any) -> Any:
        watcher = _watcher()
        if watcher is not None:
            watcher.handle(self)
        return handle(self)

    @functools.wraps(own_handle)
    def seen_own_handle(self: Any) -> Any:
        watcher = _watcher()
        if watcher is None:
            return own_handle(self)
        watcher.place()
        return self._get().handle

    def seen_place(place: property) -> property:
        def seen(self: Any) -> Any:
            watcher = _watcher()
            if watcher is not None:
                watcher.place()
            return place.__get__(self)

        return property(seen)

    @functools.wraps(constant)
    def seen_constant(tensor: Any, partial: bool) -> Any:
        value = constant(tensor, partial)
        watcher = _watcher()
        if watcher is not None and (value is None or (partial and None in getattr(value, "flat", ()))):
            watcher.constant(tensor)
        return value

    @functools.wraps(get)
    def seen_value(self: Any) -> Any:
        watcher = _watcher()
        if watcher is not None and not isinstance(self, variable):
            watcher.value()
        return get(self)

    @functools.wraps(outer)
    def seen_init_scope() -> Any:
        watcher = _watcher()
        if watcher is not None:
            watcher.lifted()
        return outer()

    @functools.wraps(export)
    def exported(self: Any, *args: Any, **kwargs: Any) -> Any:
        resources = export(self, *args, **kwargs)
        tensors = kwargs["tensor_map"] if "tensor_map" in kwargs else args[1]
        for replica, twin in self.__dict__.get(_TWINS, {}).items():  # functions that replicas have traced have these
            tensors[twin._handle] = tensors[self._values[replica]._handle]
            resources.append(twin._handle)
        return resources

    @functools.wraps(get_seed)
    def seen_seed(op_seed: Any) -> Any:
        watcher = _watcher()
        if watcher is not None and op_seed is not None:
            watcher.seed(op_seed)
        return get_seed(op_seed)

    @functools.wraps(attribute)
    def seen_attribute(self: Any, name: str) -> Any:
        value, watcher = attribute(self, name), _watcher()
        if watcher is not None and isinstance(self, variable):
            watcher.attribute(self._get(), name)
        return value

    @functools.wraps(concrete)
    def seen_concrete(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = _watcher()
        if watcher is not None:
            watcher.kept()
        return concrete(self, *args, **kwargs)

    def seen_tape(method: Callable[..., Any], is_made: bool) -> Callable[..., Any]:
        @functools.wraps(method)
        def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
            watcher = _watcher()
            if watcher is not None:
                watcher.tape(self, is_made)
            return method(self, *args, **kwargs)

        return seen

    for kind, names in TAPES.items():
        for name in names:
            setattr(kind, name, seen_tape(getattr(kind, name), name == "__init__"))
    _values.DistributedDelegate.__getattr__ = seen_attribute
    _Function.get_concrete_function = seen_concrete
    variable._export_to_saved_model_graph = exported
    variable._get = _giving_twins(variable._get)
    variable._get_on_device_or_primary = _giving_twins(variable._get_on_device_or_primary)
    variable.handle = property(seen_own_handle)
    for kind in (variable, _ops.SymbolicTensor, _ops.Operation):
        kind.device = seen_place(kind.device)
    _ops.SymbolicTensor.op = seen_place(_ops.SymbolicTensor.op)
    values._get = seen_value
    _BaseResourceVariable.handle = property(seen_handle)
    _tensor_util._ConstantValue, _random_seed.get_seed = seen_constant, seen_seed
    _ops._get_outer_context_and_inner_device_stack = seen_init_scope


def asks_for_caller(code: CodeType) -> bool:
    """Whether code asks for the value of a tensor for its caller: TensorFlow's, or what `note_unknown_values` wraps.

    Other functions of this file are no such code. They lie between a question and those that TensorFlow asks to answer
    it, and the latter are not the user's.
    """
    own = code.co_name == "get_static_value" and code.co_filename == __file__
    return own or code.co_filename in _ASKING


def note_unknown_values(look: Callable[[Any, FrameType], None]) -> None:
    """Looks on where a program calls `tf.get_static_value`, and the value is unknown; only once per process.

    Args:
        look: called with the tensor and with the frame of the caller.
    """
    original = tf.get_static_value
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def get_static_value(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        value = original(tensor, *args, **kwargs)
        if value is None:
            look(tensor, sys._getframe(1))
        return value

    setattr(get_static_value, _MARK, True)
    tf.get_static_value = get_static_value


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Inside the block, the watcher is told of what this thread does."""
    _watching.watcher = watcher
    try:
        yield
    finally:
        del _watching.watcher


def component(handle: Any) -> Component | None:
    """The component that an eager handle belongs to, itself or as the handle of a twin; None for any other handle."""
    if not eager.is_eager(handle):
        return None
    noted = getattr(handle, _NOTED, None)
    if noted is not None:
        return noted
    container = getattr(handle, _CONTAINER, None)  # TensorFlow notes it in variables that have an initial value
    variable = None if container is None else container()
    for replica, each in enumerate(getattr(variable, "_values", ())):
        if getattr(each, "_handle", None) is handle:
            return Component(container, replica, False)
    return None


def twin_of(component: Component, replica: int) -> Any:
    """The handle of the twin of a component of the same variable, for a replica."""
    variable = component.variable()
    return _twin(variable, variable._values[replica])._handle


def is_of_gathering(op: tf.Operation) -> bool:
    """Whether an op belongs to TensorFlow's gradient of an all-gather, which cuts out the part of the replica."""
    return any(frame.name == "grad" and frame.filename == _distribute_lib.__file__ for frame in op.traceback or ())


def handles(variable: Any) -> list[Any]:
    """The handles of the components of a distributed variable; none for other variables."""
    return [each._handle for each in getattr(variable, "_values", ()) if isinstance(each, _BaseResourceVariable)]


def _watcher() -> Watcher | None:
    return getattr(_watching, "watcher", None)


def _giving_twins(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(get)
    def given(self: Any) -> Any:
        found = get(self)
        watcher = _watcher()
        return found if watcher is None or not watcher.gives_twins() else _twin(self, found)

    setattr(given, _MARK, True)
    return given


def _twin(variable: Any, found: Any) -> Any:
    """The twin of a component; any other value is returned as it is.

    The twin has the attributes that the component has now, and lives as long as the variable.
    """
    replica = next((index for index, each in enumerate(variable._values) if each is found), None)
    if replica is None or not isinstance(found, _BaseResourceVariable):
        return found
    with _making:
        twins = variable.__dict__.setdefault(_TWINS, {})
        twin = twins.get(replica)
        if twin is None:
            handle = _second_handle(found._handle)
            for each, is_twin in ((found._handle, False), (handle, True)):
                setattr(each, _NOTED, Component(weakref.ref(variable), replica, is_twin))
            twin = twins[replica] = object.__new__(type(found))
        else:
            handle = twin._handle
        twin.__dict__.update(found.__dict__, _handle=handle)
    return twin


def _second_handle(handle: Any) -> Any:
    with tf.init_scope(), tf.device(handle.device):
        second = tf.raw_ops.Identity(input=handle)
    second._handle_data = handle._handle_data
    if hasattr(handle, _CONTAINER):
        setattr(second, _CONTAINER, getattr(handle, _CONTAINER))
    return second
