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
Keras has gathered on the thread is forgotten.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from replica_engine._compat import keras_state, thread_state


@dataclass(frozen=True)
class InheritedState:
    """The caller's state, taken by `capture` on its thread and entered on each replica's."""

    graph: tf.Graph
    eager: bool
    init_graph: tf.Graph
    init_eager: bool
    creators: list[Any]
    name_scope: str
    variable_scope: Any
    device_policy: int
    thread_locals: tuple
    keras_settings: dict[str, Any]
    context: contextvars.Context

    @classmethod
    def capture(cls) -> InheritedState:
        """Takes the state of the calling thread."""
        thread_state.ensure_started()
        graph = thread_state.default_graph()
        with tf.init_scope():
            init_graph, init_eager = thread_state.default_graph(), tf.executing_eagerly()
        return cls(
            graph=graph,
            eager=tf.executing_eagerly(),
            init_graph=init_graph,
            init_eager=init_eager,
            creators=thread_state.variable_creators(graph),
            name_scope=tf.get_current_name_scope(),
            variable_scope=thread_state.current_variable_scope(),
            device_policy=thread_state.device_policy(),
            thread_locals=thread_state.locals_of_thread(),
            keras_settings=keras_state.settings(),
            context=contextvars.copy_context(),
        )

    @contextlib.contextmanager
    def entered(self, replica: int, context: tf.distribute.ReplicaContext, device: str) -> Iterator[None]:
        """Enters the state on a replica's thread, with the replica's own context and device."""
        # A trailing "/" makes TensorFlow re-enter the scope instead of making a new one beside it.
        scope = self.name_scope + "/" if self.name_scope else ""
        if replica > 0:
            scope += f"replica_{replica}/"
        with (
            thread_state.enter_locals(self.thread_locals),
            keras_state.entered(self.keras_settings),
            thread_state.graph_and_mode(self.init_graph, self.init_eager),
            thread_state.graph_and_mode(self.graph, self.eager, self.creators),
            thread_state.enter_device_policy(self.device_policy),
            context,
            tf.device(device),
            tf.name_scope(scope),
            thread_state.enter_variable_scope(self.variable_scope, reuse=replica > 0),
        ):
            yield
