"""Random ops without a seed of their own: what each replica draws follows from the global seed and from its id alone.

TensorFlow counts random ops where they are made: in eager mode for the process, in a graph for the graph. So what a
replica drew would depend on how many replicas of this process had drawn before it, and two workers would draw the same.
Here the replicas share one count. The k-th random op of any replica is the k-th op of the run, and the seed of replica
r is r steps further (`values/seeds.py`); r counts the replicas of all workers. Replica 0 draws what one device draws.

In a branch or a loop that a replica builds alone inside the run, TensorFlow's count is for the replica already, and
only the seed is moved on. A `tf.function` that replicas call inside the run is traced once for all of them, so they
draw the same there, and so they do after a `tf.random.set_seed` of their own, as under tf.distribute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine._tf.graphs import control_flow, replaced_ops
from replica_engine.threads.joint.graphs import notes_of
from replica_engine.values.seeds import seed_of

_OWN = object()
"""The place of random ops in a branch or a loop that a replica builds alone."""


class Draws:
    """The seeds that the random ops of one run have got.

    Args:
        graph: the graph of the run, or the default graph in eager mode.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._seeded = replaced_ops.seeding()
        self._drawn: dict[Any, list[int | None]] = {}
        self._lock = threading.Lock()  # replicas may run at the same time

    def place(self) -> Any:
        """Where a random op is made: eagerly, in the graph of the run or a joint one, or in one of the replica's own.

        None in a function that is traced for all replicas, and after the global seed was set again.
        """
        if tf.executing_eagerly():
            return "eagerly" if replaced_ops.seeding() == self._seeded else None
        graph = thread_state.default_graph()
        if graph is self._graph or notes_of(graph) is not None:
            return graph
        while control_flow.is_branch_or_loop(graph):
            graph = graph.outer_graph
        return _OWN if graph is self._graph else None

    def seed(self, place: Any, number: int, draw: Callable[[], int | None]) -> int | None:
        """The seed that TensorFlow gives to the random op of a number; only the first replica there draws it."""
        with self._lock:
            drawn = self._drawn.setdefault(place, [])
            while len(drawn) <= number:
                drawn.append(draw())
            return drawn[number]


class Seeds:
    """The seeds of the random ops of one replica in one run.

    Args:
        draws: those of the run.
        replica: the replica, by its id among the replicas of all workers.
    """

    def __init__(self, draws: Draws, replica: int):
        self._draws, self._replica = draws, replica
        self._counts: dict[Any, int] = {}

    def seed(self, draw: Callable[[], int | None]) -> int | None:
        """The seed of the next random op; None if TensorFlow's own is right.

        Args:
            draw: draws the next one of TensorFlow's; None without a global seed.
        """
        place = self._draws.place()
        if place is None:
            return None
        if place is _OWN:
            seed = draw()
        else:
            number = self._counts.get(place, 0)
            self._counts[place] = number + 1
            seed = self._draws.seed(place, number, draw)
        return None if seed is None else int(seed_of(self._replica, seed))


def install() -> None:
    """Lets random ops in replicas ask their replica for a seed; once per process."""
    replaced_ops.seed_by_replica(_seed)


def _seed(draw: Callable[[], int | None]) -> int | None:
    own: Any = getattr(tf.distribute.get_replica_context(), "draws", None)
    return None if own is None else own.seed(draw)
