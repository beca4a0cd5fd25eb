"""What TensorFlow keeps a copy of for each thread, and a replica thread takes over from its caller.

Each function reads or writes one of TensorFlow's thread-local variables; what is inherited, and why, is
said in `replica_engine.threads.inherited_state`. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
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

# init_scope and get_default_graph return the graph whose stacks are thread-local. _default_graph_stack: which is the
# default, on this thread.
from tensorflow.python.framework import ops as _ops

# _summary_state: the default writer, step and recording condition; only the writer can be set publicly.
from tensorflow.python.ops import summary_ops_v2 as _summary

# variable_scope: tf.compat.v1's, with the scope object itself, re-entered with reuse for replicas after the
# first.
from tensorflow.python.ops import variable_scope as _variable_scope

SUMMARY_FIELDS = ("step", "writer", "is_recording", "is_recording_distribution_strategy")
CACHING_FIELDS = ("new_cache_scope_count", "cache_scope_exited_count")
PRIORITY = 100  # of variable creators that name none
_stand_ins = threading.local()
_summary_fields = operator.attrgetter(*SUMMARY_FIELDS)
_caching_fields = operator.attrgetter(*CACHING_FIELDS)


def ensure_started() -> None:
    """Starts TensorFlow's eager context, so that threads find it ready."""
    if _context.context()._context_handle is None:
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
        before = set_creators(graph, creators)
        try:
            yield
        finally:
            set_creators(graph, before)


def creators_with(creators: list, creator: Any) -> list:
    """A stack of variable creators with one more, as `tf.variable_creator_scope` has it."""
    return sorted([*creators, (PRIORITY, creator)], key=operator.itemgetter(0))


def set_creators(graph: tf.Graph, creators: list) -> list:
    """Gives this thread another stack of variable creators; returns the one it had."""
    before = graph._variable_creator_stack
    graph._variable_creator_stack = creators
    return before


def variable_creators(graph: tf.Graph) -> list:
    """A copy of this thread's stack of variable creators."""
    return graph._variable_creator_stack[:]


def control_inputs(graph: tf.Graph) -> set:
    """The operations that new ones depend on, from all `tf.control_dependencies` around."""
    return graph._current_control_dependencies()


def enter_variable_scope(scope: Any, reuse: bool = False) -> contextlib.AbstractContextManager[Any]:
    """Re-enters a variable scope; with `reuse`, get_variable returns what exists there."""
    return _variable_scope.variable_scope(scope, reuse=reuse)


def variable_scope_store() -> Any:
    """Of the default graph: what has each thread's current variable scope, and counts of the scopes in it."""
    return _variable_scope.get_variable_scope_store()


def device_and_name_scope() -> tuple[Any, Any]:
    """In eager mode: the device of this thread's ops, and the name scope."""
    eager = _context.context()
    return eager.device_name, eager.scope_name


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


def summary_state() -> tuple[Any, Any, Any]:
    """The resource of this thread's default summary writer (None if there is no writer), the step, the condition."""
    state = _summary._summary_state
    return getattr(state.writer, "_resource", None), state.step, state.is_recording


class _CallersWriter:
    """In the place of a summary writer: the one that a later caller has. It is that writer but for the resource."""

    def __init__(self, writer: Any):
        self._writer = writer
        self._resource = callers_writer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@functools.cache
def callers_writer() -> Any:
    """The resource by which ops of a body say that they are for the caller's writer; nobody ever writes to it."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.SummaryWriter(shared_name="replica_engine_caller", container="")


@contextlib.contextmanager
def summaries_of_caller(step: Any) -> Iterator[None]:
    """Inside, the default summary writer stands for that of a later caller, and so does the step, if there is one.

    What both stand for now is found by `actual_summaries`.
    """
    state = _summary._summary_state
    before = _stand_ins.of = state.writer, state.step
    state.writer = _CallersWriter(state.writer)
    if step is not None:
        state.step = step
    try:
        yield
    finally:
        state.writer, state.step = before
        del _stand_ins.of


@contextlib.contextmanager
def actual_summaries() -> Iterator[None]:
    """Inside `summaries_of_caller`: the writer and the step that were there before it, for a while."""
    state = _summary._summary_state
    before = state.writer, state.step
    state.writer, state.step = getattr(_stand_ins, "of", before)
    try:
        yield
    finally:
        state.writer, state.step = before


def locals_of_thread() -> tuple:
    """Op callbacks, summary state, traceback filtering and caching scope of this thread, to be put elsewhere."""
    return (
        _context.context()._thread_local_data.op_callbacks,
        _summary_fields(_summary._summary_state),
        tf.debugging.is_traceback_filtering_enabled(),
        _caching_fields(_caching),
    )


def of_thread() -> tuple:
    """What `is_as` compares: this thread's default graph, mode, device and name scope, and its locals."""
    eager = tf.executing_eagerly()
    return default_graph(), eager, device_and_name_scope() if eager else None, locals_of_thread()


def is_as(before: tuple) -> bool:
    """Whether this thread is in the state that `of_thread` returned."""
    *some, thread_locals = before
    *others, now = of_thread()
    return some == others and _are_same(thread_locals, now)


def enter_locals(values: tuple) -> contextlib.AbstractContextManager[None]:
    """Puts what `locals_of_thread` returned into this thread, for a while."""
    before = locals_of_thread()
    return _NOTHING if _are_same(before, values) else _changed_locals(before, values)


_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def _changed_locals(before: tuple, values: tuple) -> Iterator[None]:
    _set_locals(values)
    try:
        yield
    finally:
        _set_locals(before)


def _are_same(some: tuple, others: tuple) -> bool:
    """By identity: a step may be a variable, and comparing that would read it."""
    callbacks, summary, *rest = some
    other_callbacks, other_summary, *other_rest = others
    same_summary = all(map(operator.is_, summary, other_summary))
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
