"""Attempts: a replica enters an operator alone, and leaves it again if there is a merge call inside.

Replica 0 decides for all replicas of a run which operators are joint. A decision belongs to the k-th operator that a
replica enters and to the place of the call. The place alone is not enough: the same line may be reached once
with merge calls and once without. The number alone is not enough: replicas may differ in operators without merge
calls.

Each trace decides for itself. What an earlier trace decided must not count: where that is wrong, the ops of a graph
have another order, and the last bits of a training depend on what the process has trained before.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import control_flow
from replica_engine.errors import MergeCallGraphError


def outlasting(initial_value: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside the block, a variable may be created; if an attempt creates it, it lives on when the attempt is given up.

    User code keeps the variable and does not create it again. So it gets its value now, outside the graph of the
    attempt. An initial value that was computed in that graph cannot be had outside. Then the attempt ends here, before
    the variable is created, and the replicas create it together.

    Raises:
        MergeNeeded: the initial value is a tensor of the graph of an attempt.
    """
    attempts = getattr(tf.distribute.get_replica_context(), "attempts", None)
    if attempts is None or not attempts.active:
        return contextlib.nullcontext()
    if tf.is_tensor(initial_value) and tf.is_symbolic_tensor(initial_value):
        attempts.merge_needed()
    return tf.init_scope()


class MergeNeeded(BaseException):
    """Goes from a merge call in an attempt up to the operator. Not an Exception, because users catch those."""


class Attempts:
    """The attempts of one replica.

    Args:
        decisions: the places of the operators that replica 0 has found to be joint in the run, by their numbers.
        leads: whether this is replica 0.

    Attributes:
        active: whether the replica is in an attempt now.
        needed: whether a merge call has ended the attempt.
        vectorizing: whether the replica is in code that TensorFlow will vectorize, where nothing can merge.
        asked_for: the sources for which a tape on the replica's thread is being asked.
    """

    def __init__(self, decisions: dict[int, Any], leads: bool):
        self.active = self.vectorizing = False
        self._decisions, self._leads = decisions, leads
        self.asked_for: list[Any] = []
        self._number = 0
        self.needed = False
        self._begun: weakref.WeakSet[tf.GradientTape] = weakref.WeakSet()
        self._tapes: list[tuple[tf.GradientTape, Any]] = []

    def enter(self, place: Any, plain: Callable[[], Any], joint: Callable[[], Any]) -> Any:
        """Enters an operator, alone or together with the other replicas.

        Args:
            place: where the operator stands in the user's program.
            plain: enters it alone.
            joint: enters it together with the others.
        """
        if self.active:  # The operator around it is the one that the coordinator can see.
            return plain()
        self._number += 1
        if self._decisions.get(self._number) == place:
            return joint()
        done, result = self._attempt(plain)
        if self._leads and not done:
            self._decisions[self._number] = place
        return result if done else joint()

    def enter_joint(self, joint: Callable[[], Any]) -> Any:
        """Enters an operator that is known to have merge calls."""
        self._number += 1
        return joint()

    def merge_needed(self) -> None:
        """Ends the attempt, because of a merge call."""
        self.needed = True
        raise MergeNeeded

    def ends_branch(self) -> None:
        """At the end of a branch or a body: raises again what user code may have caught."""
        if self.active and self.needed:
            raise MergeNeeded

    def note_tape(self, tape: tf.GradientTape) -> None:
        """Notes that a tape of the replica begins to record."""
        self._begun.add(tape)

    def recording_tapes(self) -> list[tf.GradientTape]:
        """The tapes of the replica that record."""
        return [each for each in self._begun if control_flow.is_recording(each)]

    def note_gradient(self, tape: tf.GradientTape) -> None:
        """Notes that a tape is about to be asked for gradients, which ends it."""
        if self.active:
            self._tapes.append((tape, control_flow.as_recording(tape)))

    def _attempt(self, plain: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether `plain` ran without a merge call, and its result. If not, tapes are as they were before."""
        self.active, self.needed, self._tapes = True, False, []
        try:
            result = plain()
            if self.needed:
                raise MergeCallGraphError.swallowed()
            return True, result
        except MergeNeeded:
            for tape, before in reversed(self._tapes):
                control_flow.restore_tape(tape, before)
            return False, None
        finally:
            self.active, self._tapes = False, []
