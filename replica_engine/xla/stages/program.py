"""What the later stages have to know of a lowered body: data, made once when it is lowered."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.flight_record import Collective
from replica_engine.xla.body import Body
from replica_engine.xla.host_calls.call import HostCalls

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A lowered body, as its compilation and its launches see it.

    Attributes:
        name: of the function.
        body: the replicas it is for.
        host_calls: its calls to the host.
        collectives: where its replicas meet.
        donates: whether a launch gives the old values of variables to the program, which writes the new ones in their
            place. It must not if a host call may fail, or if the caller may stop waiting: then a launch that does not
            end well has to leave all variables as they were.
        key: of the arguments that it serves.
        slots: specs of the tensors among the arguments, with the shapes that it was lowered for.
        slot_names: what messages call them.
        host_slots: indices of those that are not parameters, since no device can have them.
        tensors: captured tensors, eager or of an outer graph.
        captured: indices of those that are parameters; the others are compiled in.
        handles: of captured variables.
        writes: of each variable that is written, its index among `handles` and its index among `results`.
        results: shape and dtype of each result; first those that the body returned, then values of variables.
        returned: how many results of the program the body returned.
        host_results: of each result of the body that stays on the host, its index and its number there.
        replicas_results: from the values of all replicas for each result, what each replica returned.
    """

    name: str
    body: Body
    host_calls: HostCalls
    collectives: list[Collective]
    donates: bool
    key: Any
    slots: Sequence[tf.TensorSpec]
    slot_names: Sequence[str]
    host_slots: frozenset[int]
    tensors: Sequence[Any]
    captured: Sequence[int]
    handles: Sequence[tf.Tensor]
    writes: Sequence[tuple[int, int]]
    results: Sequence[tuple[Shape, np.dtype]]
    returned: int
    host_results: Mapping[int, int]
    replicas_results: Callable[[Sequence[Sequence[Any]]], list[Any]]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the slots."""
        return tuple(tuple(slot.shape) for slot in self.slots)
