"""Updates of variables on replica threads that are made on all replicas or on none.

A variable that all replicas share has a component on each device, and an update writes one after the other, in Python.
A signal handler may raise between two of them, and so may another thread. The components of a variable are equal before
an update and after it. So then a component that is done, or one that is untouched, is copied to the others: of the
variable that is updated, and of all others that the update may have written, such as the variables of an optimizer.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf import thread_state, variables
from replica_engine.process.interrupts import Undisturbed


class WholeUpdates:
    """The hooks of an extended class that make variables and update them; put it before that class."""

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """The hook that makes variables; notes those whose components are kept equal."""
        variable = super()._create_variable(next_creator, **kwargs)  # type: ignore[misc]
        if variables.is_mirrored(variable):
            self._mirrored()[id(variable)] = variable
        return variable

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        """The hook that updates all components of a variable, or none."""
        if not tf.executing_eagerly():
            return super()._update(var, fn, args, kwargs, group)  # type: ignore[misc]
        done: list[None] = []
        state = thread_state.of_update()

        def counted(*args: Any, **kwargs: Any) -> Any:
            result = fn(*args, **kwargs)
            done.append(None)
            return result

        try:
            return super()._update(var, counted, args, kwargs, group)  # type: ignore[misc]
        except BaseException:
            thread_state.set_of_update(state)  # an exception may come at the beginning of an `__exit__`
            Undisturbed().do(functools.partial(self._make_equal, 0 if done else -1))
            raise

    def _mirrored(self) -> weakref.WeakValueDictionary[int, Any]:
        return vars(self).setdefault("_replica_engine_mirrored", weakref.WeakValueDictionary())

    def _make_equal(self, source: int) -> None:
        for variable in list(self._mirrored().values()):
            variables.make_equal(variable, source)
