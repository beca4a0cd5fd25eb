"""Looks on while replica 0's Python code runs, for what a copy would not repeat, or would answer in another way.

Copies repeat ops. They repeat no Python code, nothing that is done at once (as in `tf.init_scope`), and nothing that
Python code is told of one replica alone: its device, or a value that is known while it is traced.
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
    """Looks on while a replica is traced; raises the template's refusal.

    Args:
        template: the template of the replica.
    """

    def __init__(self, template: Template):
        self._of = template
        self._internal: set[str] = set()  # files that are not the user's
        self._tapes: weakref.WeakSet[Any] = weakref.WeakSet()  # that the replica has made

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, this thread runs the replica."""
        watcher = components.Watcher(
            gives_twins=lambda: not self._of.creating,
            handle=self._see_handle,
            place=self._see_place,
            constant=self._see_constant,
            value=self._see_value,
            lifted=self._see_init_scope,
            attribute=self._see_attribute,
            kept=self._see_kept,
            seed=self._of.draws.see_given,
            tape=self._see_tape,
        )
        return components.watched(watcher)

    def _see_handle(self, variable: Any) -> None:
        """A variable is used: in the graph, or at once? And by itself, or through a distributed variable?"""
        if self._of.creating:
            return
        if _uses_eagerly():
            raise self._of.refusal("a variable outside the graph, as in tf.init_scope,")
        found = components.component(variable._handle)
        if found is not None and not found.is_twin and id(variable._handle) not in self._of.created:
            raise self._of.refusal(COMPONENT)
        if found is not None:
            self._see_place(3)

    def _see_place(self, depth: int = 2) -> None:
        """The device of a variable, a tensor or an op is asked for, a variable's handle, or the op of a tensor."""
        frame = sys._getframe(depth)
        if frame.f_code.co_filename not in self._internal and not self._of.creating:
            if _is_of_user(frame):
                raise self._of.refusal("the device, the handle or the op behind a variable or tensor")
            self._internal.add(frame.f_code.co_filename)

    def _see_init_scope(self) -> None:
        """tf.init_scope is entered: what it does is done once for each replica, and copies do nothing at once."""
        frame: Any = sys._getframe(2).f_back
        while frame.f_code.co_filename == contextlib.__file__:
            frame = frame.f_back
        if not self._of.creating and _is_of_user(frame):
            raise self._of.refusal("tf.init_scope")

    def _see_value(self) -> None:
        """A distributed value that is no variable is asked for the replica's value."""
        raise self._of.refusal("a distributed value that is not an argument")

    def _see_attribute(self, component: Any, name: str) -> None:
        """A distributed variable is asked for an attribute of its component; methods are those of the class."""
        if name in vars(component) and _is_of_user(sys._getframe(2)):
            raise self._of.refusal("a Python attribute of a component of a variable")

    def _see_kept(self) -> None:
        """get_concrete_function: code that keeps the function of one replica would use it in the others."""
        if _is_of_user(sys._getframe(2)):
            raise self._of.refusal("get_concrete_function")

    def _see_tape(self, tape: Any, is_made: bool) -> None:
        """A tape or an accumulator is made or used: one that was made outside would not see the copies."""
        if is_made:
            self._tapes.add(tape)
        elif tape not in self._tapes:
            raise self._of.refusal("a tape or an accumulator that was made outside the run")

    def _see_constant(self, tensor: tf.Tensor) -> None:
        """The value of a tensor was asked for while the replica is traced, and it is not known, or not all of it.

        TensorFlow asks too, for values that make a graph simpler, or that are drawn or checked at once. It must not get
        another answer than the replica would.
        """
        frame: Any = sys._getframe(2)
        while frame.f_code.co_filename in components.ASKING:
            frame = frame.f_back
        if _is_of_user(frame):
            raise self._of.refusal("tf.get_static_value of a value that may differ by replica")
        if tensor.op.name in self._of.varying and tensor.graph is self._of.graph and not _is_of_summary():
            raise self._of.refusal("a value of the replica where the graph depends on it")


def _is_of_user(frame: Any) -> bool:
    """Whether a frame, or that around TensorFlow's wrappers of it, is the user's."""
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
    """Whether TensorFlow asks whether replica 0 writes a summary: it writes one where the answer is not known, too."""
    frame: Any = sys._getframe(2)
    while frame is not None and is_internal(frame.f_code.co_filename):
        if frame.f_code.co_filename == components.SUMMARIES:
            return True
        frame = frame.f_back
    return False
