"""What this library puts in the place of attributes of TensorFlow and Keras: `Hook`.

A hook is declared where its module is imported, and changes nothing there. The first strategy, or the first call that
needs it, installs it. `hooks` lists all that are declared: docs/in_your_process.md shows them to users, and the tests
look up each. A function that goes around another passes on to it wherever no strategy of this library is concerned.

One function stands at each attribute, whatever number of hooks go around it. So a name that a program has for it serves
hooks that are installed later, and their order does not depend on which strategy came first. It calls the content of a
cell, and that is all that another hook changes.

TensorFlow or Keras may have put a handler of errors around a function: a filter of tracebacks, or a dispatch. A program
may have a name of its own for such a function (`fit = keras.Model.fit`), or a bound method. So the function stays, and
what its handler calls is replaced. A filter then takes our frames out of tracebacks with the others.

What another library puts around ours stays, and so does what it has put there before. Checked on TensorFlow 2.21.0 and
Keras 3.15.1. This module imports neither.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

FIRST = "the first strategy, or the first call of `xla.replicate` or `xla.lower`"
FIRST_THREADS = "the first strategy whose replicas run on threads"
FIRST_WITH_KERAS = "the first strategy, or the first `scope()`, once Keras is imported"
FIRST_COMPILED = "the first `TPUStrategy`, or the first call of `xla.replicate` or `xla.lower`"
FIRST_SCOPE = "the first `scope()` once Keras is imported"
FIRST_WORKERS_SCOPE = "the first scope of a `MultiWorkerMirroredStrategy`, or of a `TPUStrategy` of several workers"
REPLICATED = "the first `replicate_model`"
"""What installs hooks."""
OUTSIDE = "passes on to TensorFlow outside the replicas of this library"
"""When hooks have no effect, unless they say otherwise."""

_HANDLED = "fn"  # the variable of a handler that has the function
_HANDLERS = ("tensorflow.python.util.traceback_utils", "keras.src.utils.traceback_utils")
_lock = threading.RLock()
_declared: list[Hook] = []
_places: dict[tuple[str, str], _HookedAttribute] = {}


class Hook:
    """An attribute of TensorFlow or Keras that this library replaces or adds.

    Args:
        owner: the class or module, by its full name.
        name: the attribute.
        why: the reason.
        since: what installs it.
        until: when it is taken back or has no effect.
        order: where several hooks go around one function, the lowest is called last. Equal ones never count.
    """

    def __init__(self, owner: str, name: str, *, why: str, since: str, until: str = OUTSIDE, order: int = 0):
        self.owner, self.name, self.order = owner, name, order
        self.why, self.since, self.until = why, since, until
        self.call: Callable[..., Any] | None = None
        self._value: Any = None  # what `put` has put there
        with _lock:
            self._place = _places.setdefault((owner, name), _HookedAttribute(owner, name))
            _declared.append(self)

    def around(self, call: Callable[..., Any]) -> None:
        """Calls `call(original, *args, **kwargs)` wherever the function is called; does nothing a second time.

        Does nothing either until the module of the owner is imported, or if this version has no such attribute.
        """
        place = self._place
        if self.call is not None and place.is_in_place():
            return
        with _lock:
            if place.owner() is None:
                return
            if self.call is None:
                self.call = call
                place.hooks = sorted([*place.hooks, self], key=lambda each: each.order)
            place.install()

    def put(self, make: Callable[[Any], Any]) -> None:
        """Replaces what is no function, such as a tuple or a descriptor, or adds what is not there.

        Does nothing until the module of the owner is imported.

        Args:
            make: takes the present value, or None, and returns the new one; the same one if it is there already.
        """
        owner = self._place.owner()
        if owner is None or (self.call is not None and getattr(owner, self.name, None) is self._value):
            return
        with _lock:
            before = getattr(owner, self.name, None)
            value = make(before)
            self.call, self._value = make, value
            if value is not before:
                setattr(owner, self.name, value)

    @property
    def original(self) -> Any:
        """The function without what hooks have put around it."""
        place = self._place
        return place.original if place.hooks else place.present()


class StandIn:
    """Stands for an object of TensorFlow or Keras, and has all of its attributes but those that a subclass replaces."""

    def __init__(self, own: Any):
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def hooks() -> tuple[Hook, ...]:
    """All hooks that are declared, installed or not."""
    return tuple(_declared)


class _HookedAttribute:
    """An attribute, the function that stands there, and the hooks that it calls."""

    def __init__(self, owner: str, name: str):
        self._owner_name, self._name = owner, name
        self._owner: Any = None
        self.hooks: list[Hook] = []
        self.original: Any = None
        self._stands: Any = None  # what calls the content of the cell: a handler of errors, or a function of ours
        self._around: Any = None  # a function of another library that calls that one
        self._cell = types.CellType()

    def owner(self) -> Any:
        """The class or module; None until its module is imported."""
        if self._owner is None:
            self._owner = _imported(self._owner_name)
        return self._owner

    def present(self) -> Any:
        """What is called at the attribute, inside a handler of errors."""
        function = getattr(self.owner(), self._name, None)
        cell = _find_cell(function)
        return function if cell is None else cell.cell_contents

    def is_in_place(self) -> bool:
        """Whether the attribute calls the hooks, as far as that is known without a search."""
        there = getattr(self.owner(), self._name, None)
        return there is self._stands or there is self._around

    def install(self) -> None:
        """Makes the attribute call all hooks."""
        there = getattr(self.owner(), self._name, None)
        if there is None:
            return
        if self._stands is not None and (there is self._stands or _has(there, self._stands)):
            self._around = there
        else:
            self._stand_at(there)
        called = self.original
        for call in (each.call for each in self.hooks if each.call is not None):
            called = functools.partial(call, called)
        self._cell.cell_contents = functools.update_wrapper(called, self.original)

    def _stand_at(self, there: Any) -> None:
        """Finds the cell of the handler at the attribute; without a handler, puts a function there that has one."""
        cell = _find_cell(there)
        self.original = there if cell is None else cell.cell_contents
        if cell is None:
            cell = types.CellType(there)
            there = _calling(cell, there)
            setattr(self._owner, self._name, there)
        self._stands, self._cell = there, cell


def _calling(cell: types.CellType, original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return cell.cell_contents(*args, **kwargs)

    return replacement


def _imported(name: str) -> Any:
    """A module, or a class in one, if its module is imported; else None."""
    module, parts = name, list[str]()
    while module and module not in sys.modules:
        module, _, last = module.rpartition(".")
        parts.insert(0, last)
    found: Any = sys.modules.get(module)
    for part in parts:
        found = getattr(found, part, None)
    return found


def _find_cell(function: Any) -> types.CellType | None:
    """What has the function that a handler of errors calls; None for a function without a handler."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None or _HANDLED not in code.co_freevars:
        return None
    if code.co_filename not in {getattr(sys.modules.get(name), "__file__", None) for name in _HANDLERS}:
        return None
    cell: types.CellType = cells[code.co_freevars.index(_HANDLED)]
    return cell


def _has(function: Any, ours: Any) -> bool:
    """Whether a function of another library has ours at hand, and so calls it."""
    near = [function]
    for _ in range(3):  # one around the other
        near = [inner for each in near for inner in _at_hand(each)]
        if any(each is ours for each in near):
            return True
    return False


def _at_hand(function: Any) -> Iterator[Any]:
    """The functions that another one, a partial one or a method has at hand."""
    yield from (getattr(function, name) for name in ("__wrapped__", "func", "__func__") if hasattr(function, name))
    if isinstance(function, types.FunctionType):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            names = inspect.getclosurevars(function)
            yield from filter(inspect.isroutine, (*names.nonlocals.values(), *names.globals.values()))


_FILTERS = {
    name: Hook(
        name,
        "_EXCLUDED_PATHS",
        why=f"tracebacks that {whose} filters do not show the frames of this library either",
        since=since,
        until=f"only added; `{shows}.disable_traceback_filtering()` shows them",
    )
    for name, whose, since, shows in (
        (_HANDLERS[0], "TensorFlow", FIRST, "tf.debugging"),
        (_HANDLERS[1], "Keras", f"{FIRST_WITH_KERAS}, and `replicate_model`", "keras.config"),
    )
}


def hide_frames(folders: tuple[str, ...]) -> None:
    """Makes TensorFlow, and Keras once it is imported, leave folders out of tracebacks that they filter; once each."""
    for each in _FILTERS.values():
        each.put(lambda paths: paths if paths is None or folders[0] in paths else (*paths, *folders))
