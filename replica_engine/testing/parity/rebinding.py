"""Gives a step the variables of each strategy.

A custom step finds its variables through its closure, its globals, or attributes of objects in them. Under a strategy
these must be variables of that strategy. So during a run, each place that holds a plain variable holds a copy instead,
which is made in the strategy's scope with the same value. After the run the place holds the plain variable again.
Nothing that the step does changes the originals.

The search for places follows Python: the cells of the closure, the globals that the code names, defaults, the object
of a bound method, and the contents of `functools.partial`. From there it follows lists, dictionaries, attributes of
modules, Keras objects and objects of the user's classes, and the user's helper functions. A `tf.function` among them is
replaced by its Python function, because its traces are bound to the original variables.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.variables import take_identity
from replica_engine.testing.parity.state import Attributes

_LIBRARIES = {"tensorflow", "keras", "numpy", "jax", "jaxlib", "replica_engine", "absl", *sys.stdlib_module_names}
_LIBRARIES -= {"__main__"}
_OF_KERAS = (keras.Layer, keras.optimizers.Optimizer, keras.metrics.Metric, keras.losses.Loss)

Put = Callable[[Any], None]


class Rebinding:
    """The places from which a step can reach variables.

    Args:
        step: the step.
        variables: more objects from which to start the search.
    """

    def __init__(self, step: Callable[..., Any], variables: Any):
        self._places: list[tuple[Put, Any]] = []  # those that hold plain TensorFlow variables or tf.functions
        self._variables: dict[int, tf.Variable] = {}
        self._keras: dict[int, keras.Variable] = {}
        self._objects: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}
        self._look(python_function(step), None)
        self._reached = {*self._variables, *self._keras}
        self._look(variables, None)

    def reaches(self, variable: Any) -> bool:
        """Whether the step itself reaches a variable."""
        return id(variable) in self._reached

    @contextlib.contextmanager
    def entered(self, strategy: tf.distribute.Strategy) -> Iterator[Callable[[Any], Any]]:
        """Inside the block, all places hold variables of a strategy; yields a function from an original to its copy."""
        objects = list(self._objects.values())
        attributes = Attributes(objects)
        copies = {key: _copy(variable, strategy) for key, variable in self._variables.items()}
        originals = {key: keras_model.underlying(variable) for key, variable in self._keras.items()}
        copies |= {id(original): _copy(original, strategy) for original in originals.values()}
        optimizers = [each for each in objects if isinstance(each, keras.optimizers.Optimizer)]
        before = [keras_model.strategy_of_optimizer(each) for each in optimizers]

        def copy_of(variable: Any) -> Any:
            if isinstance(variable, keras.Variable):
                return copies.get(id(originals.get(id(variable))), variable)
            return copies.get(id(variable), variable)

        with contextlib.ExitStack() as stack:
            for put, value in self._places:
                stack.callback(put, value)
                put(python_function(value) if _is_function_of_tensorflow(value) else copy_of(value))
            for key, variable in self._keras.items():
                stack.callback(keras_model.put_underneath, variable, originals[key])
                keras_model.put_underneath(variable, copy_of(variable))
            for optimizer, own in zip(optimizers, before, strict=True):
                stack.callback(keras_model.set_strategy_of_optimizer, optimizer, own)
                keras_model.set_strategy_of_optimizer(optimizer, strategy)
            stack.callback(attributes.restore)
            yield copy_of

    def _look(self, value: Any, put: Put | None) -> None:
        """Notes the value of a place and continues the search from it; `put` replaces the value of the place."""
        if isinstance(value, keras.Variable):
            if keras_model.underlying(value) is not None:
                self._keras.setdefault(id(value), value)
            return
        if isinstance(value, tf.Variable) or _is_function_of_tensorflow(value):
            if put is not None:
                self._places.append((put, value))
            if isinstance(value, tf.Variable):
                self._variables.setdefault(id(value), value)
                return
            value = python_function(value)
        if id(value) in self._seen or isinstance(value, (type, types.ModuleType, str, bytes, int, float, tf.Tensor)):
            return
        if not isinstance(value, tuple):  # a tuple in two places means two places for each part
            self._seen[id(value)] = value
        for inner, put_inner in _inside(value, put):
            self._look(inner, put_inner)
        if isinstance(value, _OF_KERAS):
            self._note_keras(value)

    def _note_keras(self, value: Any) -> None:
        parts = keras_model.layers_of(value) if isinstance(value, keras.Layer) else [value]
        for part in parts:
            self._objects.setdefault(id(part), part)
            for variable in getattr(part, "variables", ()):
                self._look(variable, None)


def _inside(value: Any, put: Put | None) -> Iterator[tuple[Any, Put | None]]:
    """The parts of an object, each with a function that replaces the part."""
    value = keras_model.plain_container(value)
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            yield inner, functools.partial(_set_item, value, key)
    elif isinstance(value, list):
        for index, inner in enumerate(list(value)):
            yield inner, functools.partial(_set_item, value, index)
    elif isinstance(value, tuple):
        parts = None if put is None else _Tuple(value, put)
        for index, inner in enumerate(value):
            yield inner, None if parts is None else functools.partial(parts.place, index)
    elif isinstance(value, functools.partial):
        yield value.func, None
        yield value.keywords, None
        for inner in value.args:
            yield inner, None
    elif isinstance(value, types.MethodType):
        yield value.__func__, None
        yield value.__self__, None
    elif isinstance(value, types.FunctionType):
        if _is_users(value.__module__):
            yield from _of_function(value)
    elif _has_places(value):
        for name, inner in list(vars(value).items()):
            yield inner, functools.partial(_set_attribute, value, name)
        if _is_users(type(value).__module__) and callable(value):
            yield type(value).__call__, None


def _of_function(function: types.FunctionType) -> Iterator[tuple[Any, Put | None]]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name], functools.partial(_set_item, function.__globals__, name)
    for defaults in (function.__defaults__, function.__kwdefaults__):
        for inner in (defaults.values() if isinstance(defaults, dict) else defaults) or ():
            if not isinstance(inner, (tf.Variable, keras.Variable)):
                yield inner, None
    if function.__defaults__:
        yield function.__defaults__, functools.partial(setattr, function, "__defaults__")
    if function.__kwdefaults__:
        yield function.__kwdefaults__, None


class _Tuple:
    """Replaces a part of a tuple, by putting a new tuple where the old one was."""

    def __init__(self, value: tuple, put: Put):
        self._original, self._now, self._put = value, list(value), put

    def place(self, index: int, inner: Any) -> None:
        self._now[index] = inner
        kind = type(self._original)
        if all(one is other for one, other in zip(self._now, self._original, strict=True)):
            self._put(self._original)
        else:
            self._put(kind(*self._now) if hasattr(kind, "_fields") else tuple(self._now))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def python_function(value: Any) -> Any:
    """The Python function of a `tf.function`; any other value itself."""
    while _is_function_of_tensorflow(value):
        value = value.python_function
    return value


def _is_function_of_tensorflow(value: Any) -> bool:
    return hasattr(type(value), "get_concrete_function") and hasattr(value, "python_function")


def _has_places(value: Any) -> bool:
    if not hasattr(value, "__dict__") or isinstance(value, distribute.DistributedVariable):
        return False
    return isinstance(value, (tf.Module, *_OF_KERAS)) or _is_users(type(value).__module__)


def _is_users(module: Any) -> bool:
    return isinstance(module, str) and module.split(".")[0] not in _LIBRARIES


def _set_item(container: Any, key: Any, value: Any) -> None:
    (dict if isinstance(container, dict) else list).__setitem__(container, key, value)


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    vars(owner)[name] = value


def _copy(variable: Any, strategy: tf.distribute.Strategy) -> Any:
    aggregation, synchronization = variable.aggregation, variable.synchronization
    if aggregation == tf.VariableAggregation.NONE and synchronization != tf.VariableSynchronization.ON_READ:
        # Replicas cannot assign a variable without aggregation. With this aggregation, the value of replica 0 stays. If
        # replicas assign different values, the result differs from one device.
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    value = variable.read_value()  # outside of the scope: the variable may be of another strategy
    with strategy.scope():
        copy = tf.Variable(
            value,
            trainable=variable.trainable,
            name=variable.name.split(":")[0],
            dtype=variable.dtype,
            synchronization=synchronization,
            aggregation=aggregation,
        )
    # A built optimizer finds the index of a variable by its id.
    first = copy.values[0] if isinstance(copy, distribute.DistributedVariable) else copy
    take_identity(first, variable)
    return copy


def listed(variables: Any, prefix: str = "") -> Iterable[tuple[str, Any]]:
    """The names and variables in a structure of variables, modules, and Keras layers, optimizers and metrics."""
    if isinstance(variables, (tf.Variable, keras.Variable)):
        path = variables.path if isinstance(variables, keras.Variable) else variables.name.split(":")[0]
        yield prefix or path, variables
    elif isinstance(variables, dict):
        for key, inner in variables.items():
            yield from listed(inner, f"{prefix}/{key}" if prefix else str(key))
    elif isinstance(variables, (list, tuple)):
        for inner in variables:
            yield from ((f"{prefix}/{name}" if prefix else name, variable) for name, variable in listed(inner))
    elif hasattr(variables, "variables"):
        for inner in variables.variables:
            yield from ((f"{prefix}/{name}" if prefix else name, variable) for name, variable in listed(inner))
