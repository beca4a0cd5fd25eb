"""The seeds of random ops that are traced once: each copy gets the seed that `random_numbers` gives its replica.

The k-th random op without a seed of its own has, on each replica, the seed that follows from the k-th seed that
TensorFlow draws. Where a variable is made, replica 0 draws more often than the others, so later draws are refused. The
op that a seed is drawn for is the next one that TensorFlow makes. If that op has another seed, the draw is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine._tf.graphs import control_flow, source
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.errors import TraceOnceError
from replica_engine.values.seeds import seed_of

_LARGEST = 2**31 - 1  # TensorFlow takes seeds modulo this


class _Draw(NamedTuple):
    """A seed that was drawn.

    Attributes:
        value: the seed.
        creating: whether it was drawn while a variable was being made.
        operations: the number of ops that the template had then.
        late: whether a variable was made before it in the run.
    """

    value: int
    creating: bool
    operations: int
    late: bool


class Draws:
    """The seeds that replica 0 draws for ops of a template.

    Args:
        graph: the graph of the template.
        outer: the graph of the run.
        refusal: makes the error for what cannot be copied.
        creating: whether a variable is being made.
        made_variables: whether a variable was made in the run.
    """

    def __init__(
        self,
        graph: Any,
        outer: Any,
        refusal: Callable[..., TraceOnceError],
        creating: Callable[[], bool],
        made_variables: Callable[[], bool],
    ):
        self._graph, self._outer, self._refusal, self._creating = graph, outer, refusal, creating
        self._made_variables = made_variables
        self._drawn: list[_Draw] = []
        self._given: list[int] = []
        self._done = self._begin = 0
        self.begin()

    def seed(self, draw: Callable[[], int | None]) -> int | None:
        """The seed of the next random op; None if TensorFlow's own is right. As `OfReplica.seed`."""
        graph = thread_state.default_graph()
        if tf.executing_eagerly():
            if self._creating():
                return None
            raise self._refusal("a random op in tf.init_scope")
        if getattr(getattr(tf.distribute.get_replica_context(), "attempts", None), "vectorizing", False):
            raise self._refusal("a random op without a seed of its own in tf.vectorized_map")  # made several times
        if graph is self._graph:
            number = len(graph.get_operations())
            value = draw()
            if value is not None:
                self._drawn.append(_Draw(value, self._creating(), number, self._made_variables()))
            return value
        while control_flow.is_branch_or_loop(graph):
            graph = graph.outer_graph
        if graph is not self._graph:
            return None
        value = draw()
        if value is None or self._creating():
            return value
        raise self._refusal("a random op without a seed of its own in a branch or loop")

    def see_given(self, seed: Any) -> None:
        """The program gives a random op a seed."""
        if isinstance(seed, (int, np.integer)) and thread_state.default_graph() is self._graph:
            self._given.append(int(seed) % _LARGEST)

    def of_copies(self, new: Sequence[tf.Operation], ids: Sequence[int]) -> dict[str, list[int]]:
        """For the new random ops, by name, the seed of each copy.

        Args:
            new: the ops of the template that are about to be copied.
            ids: the id of each replica.
        """
        if source.counted_seeds(self._graph) - self._begin != len(self._drawn) - self._done:
            raise self._refusal("seeds that were drawn without this library")
        if self._done == len(self._drawn):
            return {}
        # More ops may have a drawn seed: the program gave it to one, or TensorFlow made two ops of one.
        expected = Counter(self._given) + Counter(draw.value for draw in self._drawn[self._done :])
        have = Counter(filter(lambda seed: seed is not None, map(source.seed_of_op, new)))
        if any(have[draw.value] > expected[draw.value] for draw in self._drawn[self._done :]):
            raise self._refusal("a random op without a seed of its own that TensorFlow makes several of,")
        everything = self._graph.get_operations()
        names = {op.name for op in new}
        found: dict[str, list[int]] = {}
        place = 0
        for draw in self._drawn[self._done :]:
            place = max(place, draw.operations)
            while place < len(everything) and source.seed_of_op(everything[place]) is None:
                place += 1
            op = everything[place] if place < len(everything) else None
            if op is None or source.seed_of_op(op) != draw.value or op.name not in names:
                raise self._refusal("a seed that was drawn, and that no random op has,")
            place += 1
            if not draw.creating:
                if draw.late:
                    raise self._refusal("a random op without a seed of its own after it", user_line(op))
                first = op.get_attr("seed")
                found[op.name] = [draw.value, *(_of_replica(number, draw.value, first) for number in ids[1:])]
        return found

    def copied(self) -> None:
        """The ops were copied: the graph of the run counts on from here."""
        source.count_seeds(self._outer, source.counted_seeds(self._graph))
        self._done = len(self._drawn)

    def begin(self) -> None:
        """The replica goes on: seeds are counted on from the graph of the run, where a merge may have drawn."""
        self._begin = source.counted_seeds(self._outer)
        source.count_seeds(self._graph, self._begin)


def _of_replica(number: int, value: int, first: int) -> int:
    """The seed of a replica's op; TensorFlow takes no pair of zeros, `first` being the other one."""
    seed = int(seed_of(number, value)) % _LARGEST
    return _LARGEST if seed == first == 0 else seed
