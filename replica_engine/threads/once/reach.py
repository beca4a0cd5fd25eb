"""How code of replicas reaches the components of distributed variables: through the variable, or by themselves.

`weight + 1` in a replica reads the component of that replica, and a copy must read that of another one. But
`weight.values[0] + 1` reads the same component on every replica. In a graph both are an op with the same handle. So
each use of a handle is looked at while replicas of a strategy trace: what is not known to be reached through its
variable alone is refused. A nested tf.function may have been traced before, so this is remembered for each strategy.
"""

from __future__ import annotations

import contextlib
import sys
import weakref

import tensorflow as tf

from replica_engine._tf import components
from replica_engine.diagnostics.user_frames import is_internal

_of_strategy: weakref.WeakKeyDictionary[tf.distribute.Strategy, Reach] = weakref.WeakKeyDictionary()


class Reach:
    """How the replicas of one strategy have reached components in graphs, by the ids of their handles."""

    def __init__(self) -> None:
        self._through: set[int] = set()
        self._direct: set[int] = set()

    def note_created(self, handles: list[object]) -> None:
        """Notes the components of a variable that a replica has made."""
        self._through |= set(map(id, handles))

    def is_through_variable(self, handle: object) -> bool:
        """Whether a component was reached through its variable, and never by itself."""
        return id(handle) in self._through and id(handle) not in self._direct

    def see(self, handle: object) -> bool:
        """Looks at the frames that use a handle now; returns whether they use a component by itself."""
        if tf.executing_eagerly() or components.component(handle) is None:
            return False
        frame = sys._getframe(2)
        while frame is not None and is_internal(frame.f_code.co_filename):
            if frame.f_code in components.NOTES_USE:
                return False
            if frame.f_code.co_filename.startswith(components.FILES):
                self._through.add(id(handle))
                return False
            frame = frame.f_back  # type: ignore[assignment]
        self._direct.add(id(handle))
        return True


def of(strategy: tf.distribute.Strategy) -> Reach:
    """How the replicas of a strategy have reached components."""
    return _of_strategy.setdefault(strategy, Reach())


def noted(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[None]:
    """Inside the block, how this thread, which runs a replica of the strategy, reaches components is noted."""
    return components.watched(components.Watcher(of(strategy).see, lambda tensor: None))
