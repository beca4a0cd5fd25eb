"""The state that TensorFlow keeps separately for each thread, and that a replica thread takes over from its caller.

Each function reads or writes one of TensorFlow's thread-local variables. `replica_engine.threads.inherited_state` says
what is inherited, and why. Checked on TensorFlow 2.19 to 2.22.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

# TFE_Context{Get,SetThreadLocal}DevicePlacementPolicy: used because `context.device_policy(...)` compares with a
# process-wide variable before it sets the thread's policy, and so never sets the policy in a second thread.
from tensorflow.python import pywrap_tfe as _pywrap_tfe

# get_update_replica_id, _update_replica_id: the component that an update on this thread writes.
from tensorflow.python.distribute import distribute_lib as _distribute

# caching_scope_local: whether reads of variables are cached (used with parameter servers).
from tensorflow.python.distribute.distribute_utils import caching_scope_local as _caching

# _active_context: what can end this thread's calls, as a stack; in TensorFlow before 2.22, one thing for all threads.
from tensorflow.python.eager import cancellation as _cancellation

# context, context_safe, eager_mode, ensure_initialized: whether TensorFlow has started, and eager mode inside a graph.
# The context also has the thread's op callbacks.
from tensorflow.python.eager import context as _context

# _summary_state: the default writer, step and recording condition. Only the writer can be set publicly.
from tensorflow.python.ops import summary_ops_v2 as _summary

# get_variable_scope_store: the current variable scope of tf.compat.v1 in each thread.
from tensorflow.python.ops import variable_scope as _variable_scope

from replica_engine.process import interrupts
from replica_engine.upstream.hook import StandIn

SUMMARY_FIELDS = ("step", "writer", "is_recording", "is_recording_distribution_strategy")
_CANCELS_BY_THREAD = isinstance(_cancellation._active_context, threading.local)
CACHING_FIELDS = ("new_cache_scope_count", "cache_scope_exited_count")
_PRIORITY = 100  # the default priority of variable creators
_NOTHING = contextlib.nullcontext()
_stand_ins = threading.local()
_summary_fields = operator.attrgetter(*SUMMARY_FIELDS)
_caching_fields = operator.attrgetter(*CACHING_FIELDS)


def ensure_started() -> None:
    """Starts TensorFlow's eager context, so that new threads find it ready."""
    if _context.context()._context_handle is None:
        _context.ensure_initialized()


def started() -> bool:
    """Whether TensorFlow has made its devices and thread pools."""
    context = _context.context_safe()
    return context is not None and context._context_handle is not None


default_graph = tf.compat.v1.get_default_graph
"""The default graph of this thread, which may be a function graph."""


def make_stacks_thread_local(graph: tf.Graph) -> None:
    """Gives each thread separate device, colocation and control dependency stacks of `graph`."""
    graph.switch_to_thread_local()


def eager_mode(eager: bool) -> contextlib.AbstractContextManager[object]:
    """Enters eager mode if `eager`; otherwise does nothing."""
    return _context.eager_mode() if eager else contextlib.nullcontext()


@contextlib.contextmanager
def in_graph_of_others(graph: tf.Graph) -> Iterator[None]:
    """Inside the block, this thread is in a function graph of another thread, which may leave first after a failure."""
    with graph.as_default():
        try:
            yield
        finally:
            if graph._scope_exit_callbacks is None:  # set by the other thread; TensorFlow calls each of them now
                graph._scope_exit_callbacks = []


def graph_and_mode(graph: tf.Graph, eager: bool) -> contextlib.AbstractContextManager[object]:
    """Enters `graph` as the default, in eager mode if `eager`. A thread that is there enters nothing: it takes long."""
    is_there = default_graph() is graph and tf.executing_eagerly() == eager
    return _NOTHING if is_there else _other_graph_and_mode(graph, eager)


@contextlib.contextmanager
def _other_graph_and_mode(graph: tf.Graph, eager: bool) -> Iterator[None]:
    with graph.as_default(), eager_mode(eager):
        yield


def enter_creators(graph: tf.Graph, creators: list) -> contextlib.AbstractContextManager[list]:
    """Sets this thread's stack of variable creators inside the block."""
    return interrupts.set_for_block(graph, "_variable_creator_stack", creators)


def creators_with(creators: list, creator: Callable[..., tf.Variable]) -> list:
    """A stack of variable creators with one more, in the order that `tf.variable_creator_scope` makes."""
    return sorted([*creators, (_PRIORITY, creator)], key=operator.itemgetter(0))


def set_creators(graph: tf.Graph, creators: list) -> None:
    """Sets this thread's stack of variable creators."""
    graph._variable_creator_stack = creators


def variable_creators(graph: tf.Graph) -> list:
    """A copy of this thread's stack of variable creators."""
    return graph._variable_creator_stack[:]


def control_inputs(graph: tf.Graph) -> set:
    """The operations that new ops depend on, from all enclosing `tf.control_dependencies`."""
    return graph._current_control_dependencies()


enter_variable_scope = tf.compat.v1.variable_scope
"""Enters a variable scope again; with `reuse=True`, get_variable returns the variables that exist there."""


def variable_scope_store() -> Any:
    """The default graph's store of each thread's current variable scope, and of the counts of scopes in it."""
    return _variable_scope.get_variable_scope_store()


def device_policy() -> int:
    """How this thread's eager ops treat inputs that are on another device."""
    return _pywrap_tfe.TFE_ContextGetDevicePlacementPolicy(_context.context()._handle)


@contextlib.contextmanager
def enter_device_policy(policy: int) -> Iterator[None]:
    """Sets this thread's device policy inside the block."""
    handle = _context.context()._handle
    before = _pywrap_tfe.TFE_ContextGetDevicePlacementPolicy(handle)
    _pywrap_tfe.TFE_ContextSetThreadLocalDevicePlacementPolicy(handle, policy)
    try:
        yield
    finally:
        _pywrap_tfe.TFE_ContextSetThreadLocalDevicePlacementPolicy(handle, before)


def summary_state() -> tuple[tf.Tensor | None, object, object]:
    """The resource of this thread's default summary writer (None without one), the step, the recording condition."""
    state = _summary._summary_state
    return getattr(state.writer, "_resource", None), state.step, state.is_recording


class _CallersWriter(StandIn):
    """A stand-in for the summary writer of a later caller; like `writer`, except for the resource."""

    def __init__(self, writer: tf.summary.SummaryWriter | None):
        super().__init__(writer)
        self._resource = callers_writer()


@functools.cache
def callers_writer() -> tf.Tensor:
    """The resource that marks the ops of a body as meant for the caller's writer; nothing is ever written to it."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.raw_ops.SummaryWriter(shared_name="replica_engine_caller", container="")


@contextlib.contextmanager
def summaries_of_caller(step: object) -> Iterator[None]:
    """Inside the block, the default summary writer represents the writer of a later caller; so does the step, if given.

    `actual_summaries` gives access to the writer and the step that they replace now.
    """
    state = _summary._summary_state
    stands_in = _writer_and_step(_CallersWriter(state.writer), state.step if step is None else step)
    with interrupts.set_for_block(_stand_ins, "of", (state.writer, state.step)), stands_in:
        yield


def actual_summaries() -> contextlib.AbstractContextManager[None]:
    """Restores, inside `summaries_of_caller`, the writer and the step from before it, for the duration of the block."""
    state = _summary._summary_state
    return _writer_and_step(*getattr(_stand_ins, "of", None) or (state.writer, state.step))


@contextlib.contextmanager
def _writer_and_step(writer: object, step: object) -> Iterator[None]:
    state = _summary._summary_state
    with interrupts.set_for_block(state, "writer", writer), interrupts.set_for_block(state, "step", step):
        yield


def locals_of_thread() -> tuple:
    """This thread's state that is to be set on another thread.

    That is op callbacks, summary state, traceback filtering, the caching scope, and what cancels calls.
    """
    return (
        (*_context.context()._thread_local_data.op_callbacks,),
        _summary_fields(_summary._summary_state),
        tf.debugging.is_traceback_filtering_enabled(),
        _caching_fields(_caching),
        (*getattr(_cancellation._active_context, "manager_stack", ()),),
    )


def read_thread_state() -> tuple:
    """This thread's default graph, mode, device, name scope and locals, in the form that `is_as` compares."""
    eager, context = tf.executing_eagerly(), _context.context()
    device_and_scope = (context.device_name, context.scope_name) if eager else None
    return default_graph(), eager, device_and_scope, locals_of_thread()


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Inside the block, no callback of `tf.debugging` sees the ops that are made or run: they are not the user's.

    TensorFlow's flag that a callback runs would do for the ops of graphs, but not for eager ones.
    """
    own = _context.context()._thread_local_data
    before, own.op_callbacks = own.op_callbacks, []
    try:
        yield
    finally:
        own.op_callbacks = before


def read_update_state() -> tuple[object, ...]:
    """This thread's eager device, name scope, and the component that an update writes; for `restore_update_state`."""
    context = _context.context()
    return context.device_name, context.device_spec, context.scope_name, _distribute.get_update_replica_id()


def restore_update_state(state: tuple[object, ...]) -> None:
    """Leaves the devices, name scopes and updates that were entered since, if an exception kept TensorFlow from it."""
    context = _context.context()
    name, spec, context.scope_name, _distribute._update_replica_id.current = state
    context._set_device(name, spec)


def is_as(before: tuple) -> bool:
    """Whether this thread is in the state that `read_thread_state` returned."""
    *some, thread_locals = before
    *others, now = read_thread_state()
    return some == others and _are_same(thread_locals, now)


def enter_locals(values: tuple) -> contextlib.AbstractContextManager[None]:
    """Sets the return value of `locals_of_thread` on this thread inside the block."""
    before = locals_of_thread()
    return _NOTHING if _are_same(before, values) else _changed_locals(before, values)


@contextlib.contextmanager
def _changed_locals(before: tuple, values: tuple) -> Iterator[None]:
    _set_locals(values)
    try:
        yield
    finally:
        _set_locals(before)


def _are_same(some: tuple, others: tuple) -> bool:
    """Compares by identity: a step may be a variable, and comparing its value would read it."""
    callbacks, summary, *rest = some
    other_callbacks, other_summary, *other_rest = others
    same_summary = all(map(operator.is_, summary, other_summary))
    return same_summary and callbacks == other_callbacks and rest == other_rest


def _set_locals(values: tuple) -> None:
    callbacks, summary, filtering, caching, managers = values
    # Each thread has a list of its own: what traces a function adds and removes callbacks in place.
    _context.context()._thread_local_data.op_callbacks = [*callbacks]
    for name, value in zip(SUMMARY_FIELDS, summary, strict=True):
        setattr(_summary._summary_state, name, value)
    if filtering:
        tf.debugging.enable_traceback_filtering()
    else:
        tf.debugging.disable_traceback_filtering()
    for name, value in zip(CACHING_FIELDS, caching, strict=True):
        setattr(_caching, name, value)
    if _CANCELS_BY_THREAD:
        _cancellation._active_context.manager_stack = [*managers]
