"""Scopes of TensorFlow that are entered in less time than TensorFlow takes.

An eager run enters a strategy's scope and, on each replica's thread, a graph, a device, a name scope and a variable
scope. TensorFlow's own context managers for these cost more than the run itself. The context managers here do the same
if no unusual state is set; otherwise they use TensorFlow's own.

The environment variable REPLICA_ENGINE_QUICK_SCOPES=0 switches to TensorFlow's own context managers everywhere, to find
out whether a fault is in this module. The contract suite passes both ways.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import tensorflow as tf

# TFE_ContextSetThreadLocalDevicePlacementPolicy: see `thread_state`.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# _get_per_thread_mode, _get_default_replica_mode: the strategy's scope that is entered. StrategyBase,
# StrategyExtendedV2: the classes whose scopes are known here. _CrossReplicaThreadMode: the mode that a scope enters.
from tensorflow.python.distribute import distribute_lib as _distribute_lib

# context: has the handle of the eager context. executing_eagerly: tf.executing_eagerly.
from tensorflow.python.eager import context as _context

# get_default_graph: the graph with the thread's variable creators and modes. _default_graph_stack: this thread's stack
# of default graphs.
from tensorflow.python.framework import ops as _ops

# VariableScope: copied here without a check of its arguments.
from tensorflow.python.ops import variable_scope as _variable_scope

from replica_engine._tf.thread_state import (
    PRIORITY,
    creators_with,
    enter_variable_scope,
    set_creators,
    variable_creators,
    variable_scope_store,
)

F = TypeVar("F", bound=Callable)

ENABLED = os.environ.get("REPLICA_ENGINE_QUICK_SCOPES", "1") != "0"


def in_scope(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[Any]:
    """Enters `strategy.scope()`; skips it if the scope is entered already, and takes a faster one in eager mode."""
    if not ENABLED:
        return strategy.scope()
    mode = _distribute_lib._get_per_thread_mode()
    if mode.cross_replica_context is strategy:
        return contextlib.nullcontext()
    extended = strategy.extended
    is_usual = (
        mode is _distribute_lib._get_default_replica_mode()
        and _has_usual_scope(type(strategy))  # type: ignore[arg-type]
        and type(extended)._scope is _distribute_lib.StrategyExtendedV2._scope
        and extended._resource_creator_scope() is None
        and extended._default_device_scope() is None
        and "_lazy_variable_tracker" not in vars(extended)
    )
    if is_usual and _context.executing_eagerly() and not _ops.get_default_graph().building_function:
        store = variable_scope_store()
        if not store.current_scope.name and store.current_scope.custom_getter is None:
            return EagerScope(strategy, store)
    return strategy.scope()


def checks_only(scope: F) -> F:
    """Marks a strategy's method `scope` that adds checks of the user's call to TensorFlow's: a run need not call it."""
    scope._replica_engine_checks_only = True  # type: ignore[attr-defined]
    return scope


@functools.lru_cache(maxsize=64)
def _has_usual_scope(cls: Hashable) -> bool:
    """Whether the method `scope` of a strategy's class is TensorFlow's, perhaps with checks."""
    assert isinstance(cls, type)
    for base in cls.__mro__:
        scope = vars(base).get("scope")
        if scope is not None and not hasattr(scope, "_replica_engine_checks_only"):
            return scope is _distribute_lib.StrategyBase.scope
    return False


def _without_partitioner(getter: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A getter for `tf.compat.v1.get_variable` that drops the partitioner, because distributed variables are whole."""
    return getter(*args, **kwargs | {"partitioner": None})


class EagerScope:
    """The equivalent of `strategy.scope()` in eager mode; it makes the variable creator only when a variable is made.

    Every run enters a scope, and most runs make no variable. `__exit__` may be called twice: an exception of another
    thread (`PyThreadState_SetAsyncExc`) may come before its first line, or in it.
    """

    __slots__ = ("_before", "_depth", "_graph", "_strategy", "_variable_scope", "is_entered")

    def __init__(self, strategy: tf.distribute.Strategy, store: Any):
        self._strategy = strategy
        self._variable_scope = nameless_scope(store, store.current_scope, _without_partitioner)
        self.is_entered = False

    def __enter__(self) -> None:
        self._graph = graph = _ops.get_default_graph()
        mode = _distribute_lib._CrossReplicaThreadMode(self._strategy)
        self._depth = len(graph._distribution_strategy_stack)
        self._variable_scope.__enter__()
        self._before = set_creators(graph, creators_with(variable_creators(graph), self._create))
        graph._distribution_strategy_stack.append(mode)
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        del self._graph._distribution_strategy_stack[self._depth :]
        set_creators(self._graph, self._before)
        self._variable_scope.__exit__()

    def _create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """The variable creator, for any thread: makes the creator of the strategy's scope now, and calls it."""
        strategy = self._strategy
        graph = _ops.get_default_graph()
        with strategy.extended._scope(strategy)._var_creator_scope:
            _, creator = next(each for each in reversed(variable_creators(graph)) if each[0] == PRIORITY)
        return creator(next_creator, **kwargs)


class nameless_scope:
    """Equivalent to `enter_variable_scope` in eager mode if neither scope has a name, in a fifth of the time.

    Args:
        store: the variable scope store of the default graph.
        scope: the scope; a copy of it is entered, so that changes affect only this thread.
        getter: a function to put around `get_variable`, or None.
    """

    __slots__ = ("_before", "_getter", "_scope", "_store")

    def __init__(self, store: Any, scope: Any, getter: Any = None):
        self._store, self._scope, self._getter = store, scope, getter

    def __enter__(self) -> None:
        store = self._store
        own = _variable_scope.VariableScope.__new__(_variable_scope.VariableScope)
        own.__dict__.update(self._scope.__dict__)
        if self._getter is not None:
            own.set_custom_getter(self._getter)
        self._before = store.current_scope, store.variable_scopes_count
        store.current_scope, store.variable_scopes_count = own, dict(store.variable_scopes_count)

    def __exit__(self, *_: object) -> None:
        self._store.current_scope, self._store.variable_scopes_count = self._before


class default_on_thread:
    """`graph.as_default()` for a thread that is in eager mode and stays in it."""

    __slots__ = ("_graph",)

    def __init__(self, graph: tf.Graph):
        self._graph = graph

    def __enter__(self) -> None:
        _ops._default_graph_stack.stack.append(self._graph)

    def __exit__(self, *_: object) -> None:
        stack = _ops._default_graph_stack.stack
        while stack and stack.pop() is not self._graph:
            pass  # a body entered that graph and did not leave it


def stay_eager(policy: int, device: str, name_scope: str) -> None:
    """Sets the device policy, device and name scope of this library's thread, which is in eager mode.

    A context manager that stays entered would not work: garbage collection would leave it, on any thread.
    """
    _pywrap_tfe.TFE_ContextSetThreadLocalDevicePlacementPolicy(_context.context()._handle, policy)
    tf.device(device).__enter__()
    tf.name_scope(name_scope).__enter__()


def leave_eager() -> None:
    """Takes the device of `stay_eager` from the thread. The policy and the name scope are set in each run."""
    tf.device(None).__enter__()


def variable_scope(store: Any, scope: Any) -> contextlib.AbstractContextManager[Any]:
    """Enters a variable scope again in eager mode; neither this scope nor the current one may have a name."""
    return nameless_scope(store, scope) if ENABLED else enter_variable_scope(scope)
