"""The context of the one replica that is traced for all: what differs by replica is a placeholder, or is refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import components, thread_state
from replica_engine._tf.graphs import control_flow, gradients
from replica_engine.diagnostics.suspicions import note_write
from replica_engine.diagnostics.user_frames import is_internal
from replica_engine.threads.context import MergeRequest, ReplicaContext
from replica_engine.threads.once.template import Template
from replica_engine.values.structure import as_tensor

_ID, _LOCAL_ID = "_id_in_sync_group", "_id_in_process"


class TemplateContext(ReplicaContext):
    """The context of a replica whose operations are copied for all replicas.

    Args:
        strategy: the strategy.
        replica_id: the id of the replica, whose components of variables are used.
        template: what the replica traces.
    """

    def __init__(self, strategy: tf.distribute.Strategy, replica_id: int, template: Template):
        self._template: Template | None = template
        super().__init__(strategy, replica_id)

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The id of the replica, as a tensor that is another one in each copy."""
        template, graph = self._template, thread_state.default_graph()
        if template is None:
            return super().replica_id_in_sync_group
        if tf.executing_eagerly():
            raise template.refusal("the replica id outside the graph, as in tf.init_scope,")
        while graph is not template.graph:
            if not control_flow.is_branch_or_loop(graph):
                raise template.refusal("the replica id in a nested tf.function")
            graph = graph.outer_graph
        return template.replica_id()

    def detach(self) -> None:
        """Unbinds the context at the end of the body; TensorFlow may keep it, and the template holds variables."""
        super().detach()
        self._template = None

    @property
    def _replica_id_in_sync_group(self) -> Any:
        return self._number(_ID)

    @_replica_id_in_sync_group.setter
    def _replica_id_in_sync_group(self, value: Any) -> None:
        self.__dict__[_ID] = value

    @property
    def _local_replica_id(self) -> Any:
        return self._number(_LOCAL_ID)

    @_local_replica_id.setter
    def _local_replica_id(self, value: Any) -> None:
        self.__dict__[_LOCAL_ID] = value

    @property
    def _replica_id(self) -> Any:
        return self._number(_LOCAL_ID)

    def _number(self, name: str) -> Any:
        """The id of the replica as a Python number, which TensorFlow's own code may have."""
        if self._template is not None and not is_internal(sys._getframe(2).f_code.co_filename):
            raise self._template.refusal("the replica id as a Python number")
        return self.__dict__[name]

    @property
    def devices(self) -> list:
        """Refused: each copy is on another device."""
        if self._template is None:
            return super().devices
        raise self._template.refusal("the device of the replica")

    def _own(self, value: Any) -> Any:
        is_own = isinstance(value, tf.Tensor) and self._template is not None and self._template.is_own(value)
        return value if is_own else super()._own(value)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Like that of a replica; the shape of the gradient is known, as it is there from the replica id."""
        own = tf.nest.map_structure(lambda each: as_tensor(each, "A value of all_gather"), value)
        return super().all_gather(tf.nest.map_structure(gradients.with_shape_of_gradient, own), axis, options)

    def _request(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any, *rest: Any) -> MergeRequest:
        assert self._template is not None, "called by code that runs in the replica"
        self._template.note_same((args, kwargs))
        return super()._request(merge_fn, args, kwargs, *rest)

    def note_addition(self, variable: Any) -> None:
        """Notes it for a copy as well: copies share a plain variable, and each has its own component of others."""
        super().note_addition(variable)
        if components.component(variable._handle) is None:
            note_write(self.written, variable, self._strategy, self.index + 1)

    def enter_operator(
        self, kind: str, build: Callable[..., Any], payload: Any, guessed: bool = False, of: object = None
    ) -> Any:
        """Refused: an operator with a sync point inside is built by all replicas together."""
        assert self._template is not None, "called by code that runs in the replica"
        raise self._template.refusal(f"a sync point in {kind}")
