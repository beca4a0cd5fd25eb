"""Eager updates of a variable's components: all components or none, whatever exception comes in between.

`extended.update` calls a function on one component after the other. An exception may break that off: one of the
function itself, or one that another thread raises in this one (`PyThreadState_SetAsyncExc`). Then the components are
made equal. If the first one is finished, the others get its value, and the update is made; otherwise the first one gets
the value that the second one still has, and the update is undone. The same holds for other variables that the function
has assigned on its way, such as the slots of an optimizer.

Only variables of which all replicas have one value are made equal, and only those that this update has written. If the
arguments of the update differ by replica, all stays as the exception left it: the components need not be equal.

If other threads update variables of the strategy meanwhile, the last of them makes the components equal. Until then
each update reaches all components, so that it does not matter which value is copied first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from replica_engine._tf import thread_state, value_methods, variables
from replica_engine.process.interrupts import held_off_once

_logger = logging.getLogger("replica_engine")


class _OfThread(threading.local):
    written: list[Any] | None = None  # the variables that the update on this thread has written


_thread = _OfThread()


def _note(variable: Any) -> None:
    """Called before a variable is written."""
    if _thread.written is not None:
        _thread.written.append(variable)


class Updates:
    """The eager updates of one strategy."""

    def __init__(self) -> None:
        self._running: dict[int, list[Any]] = {}
        self._broken: list[tuple[list[Any], int]] = []  # variables, and the component whose value the others get
        self._repairing = threading.RLock()

    def noted(self, variable: Any) -> Any:
        """A new variable of the strategy, of which `make` knows when it is written."""
        return value_methods.note_writes(variable, _note)

    def make(self, variable: Any, fn: Callable[..., Any], args: Any, kwargs: Any, loop: Callable[..., Any]) -> Any:
        """Updates a variable.

        Args:
            variable: the distributed variable.
            fn: the function that updates a component.
            args: its other arguments, of all components.
            kwargs: its keyword arguments.
            loop: calls a function on all components.
        """
        finished: list[None] = []

        def noted(component: Any, *args: Any, **kwargs: Any) -> Any:
            result = fn(component, *args, **kwargs)
            finished.append(None)
            return result

        held, before, outer = held_off_once(), thread_state.of_update(), _thread.written
        written = [variable]
        try:
            held.__enter__()
            self._running[id(finished)] = finished
            if self._broken:
                with self._repairing:  # waits until another thread has made components equal
                    pass
            _thread.written = written
            result = loop(noted)
            self._end(finished, outer)
            held.__exit__(None, None, None)
            return result
        except BaseException as error:
            thread_state.set_of_update(before)
            try:
                if len(finished) < len(variable._values) and not variables.differ_by_replica((args, kwargs)):
                    self._broken.append((written, 0 if finished else 1))
                self._end(finished, outer)
            finally:
                held.__exit__(type(error), error, error.__traceback__)
            raise

    def _end(self, finished: list[None], outer: list[Any] | None) -> None:
        """Ends an update. May be called again if an exception comes in it."""
        _thread.written = outer
        self._running.pop(id(finished), None)
        if not self._broken:
            return
        with self._repairing:
            while self._broken and not self._running:
                written, source = self._broken[0]
                try:
                    for variable in written:
                        if variables.is_mirrored(variable):
                            variables.make_equal(variable, source)
                except Exception as error:  # it fails once, and not in each later update
                    _logger.warning("The copies of a variable stay unequal after an update failed: %s", error)
                self._broken.pop(0)
