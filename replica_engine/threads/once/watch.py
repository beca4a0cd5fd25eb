"""Watches replica 0's Python code while it is traced, and refuses what copies of its ops would do otherwise.

Copies repeat ops. They do not repeat Python code, or effects at trace time (as in `tf.init_scope`). Nor can they
correct answers that hold for one replica only, such as its device, or a value that is known while it is traced.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from replica_engine._tf import components
from replica_engine.diagnostics.user_frames import WRAPPERS, is_internal

if TYPE_CHECKING:
    from replica_engine.threads.once.template import Template

COMPONENT = "a component of a distributed variable that is used by itself"


class Watch:
    """Watches a replica while it is traced. Each `_see_` method is a callback that may raise the template's refusal.

    Args:
        template: the template of the replica.
    """

    def __init__(self, template: Template):
        self._template = template
        self._internal: set[str] = set()  # files that are not the user's
        self._tapes: weakref.WeakSet[Any] = weakref.WeakSet()  # that the replica has made

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, this thread runs the replica."""
        watcher = components.Watcher(
            gives_twins=lambda: not self._template.creating,
            handle=self._see_handle,
            place=self._see_place,
            constant=self._see_constant,
            value=self._see_value,
            lifted=self._see_init_scope,
            attribute=self._see_attribute,
            kept=self._see_kept,
            seed=self._template.draws.see_given,
            tape=self._see_tape,
        )
        return components.watched(watcher)

    def _see_handle(self, variable: Any) -> None:
        """Refuses a variable that is used outside the graph, or a component that is not used through its variable."""
        if self._template.creating:
            return
        if _uses_eagerly():
            raise self._template.refusal("a variable outside the graph, as in tf.init_scope,")
        found = components.component(variable._handle)
        if found is not None and not found.is_twin and id(variable._handle) not in self._template.created:
            raise self._template.refusal(COMPONENT)
        if found is not None:
            self._see_place(3)

    def _see_place(self, depth: int = 2) -> None:
        """Refuses user code that asks for a device, for the handle of a variable, or for the op of a tensor."""
        frame = sys._getframe(depth)
        if frame.f_code.co_filename not in self._internal and not self._template.creating:
            if _is_of_user(frame):
                raise self._template.refusal("the device, the handle or the op behind a variable or tensor")
            self._internal.add(frame.f_code.co_filename)

    def _see_init_scope(self) -> None:
        """Refuses tf.init_scope in user code: each replica would run its block, and copies do nothing at trace time."""
        frame: Any = sys._getframe(2).f_back
        while frame.f_code.co_filename == contextlib.__file__:
            frame = frame.f_back
        if not self._template.creating and _is_of_user(frame):
            raise self._template.refusal("tf.init_scope")

    def _see_value(self) -> None:
        """Refuses a distributed value from a closure, other than a variable."""
        raise self._template.refusal("a distributed value that is not an argument")

    def _see_attribute(self, component: Any, name: str) -> None:
        """Refuses user code that reads an attribute of a component; methods belong to the class and may be used."""
        if name in vars(component) and _is_of_user(sys._getframe(2)):
            raise self._template.refusal("a Python attribute of a component of a variable")

    def _see_kept(self) -> None:
        """Refuses get_concrete_function: code that keeps the function of one replica would use it in the others."""
        if _is_of_user(sys._getframe(2)):
            raise self._template.refusal("get_concrete_function")

    def _see_tape(self, tape: Any, is_made: bool) -> None:
        """Refuses a tape or accumulator that was made outside the run: it would not see the copies."""
        if is_made:
            self._tapes.add(tape)
        elif tape not in self._tapes:
            raise self._template.refusal("a tape or an accumulator that was made outside the run")

    def _see_constant(self, tensor: tf.Tensor) -> None:
        """Called when code asks at trace time for the value of a tensor that is not known, or not wholly.

        A question of the user is refused. TensorFlow asks too, to simplify a graph, or to draw or check a value early.
        That is refused only if each replica knows its own value, because then the answer would differ on a replica.
        """
        frame: Any = sys._getframe(2)
        while components.asks_for_caller(frame.f_code):
            frame = frame.f_back
        if _is_of_user(frame):
            raise self._template.refusal("tf.get_static_value of a value that may differ by replica")
        if tensor.op.name in self._template.varying and tensor.graph is self._template.graph and not _is_of_summary():
            raise self._template.refusal("a value of the replica where the graph depends on it")


def _is_of_user(frame: Any) -> bool:
    """Whether a frame is the user's, or the frame that called it through TensorFlow's wrappers is."""
    while frame.f_code.co_name in WRAPPERS and frame.f_back is not None:
        frame = frame.f_back
    return not is_internal(frame.f_code.co_filename)


def _uses_eagerly() -> bool:
    """Whether code of the replica uses a variable in eager mode."""
    frame: Any = sys._getframe(2)
    while tf.executing_eagerly() and frame is not None:
        if frame.f_code.co_filename == components.FUNCTIONS:
            return False
        if not is_internal(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _is_of_summary() -> bool:
    """Whether TensorFlow asks in order to write summaries on replica 0 only; without an answer it writes them too."""
    frame: Any = sys._getframe(2)
    while frame is not None and is_internal(frame.f_code.co_filename):
        if frame.f_code.co_filename == components.SUMMARIES:
            return True
        frame = frame.f_back
    return False
