"""What a replica thread takes over: the state of the thread that called `run`, and what is known of a function.

TensorFlow keeps much of its state in thread-local copies. A replica thread inherits the following (`InheritedState`);
after each entry, what it controls or what breaks without it:

- default graph and mode (eager or graph), also inside `tf.init_scope`: ops would go to no graph or to a wrong graph;
- variable creators: `strategy.scope()` and the user's own `tf.variable_creator_scope`;
- name scope: entered again, so that names continue the caller's; replicas after the first add `replica_1/`;
- variable scope of tf.compat.v1, with reuse for replicas after the first;
- device policy: how eager ops treat inputs that are on another device;
- op callbacks: debuggers that watch every op;
- summaries: default writer, step, whether to record;
- traceback filtering: whether tracebacks show TensorFlow's own frames;
- what cancels calls: the caller could not end ops that wait; TensorFlow before 2.22 has it for all threads;
- variable caching scope: whether reads of variables are cached;
- Keras' dtype policy, for layers made in a replica;
- lines of generated code: without the caller's map, an op that fails names a line that AutoGraph generated;
- context variables: each replica runs in a copy of the caller's `contextvars` context.

A replica's ops do not inherit control dependencies; a merge call takes them along (`replica_context.py`).

Replica threads are reused. When the replica's body ends, the thread leaves everything that it entered here and forgets
what Keras gathered on it.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import pathlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replica_engine.upstream import thread_state
from replica_engine.upstream.graphs import autograph
from replica_engine.upstream.keras import keras_variables as keras_state

_RECORD = "_replica_engine_threads"  # attribute of a `tf.function`


class FunctionRecord:
    """What is known of a `tf.function` that replicas have run or called.

    The function itself holds it, so traces live exactly as long as the function. It holds strategies weakly. A trace
    that uses a variable of a strategy holds that strategy, as any trace does.

    Attributes:
        lifted: for each strategy, the `tf.function` around a run of this one.
        joint: for each strategy, the function around all replicas that call this one, and weak references to the
            replicas' functions for which it was made.
        swallowed: whether it caught the exception of an attempt, so that it has a trace without its merge calls.
    """

    def __init__(self) -> None:
        self.lifted: weakref.WeakKeyDictionary[tf.distribute.Strategy, Any] = weakref.WeakKeyDictionary()
        self.joint: weakref.WeakKeyDictionary[tf.distribute.Strategy, tuple] = weakref.WeakKeyDictionary()
        self.swallowed = False

    def __reduce__(self) -> tuple:
        return FunctionRecord, ()  # A copy of the function starts without traces.


def find_function_record(fn: Any) -> FunctionRecord:
    """The record of a `tf.function`."""
    return fn.__dict__.setdefault(_RECORD, FunctionRecord())


Creator = Callable[..., tf.Variable]
"""Makes a variable, as `tf.variable_creator_scope` takes it."""


class InheritedState:
    """The state of the thread that called `run`: taken where the object is made, entered on each replica thread.

    Attributes:
        graph: the default graph.
        eager: whether the caller runs eagerly.
        scope_store: the variable scopes of tf.compat.v1.
        context: a copy of the caller's context variables.
    """

    def __init__(self) -> None:
        thread_state.ensure_started()
        self.graph, self.eager = thread_state.default_graph(), tf.executing_eagerly()
        self._init_graph, self._init_eager = self.graph, self.eager
        if not self.eager:  # outside eager mode only: in eager mode `tf.init_scope` changes nothing
            with tf.init_scope():
                self._init_graph, self._init_eager = thread_state.default_graph(), tf.executing_eagerly()
        self._creators = thread_state.variable_creators(self.graph)
        self._name_scope = tf.get_current_name_scope()
        self.scope_store = thread_state.variable_scope_store()
        self._variable_scope = self.scope_store.current_scope
        self._device_policy = thread_state.device_policy()
        self._thread_locals = thread_state.locals_of_thread()
        self._keras_settings = keras_state.settings()
        self._lines = {} if self.eager else autograph.source_map()
        self.context = contextvars.copy_context()

    @contextlib.contextmanager
    def entered(
        self, replica: int, context: tf.distribute.ReplicaContext, device: str, creator: Creator
    ) -> Iterator[None]:
        """Enters the state on a replica's thread, with the replica's own context, device and variable creator."""
        creators = thread_state.creators_with(self._creators, creator)
        with (
            thread_state.enter_locals(self._thread_locals),
            contextlib.nullcontext() if self.eager else autograph.lines_of_ops(self._lines, _files()),
            keras_state.entered(self._keras_settings),
            thread_state.graph_and_mode(self._init_graph, self._init_eager),
            thread_state.graph_and_mode(self.graph, self.eager),
            thread_state.enter_creators(self.graph, creators),
            thread_state.enter_device_policy(self._device_policy),
            context,
            tf.device(device),
            tf.name_scope(_name_scope(self._name_scope, replica)),
            thread_state.enter_variable_scope(self._variable_scope, reuse=replica > 0),
        ):
            inside = thread_state.read_update_state()
            try:
                yield
            finally:  # a body may have entered what it did not leave
                thread_state.restore_update_state(inside)


@functools.cache
def _files() -> frozenset[str]:
    """The files between the start of a replica's thread and the user's function, and around ops that replicas make."""
    package = pathlib.Path(__file__).parents[1]
    folders = ("engine", "threads", "upstream")
    return frozenset([threading.__file__, *(str(file) for name in folders for file in (package / name).rglob("*.py"))])


def _name_scope(callers: str, replica: int) -> str:
    # A trailing "/" makes TensorFlow re-enter the scope; without it TensorFlow would open a new scope of a similar
    # name.
    scope = callers + "/" if callers else ""
    return scope + f"replica_{replica}/" if replica > 0 else scope
