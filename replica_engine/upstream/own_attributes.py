"""What a step keeps in an attribute of a model, a layer or a `tf.Module`, for replicas on threads that share it.

Replicas take turns from meeting to meeting, or run at once. If one object had one value for all, a replica would find
the value of another one after a meeting. So each replica has its own values of the attributes that it sets, and reads:

- its own value, if it has set one;
- of an attribute that holds tensors: the value from before the run. A step that asks whether it has made something
  already (a dropout mask) gets the answer that it gets on one device;
- of another attribute: the value of the first replica that set it, because flags such as `built` tell the others that
  there is nothing left to make.

Outside the replicas, the attribute has the value of the first replica that set it in the last run. Tensors stay each
replica's own in the next run of the strategy, until the attribute is set outside the replicas.

What makes up the object stays shared: variables, layers, metrics and modules, what a constructor or `build` sets, and
tensors that a step sets beside variables that it makes. Checked on TensorFlow 2.21.0 and Keras 3.15.1. This module
does not import Keras.
"""

from __future__ import annotations

import enum
import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

# CompositeTensor: the class of values that are made of tensors, such as sparse and ragged ones.
from tensorflow.python.framework.composite_tensor import CompositeTensor as _CompositeTensor

from replica_engine.upstream.hook import FIRST_THREADS, FIRST_WITH_KERAS, Hook

SET = "__setattr__"
_SETS = tuple(
    Hook(
        owner,
        SET,
        why="each replica on a thread has its own value of an attribute that a step sets",
        since=since,
        until="passes on to the original outside the replicas of this library's threads. Where a replica sets an "
        "attribute, the class gets a descriptor of its name, which stays",
    )
    for owner, since in (
        ("tensorflow.python.trackable.autotrackable.AutoTrackable", FIRST_THREADS),
        ("keras.src.backend.tensorflow.trackable.KerasAutoTrackable", FIRST_WITH_KERAS),
    )
)
"""Of the classes that store attributes: TensorFlow's, and Keras', which does not set a value that is there already."""

_SHARED, _TENSORS, _OTHER = range(3)  # the kinds of values


class _No(enum.Enum):
    """What stands for a value. It stays the same one in a class that is copied to another process."""

    VALUE = "no value"
    OWN_VALUE = "the class has a value, and the object has none"


_MISSING = _No.VALUE
_DEFAULT = _No.OWN_VALUE
_MAKING = ("__init__", "build")  # the functions that make an object, and never keep something of a step
_lock = threading.Lock()  # held while an attribute is prepared for a run
_objects: dict[int, _Object] = {}  # by identity, since an object may define equality


class ReplicaPlace(NamedTuple):
    """Where a thread is that runs a replica.

    Attributes:
        strategy: an object that the runs of one strategy have in common.
        run: the number of the run among them.
        replica: the index of the replica.
    """

    strategy: object
    run: int
    replica: int


Where = Callable[[], ReplicaPlace | None]
"""Tells where the calling thread is; None if it runs no replica."""


class _Object:
    """An object whose attributes replicas have set.

    Attributes:
        alive: refers weakly to the object.
        attributes: by name.
        made_in: the run in which a replica last set something that all share; the object was perhaps made there.
    """

    def __init__(self, owner: object):
        self.alive = weakref.ref(owner, functools.partial(_forget, id(owner)))
        self.attributes: dict[str, _Attribute] = {}
        self.made_in: tuple[int, int] | None = None

    def keeps_tensors(self, run: tuple[int, int]) -> bool:
        """Whether a replica has set tensors in this run, of an object that the run has not made."""
        return self.made_in != run and any(each.run == run and each.holds for each in [*self.attributes.values()])


class _Attribute:
    """The values of an attribute.

    Attributes:
        strategy: what the runs of the last strategy have in common.
        run: the last run in which a replica has set the attribute.
        own: by replica, what it has set.
        before: the value from before that run.
        first: the first replica that has set the attribute in that run.
        holds: whether the attribute holds tensors.
    """

    def __init__(self) -> None:
        self.strategy: object = None
        self.run: tuple[int, int] | None = None
        self.own: dict[int, object] = {}
        self.before: object = _MISSING
        self.first = sys.maxsize
        self.holds = False

    def begin(self, place: ReplicaPlace, before: object) -> None:
        """Begins with a run, unless another replica has."""
        if self.run == _run(place):
            return
        if not self.holds or self.strategy is not place.strategy:
            self.own = {}
        self.strategy, self.before, self.first, self.run = place.strategy, before, sys.maxsize, _run(place)


class _OfReplicas:
    """Stands on a class for an attribute that replicas have set.

    Args:
        name: the name of the attribute.
        default: what the class had under that name; `_MISSING` if nothing.
        place: where the calling thread is, if it runs a replica.
    """

    def __init__(self, name: str, default: object, place: Where):
        self.default = default
        self._name, self._place = name, place

    def __get__(self, owner: object, kind: type) -> Any:
        value: object = _MISSING
        if owner is not None:
            place = self._place()
            value = vars(owner).get(self._name, _MISSING) if place is None else _read(owner, self._name, place)
        if value is not _MISSING:
            return value
        if self.default is _MISSING:
            raise AttributeError(
                f"{kind.__name__!r} object has no attribute {self._name!r}", name=self._name, obj=owner
            )
        bind = getattr(type(self.default), "__get__", None)
        return self.default if bind is None else bind(self.default, owner, kind)

    def __set__(self, owner: object, value: object) -> None:
        place = self._place()
        attribute = _known(owner, self._name)
        if place is not None and attribute is not None and attribute.run == _run(place):
            _store(owner, self._name, attribute, place.replica, value)
            return
        vars(owner)[self._name] = value  # for all replicas
        if attribute is not None:
            _objects[id(owner)].attributes.pop(self._name, None)

    def __delete__(self, owner: object) -> None:
        place = self._place()
        attribute = _known(owner, self._name)
        if place is not None and attribute is not None:
            if _read(owner, self._name, place) is _MISSING:
                raise AttributeError(self._name)
            attribute.begin(place, _before(owner, self._name))
            _store(owner, self._name, attribute, place.replica, _MISSING)
            return
        if self._name not in vars(owner):
            raise AttributeError(self._name)
        del vars(owner)[self._name]
        if attribute is not None:
            _objects[id(owner)].attributes.pop(self._name, None)


def for_each_replica(place: Where) -> None:
    """Gives replicas on threads their own attributes; once for TensorFlow's class, and for that of Keras once imported.

    Args:
        place: where the calling thread is, if it runs a replica.
    """
    for each in _SETS:
        each.put(lambda own: own if hasattr(own, "_replica_engine") else _setting(own, place))


def _setting(own: Callable[[object, str, object], None], place: Where) -> Callable[[object, str, object], None]:
    @functools.wraps(own)
    def __setattr__(self: object, name: str, value: object) -> None:  # tracebacks show the name
        here = place()
        if here is None or not _belongs_to_replica(self, name, value, here, place):
            own(self, name, value)

    __setattr__._replica_engine = True  # type: ignore[attr-defined]
    return __setattr__


def _belongs_to_replica(owner: object, name: str, value: object, here: ReplicaPlace, place: Where) -> bool:
    """Sets an attribute for a replica; returns whether the class has nothing left to do.

    The class has something left to do with lists and dictionaries, which it wraps, so that variables that come into
    them later are found. What it then stores comes to the place that `_OfReplicas` keeps for this run.
    """
    keras = sys.modules.get("keras")
    if not isinstance(owner, tf.Module) and (keras is None or not isinstance(owner, keras.layers.Layer)):
        return False
    kind, attribute = _kind(value, keras), _known(owner, name)
    if kind is _SHARED:
        _object(owner).made_in = _run(here)
        if attribute is not None:
            _objects[id(owner)].attributes.pop(name, None)
        return False
    if attribute is None or not attribute.holds:
        by_library, making = _set_by()
        if making or (by_library and kind is _OTHER):
            return False
    with _lock:
        if not _prepared(type(owner), name, place):
            return False
        attribute = _object(owner).attributes.setdefault(name, _Attribute())
        attribute.begin(here, _before(owner, name))
        attribute.holds |= kind is _TENSORS
    if isinstance(value, (list, dict, tuple, set)) and _read(owner, name, here) is not value:
        return False
    _store(owner, name, attribute, here.replica, value)
    return True


def _kind(value: object, keras: ModuleType | None) -> int:
    """Whether a value is part of what all replicas share, holds tensors, or neither."""
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return _OTHER
    if isinstance(value, (list, tuple, set, frozenset, Mapping)):
        parts = value.values() if isinstance(value, Mapping) else value
        kinds = {_kind(part, keras) for part in [*parts]}
        return _SHARED if _SHARED in kinds else _TENSORS if _TENSORS in kinds else _OTHER
    if isinstance(value, (tf.Variable, tf.distribute.DistributedValues)):
        return _SHARED
    if isinstance(value, tf.Tensor):
        return _SHARED if value.dtype in (tf.resource, tf.variant) else _TENSORS
    if isinstance(value, _CompositeTensor):  # a distribution of TensorFlow Probability may have variables
        return _SHARED if getattr(value, "variables", ()) else _TENSORS
    if isinstance(value, np.ndarray):
        return _TENSORS
    if isinstance(value, tf.__internal__.tracking.Trackable):
        return _SHARED
    if keras is not None and isinstance(value, (keras.Variable, keras.metrics.Metric, keras.Loss, keras.KerasTensor)):
        return _SHARED
    return _OTHER


def _set_by() -> tuple[bool, bool]:
    """Whether code of TensorFlow or Keras sets an attribute now, and whether something is being made."""
    # The caller of `__setattr__`: between are this function, `_belongs_to_replica` and `__setattr__` itself.
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_name == SET:
        frame = frame.f_back
    by_library = frame is not None and frame.f_globals.get("__name__", "").startswith(("keras.", "tensorflow."))
    while frame is not None and frame.f_code.co_name not in _MAKING:
        frame = frame.f_back
    return by_library, frame is not None


def _prepared(kind: type, name: str, place: Where) -> bool:
    """Puts `_OfReplicas` on the class; returns whether it is there. A property of the class stays."""
    known = inspect.getattr_static(kind, name, _MISSING)
    if isinstance(known, _OfReplicas):
        return True
    if hasattr(type(known), "__set__") or hasattr(type(known), "__delete__"):
        return False
    setattr(kind, name, _OfReplicas(name, known, place))
    return True


def _read(owner: object, name: str, place: ReplicaPlace) -> object:
    """The value that a replica reads; `_MISSING` if there is none."""
    everyones = vars(owner).get(name, _MISSING)
    attribute = _known(owner, name)
    if attribute is None or attribute.strategy is not place.strategy:
        return everyones
    run = _run(place)
    if attribute.run != run:
        return attribute.own.get(place.replica, everyones) if attribute.holds else everyones
    if place.replica in attribute.own:
        return attribute.own[place.replica]
    if attribute.before is _MISSING or not _objects[id(owner)].keeps_tensors(run):
        return everyones
    return _MISSING if attribute.before is _DEFAULT else attribute.before


def _before(owner: object, name: str) -> object:
    """The value of an attribute before a run: that of the object, `_DEFAULT`, or `_MISSING`."""
    has_default = inspect.getattr_static(type(owner), name).default is not _MISSING
    return vars(owner).get(name, _DEFAULT if has_default else _MISSING)


def _store(owner: object, name: str, attribute: _Attribute, index: int, value: object) -> None:
    attribute.own[index] = value
    if index > attribute.first:
        return
    attribute.first = index
    if value is _MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value


def _run(place: ReplicaPlace) -> tuple[int, int]:
    return id(place.strategy), place.run


def _known(owner: object, name: str) -> _Attribute | None:
    known = _objects.get(id(owner))
    return known.attributes.get(name) if known is not None and known.alive() is owner else None


def _object(owner: object) -> _Object:
    known = _objects.get(id(owner))
    if known is None or known.alive() is not owner:
        known = _objects[id(owner)] = _Object(owner)
    return known


def _forget(number: int, gone: object) -> None:
    known = _objects.get(number)
    if known is not None and known.alive is gone:
        del _objects[number]
