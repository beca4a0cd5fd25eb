"""What replicas on threads share: variables that are made inside a run, and the seeds of random ops."""

from __future__ import annotations

import itertools
import re
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.diagnostics.user_frames import user_location
from replica_engine.engine import Replica, State
from replica_engine.errors import ReplicaUnwound, VariableMismatchError
from replica_engine.threads.control_flow import joint_operator
from replica_engine.upstream import thread_state
from replica_engine.upstream.graphs import function_graphs, operators
from replica_engine.values.replica_weights import make_replica_seed

_OWN = object()
"""The place of random ops in a branch or a loop that a replica builds alone."""


class Draws:
    """The seeds that the random ops of one run have got, of those without a seed of their own.

    What each replica draws follows from the global seed and from its id alone. TensorFlow counts random ops where they
    are made: in eager mode for the process, in a graph for the graph. So what a replica drew would depend on how many
    replicas of this process had drawn before it, and two workers would draw the same. Here the replicas share one
    count. The k-th random op of any replica is the k-th op of the run, and the seed of replica r is r steps further
    (`values/replica_weights.py`); r counts the replicas of all workers. Replica 0 draws what one device draws.

    In a branch or a loop that a replica builds alone inside the run, TensorFlow's count is for the replica already, and
    only the seed is moved on. A `tf.function` that replicas call inside the run is traced once for all of them, so they
    draw the same there, and so they do after a `tf.random.set_seed` of their own, as under tf.distribute.

    Args:
        graph: the graph of the run, or the default graph in eager mode.
    """

    def __init__(self, graph: tf.Graph):
        self._graph = graph
        self._seeded = function_graphs.seeding()
        self._drawn: dict[Any, list[int | None]] = {}
        self._lock = threading.Lock()  # replicas may run at the same time

    def place(self) -> Any:
        """Where a random op is made: eagerly, in the graph of the run or a joint one, or in one of the replica's own.

        None in a function that is traced for all replicas, and after the global seed was set again.
        """
        if tf.executing_eagerly():
            return "eagerly" if function_graphs.seeding() == self._seeded else None
        graph = thread_state.default_graph()
        if graph is self._graph or joint_operator.find_notes(graph) is not None:
            return graph
        while operators.is_branch_or_loop(graph):
            graph = graph.outer_graph
        return _OWN if graph is self._graph else None

    def seed(self, place: Any, number: int, draw: Callable[[], int | None]) -> int | None:
        """The seed that TensorFlow gives to the random op of a number; only the first replica there draws it."""
        with self._lock:
            drawn = self._drawn.setdefault(place, [])
            # In order, also where replicas come in another: each draw moves TensorFlow's count on.
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
        return None if seed is None else int(make_replica_seed(self._replica, seed))


def install() -> None:
    """Lets random ops in replicas ask their replica for a seed; once per process."""
    function_graphs.seed_by_replica(_seed)


def _seed(draw: Callable[[], int | None]) -> int | None:
    own: Any = getattr(tf.distribute.get_replica_context(), "draws", None)
    return None if own is None else own.seed(draw)


_ADDED_NUMBER = re.compile(r"_\d+(?=/|$)")
_LOOK_AGAIN = 0.05  # seconds between checks of whether replica 0 can still make a variable


class _Created(NamedTuple):
    name: str
    calls: tuple
    variable: Any


class SharedVariables:
    """The variables that replica 0 creates in one run, for all replicas.

    Under a strategy's scope, one call of `tf.Variable` makes a distributed variable with a component on every device.
    If each of N replicas made its own, there would be N distributed variables. So each replica thread has a variable
    creator. On replica 0 it creates the variable; on the other replicas it returns that variable.

    Which of replica 0's variables does the k-th request of a replica under a name mean? It means the k-th variable of
    that name: all replicas run the same code, so they ask in the same order. Names are compared without the numbers
    that TensorFlow adds to make them unique.

    With `concurrent=True`, several replicas may run `if self.v is None: self.v = tf.Variable(...)` at once. Some of
    them find the variable made and others do not, and in some cases nothing shows which request means which variable.
    So a function that has not yet run without creating variables does not run on all replicas at once. Replica 0 gets a
    head start. If replica 0 creates a variable during it, the other replicas wait for its next pause (`Run`, `builds`).

    One case remains: a function that created no variable before creates one after the head start. A request that
    arrives before replica 0 has made the variable waits until the variable exists, or until replica 0 cannot make it
    any more. Requests are then matched by their name and by the calls that led to them. They are matched by order only
    if no variable came from the same calls.

    Args:
        concurrent: whether replicas run at the same time, so that they must wait for each other here.
    """

    def __init__(self, concurrent: bool):
        self._concurrent = concurrent
        self._created: list[_Created] = []
        self._changed = threading.Condition()

    @property
    def any(self) -> bool:
        """Whether a variable was created."""
        return bool(self._created)

    def creator(self, replica: Replica, first: Replica) -> Callable[..., Any]:
        """The variable creator for one replica's thread, for `tf.variable_creator_scope`."""
        if replica is first:
            return self._create
        taken: set[int] = set()

        def reuse(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            name = _plain_name(kwargs.get("name"))
            calls = _calls() if self._concurrent else ()
            index = self._find(name, calls, taken, first)
            if index is None:
                filename, lineno, function = user_location(replica)
                made = ", ".join(created.name for created in self._created) if self._created else "none"
                raise VariableMismatchError(
                    f"Tried to create variable {kwargs.get('name') or 'without a name'} with mismatching name on "
                    f"{replica}, at {filename}:{lineno} in {function}: replica 0, which creates each variable for all "
                    f"replicas, has not created it in this run (it created: {made}). Create the same variables, in the "
                    "same order and under the same names, on every replica, preferably before the run, under "
                    "`with strategy.scope():`."
                )
            taken.add(index)
            return self._created[index].variable

        return reuse

    def _create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        with joint_operator.outlasting(kwargs.get("initial_value")):
            variable = next_creator(**kwargs)
        calls = _calls() if self._concurrent else ()
        with self._changed:
            self._created.append(_Created(_plain_name(kwargs.get("name")), calls, variable))
            self._changed.notify_all()
        return variable

    def _find(self, name: str, calls: tuple, taken: set[int], first: Replica) -> int | None:
        with self._changed:
            while True:
                # Checked before the list is read: the list must show everything that replica 0 created before it
                # stopped.
                no_more = not self._concurrent or first.over or first.state is State.PAUSED
                same_name = [
                    index for index, created in enumerate(self._created) if created.name == name and index not in taken
                ]
                for index in same_name:
                    if self._created[index].calls == calls:
                        return index
                if first.run.given_up:
                    raise ReplicaUnwound
                if no_more:
                    return same_name[0] if same_name else None
                self._changed.wait(_LOOK_AGAIN)


def _plain_name(name: str | None) -> str:
    return _ADDED_NUMBER.sub("", name) if name is not None else "Variable"


def _calls() -> tuple:
    """The calls on this thread that led here, each as code object and line."""
    calls = ((frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(2)))
    return tuple(itertools.takewhile(lambda call: call[0].co_name != "execute", calls))
