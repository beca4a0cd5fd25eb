"""What TensorFlow keeps a copy of for each thread, and a replica thread takes over from its caller.

Each function reads or writes one of TensorFlow's thread-local variables; what is inherited, and why, is
said in `replica_engine.replica.inherited`. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# TFE_Context{Get,SetThreadLocal}DevicePlacementPolicy: `context.device_policy(...)` compares with a
# process-wide variable before it sets the thread's policy, and so never sets it in a second thread.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# caching_scope_local: whether reads of variables are cached (parameter servers).
from tensorflow.python.distribute.distribute_utils import caching_scope_local as _caching

# context, eager_mode, ensure_initialized: whether TensorFlow has started, and eager mode inside a graph; the
# thread's op callbacks are on the context.
from tensorflow.python.eager import context as _context

# init_scope and get_default_graph return the graph whose stacks are thread-local.
from tensorflow.python.framework import ops as _ops

# _summary_state: the default writer, step and recording condition; only the writer can be set publicly.
from tensorflow.python.ops import summary_ops_v2 as _summary

# variable_scope: tf.compat.v1's, with the scope object itself, re-entered with reuse for replicas after the
# first.
from tensorflow.python.ops import variable_scope as _variable_scope

SUMMARY_FIELDS = ("step", "writer", "is_recording", "is_recording_distribution_strategy")
CACHING_FIELDS = ("new_cache_scope_count", "cache_scope_exited_count")
_summary_fields = operator.attrgetter(*SUMMARY_FIELDS)
_caching_fields = operator.attrgetter(*CACHING_FIELDS)


def ensure_started() -> None:
    """Starts TensorFlow's eager context, so that threads find it ready."""
    _context.ensure_initialized()


def started() -> bool:
    """Whether TensorFlow has made its devices and thread pools."""
    return _context.context()._context_handle is not None


def default_graph() -> tf.Graph:
    """The graph, or function graph, that is the default of this thread."""
    return _ops.get_default_graph()


def make_stacks_thread_local(graph: tf.Graph) -> None:
    """Gives each thread its own device, colocation and control dependency stacks of `graph`."""
    graph.switch_to_thread_local()


def eager_mode(eager: bool) -> contextlib.AbstractContextManager[Any]:
    """Eager mode, or nothing."""
    return _context.eager_mode() if eager else contextlib.nullcontext()


@contextlib.contextmanager
def graph_and_mode(graph: tf.Graph, eager: bool, creators: list | None = None) -> Iterator[None]:
    """Enters `graph` as the default, in eager mode if `eager`, with its stack of variable creators."""
    with graph.as_default(), eager_mode(eager):
        if creators is None:
            yield
            return
        before = graph._variable_creator_stack
        graph._variable_creator_stack = creators
        try:
            yield
        finally:
            graph._variable_creator_stack = before


def variable_creators(graph: tf.Graph) -> list:
    """A copy of this thread's stack of variable creators."""
    return graph._variable_creator_stack[:]


def control_inputs(graph: tf.Graph) -> set:
    """The operations that new ones depend on, from all `tf.control_dependencies` around."""
    return graph._current_control_dependencies()


def current_variable_scope() -> Any:
    """tf.compat.v1's current variable scope."""
    return _variable_scope.get_variable_scope()


def enter_variable_scope(scope: Any, reuse: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Re-enters a variable scope; with `reuse`, get_variable returns what exists there."""
    return _variable_scope.variable_scope(scope, reuse=reuse)


def device_policy() -> int:
    """How this thread's eager ops treat inputs on another device."""
    return _pywrap_tfe.TFE_ContextGetDevicePlacementPolicy(_context.context()._handle)


@contextlib.contextmanager
def enter_device_policy(policy: int) -> Iterator[None]:
    """Sets this thread's device policy, for a while."""
    handle = _context.context()._handle
    before = _pywrap_tfe.TFE_ContextGetDevicePlacementPolicy(handle)
    if policy == before:
        yield
        return
    _pywrap_tfe.TFE_ContextSetThreadLocalDevicePlacementPolicy(handle, policy)
    try:
        yield
    finally:
        _pywrap_tfe.TFE_ContextSetThreadLocalDevicePlacementPolicy(handle, before)


def locals_of_thread() -> tuple:
    """Op callbacks, summary state, traceback filtering and caching scope of this thread, to be put elsewhere."""
    return (
        _context.context()._thread_local_data.op_callbacks,
        _summary_fields(_summary._summary_state),
        tf.debugging.is_traceback_filtering_enabled(),
        _caching_fields(_caching),
    )


@contextlib.contextmanager
def enter_locals(values: tuple) -> Iterator[None]:
    """Puts what `locals_of_thread` returned into this thread, for a while."""
    before = locals_of_thread()
    if _are_same(before, values):
        yield
        return
    _set_locals(values)
    try:
        yield
    finally:
        _set_locals(before)


def _are_same(some: tuple, others: tuple) -> bool:
    """By identity: a step may be a variable, and comparing that would read it."""
    callbacks, summary, *rest = some
    other_callbacks, other_summary, *other_rest = others
    same_summary = all(one is other for one, other in zip(summary, other_summary, strict=True))
    return same_summary and callbacks == other_callbacks and rest == other_rest


def _set_locals(values: tuple) -> None:
    callbacks, summary, filtering, caching = values
    _context.context()._thread_local_data.op_callbacks = callbacks
    for name, value in zip(SUMMARY_FIELDS, summary, strict=True):
        setattr(_summary._summary_state, name, value)
    if filtering:
        tf.debugging.enable_traceback_filtering()
    else:
        tf.debugging.disable_traceback_filtering()
    for name, value in zip(CACHING_FIELDS, caching, strict=True):
        setattr(_caching, name, value)
