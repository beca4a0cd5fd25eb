"""What a replica thread takes over from the thread that called `run`.

TensorFlow keeps much of its state a copy for each thread. What of it is inherited, and what breaks without:

- default graph, and eager or graph mode, `tf.init_scope`'s too: ops would be added nowhere or elsewhere;
- variable creators: `strategy.scope()` and the user's own `tf.variable_creator_scope`;
- name scope: re-entered, so that names continue the caller's; replicas after the first add `replica_1/`;
- variable scope: tf.compat.v1's; with reuse for replicas after the first;
- device policy: how eager ops treat inputs that lie on another device;
- op callbacks: debuggers that watch every op;
- summaries: default writer, step, whether to record;
- traceback filtering: whether tracebacks show TensorFlow's own frames;
- variable caching scope: whether reads of variables are cached;
- Keras' dtype policy, for layers made in a replica;
- context variables: each replica runs in a copy of the caller's `contextvars` context.

Control dependencies are not inherited by a replica's ops, but travel with a merge call (`context.py`).

Replica threads are reused, so whatever is entered here is left again when the replica's body ends, and what
Keras has gathered on the thread is forgotten. With one exception: in eager mode most of the state is the same in one
run after the other, and entering it takes longer than a small body does. So what refers to no strategy, tensor or
function of the user's stays entered (`_Stay`), and the next run that has the same goes on from there.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import keras_state, quick_scopes, thread_state
from replica_engine.engine import ReplicaThread


class InheritedState(NamedTuple):
    """The caller's state, taken by `capture` on its thread and entered on each replica's."""

    graph: tf.Graph
    eager: bool
    init_graph: tf.Graph
    init_eager: bool
    creators: list[Any]
    name_scope: str
    variable_scope: Any
    scope_store: Any
    device_policy: int
    thread_locals: tuple
    keras_settings: dict[str, Any]
    context: contextvars.Context

    @classmethod
    def capture(cls) -> InheritedState:
        """Takes the state of the calling thread."""
        thread_state.ensure_started()
        graph, eager = thread_state.default_graph(), tf.executing_eagerly()
        init_graph, init_eager = graph, eager
        if not eager:  # else there is nothing to come out of
            with tf.init_scope():
                init_graph, init_eager = thread_state.default_graph(), tf.executing_eagerly()
        store = thread_state.variable_scope_store()
        return cls(
            graph=graph,
            eager=eager,
            init_graph=init_graph,
            init_eager=init_eager,
            creators=thread_state.variable_creators(graph),
            name_scope=tf.get_current_name_scope(),
            variable_scope=store.current_scope,
            scope_store=store,
            device_policy=thread_state.device_policy(),
            thread_locals=thread_state.locals_of_thread(),
            keras_settings=keras_state.settings(),
            context=contextvars.copy_context(),
        )

    def entered(
        self, replica: int, context: tf.distribute.ReplicaContext, device: str, thread: ReplicaThread, creator: Callable
    ) -> contextlib.AbstractContextManager[None]:
        """Enters the state on a replica's thread, with the replica's own context, device and variable creator."""
        creators = thread_state.creators_with(self.creators, creator)
        if self._may_stay and tf.executing_eagerly():
            if not (isinstance(thread.stay, _Stay) and thread.stay.is_for(self)):
                thread.stay = _Stay.of(self, replica, device)
            return self._rest(context, creators)
        if thread.stay is not None:
            quick_scopes.leave_eager()
            thread.stay = None
        return self._whole(replica, context, device, creators)

    @property
    def _may_stay(self) -> bool:
        """Whether threads may stay in what there is of it."""
        nameless = not self.name_scope and not self.variable_scope.name
        return quick_scopes.ENABLED and self.eager and nameless and not self.graph.building_function

    @contextlib.contextmanager
    def _whole(
        self, replica: int, context: tf.distribute.ReplicaContext, device: str, creators: list
    ) -> Iterator[None]:
        """All of it."""
        with (
            thread_state.enter_locals(self.thread_locals),
            keras_state.entered(self.keras_settings),
            thread_state.graph_and_mode(self.init_graph, self.init_eager),
            thread_state.graph_and_mode(self.graph, self.eager, creators),
            thread_state.enter_device_policy(self.device_policy),
            context,
            tf.device(device),
            tf.name_scope(_name_scope(self.name_scope, replica)),
            thread_state.enter_variable_scope(self.variable_scope, reuse=replica > 0),
        ):
            yield

    @contextlib.contextmanager
    def _rest(self, context: tf.distribute.ReplicaContext, creators: list) -> Iterator[None]:
        """What `_Stay` leaves out: it may hold on to a strategy, or to what else is the user's."""
        before = thread_state.set_creators(self.graph, creators)
        try:
            with (
                quick_scopes.default_on_thread(self.graph),
                thread_state.enter_locals(self.thread_locals),
                keras_state.entered(self.keras_settings),
                quick_scopes.nameless_scope(self.scope_store, self.variable_scope),
                context,
            ):
                yield
        finally:
            thread_state.set_creators(self.graph, before)


class _Stay(NamedTuple):
    """What a replica's thread stays in, from one run in eager mode to the next.

    Nothing is to be undone for it when the thread ends, or when the interpreter does: it is set, not entered. Of what a
    body has entered and not left, the next run sees nothing.

    Attributes:
        policy: the device policy.
        device_and_scope: the device of ops, and the name scope.
    """

    policy: int
    device_and_scope: tuple

    @classmethod
    def of(cls, state: InheritedState, replica: int, device: str) -> _Stay:
        """Puts this thread, the one of a replica, in a state."""
        quick_scopes.stay_eager(state.device_policy, device, _name_scope("", replica))
        return cls(state.device_policy, thread_state.device_and_name_scope())

    def is_for(self, state: InheritedState) -> bool:
        """Whether a run asks for it, and this thread is still in it: a body may have changed something."""
        return (
            self.policy == state.device_policy == thread_state.device_policy()
            and thread_state.device_and_name_scope() == self.device_and_scope
        )


def _name_scope(callers: str, replica: int) -> str:
    # A trailing "/" makes TensorFlow re-enter the scope instead of making a new one beside it.
    scope = callers + "/" if callers else ""
    return scope + f"replica_{replica}/" if replica > 0 else scope
