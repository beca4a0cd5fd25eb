"""Nested structures: `flatten` takes one apart into its leaves and a `Spec`, which knows the paths and rebuilds it.

Structures are lists, tuples, namedtuples, mappings, dataclasses, attrs classes, and classes that take part in `tf.nest`
through `__tf_flatten__`. Every other value is a leaf: tensors, variables, composite tensors, distributed values, None,
Python scalars, strings. Mappings keep the order of their keys.

Two other libraries do not serve. `optree`, which comes with Keras, sorts the keys of dictionaries, and takes
dataclasses, attrs classes, most mappings and TensorFlow's wrappers of lists and dictionaries for leaves. `tf.nest`
sorts keys too, and has no paths; it remains where tf.distribute or `tf.function` define a structure by it, as for the
value of an all-reduce or an input signature.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.errors import ReplicaValueError, base
from replica_engine.upstream.distribute import LaterPerReplica, Mirrored, PerReplica
from replica_engine.upstream.eager import EagerTensor

Build = Callable[[Sequence[Any]], Any]
"""Makes a value from a sequence of others."""


def flatten(
    value: object, name: str = "", what: str = "the values", stop: Callable[[object], bool] | None = None
) -> tuple[list[Any], Spec]:
    """Takes a structure apart.

    Args:
        value: the structure, or a single leaf.
        name: the start of all paths, such as "args".
        what: a description of the values, for the error.
        stop: whether to take a structure for one leaf; not asked of plain lists, tuples and dictionaries.

    Returns:
        The leaves, in the order of the structure, and the structure without them.

    Raises:
        ReplicaValueError: the structure contains itself.

    Example:
        >>> leaves, spec = flatten({"x": [1, 2], "y": None}, "batch")
        >>> leaves, spec.paths
        ([1, 2, None], ["batch['x'][0]", "batch['x'][1]", "batch['y']"])
        >>> spec.rebuild([3, 4, 5])
        {'x': [3, 4], 'y': 5}
    """
    spec = Spec(name, stop)
    leaves: list[Any] = []
    pending, depth = [value], 0
    while pending:
        value = pending.pop()
        if value is _END:
            depth -= 1
            continue
        opened = None if type(value) in LEAVES else open_level(value, stop)
        if opened is None:
            spec._levels.append(None)
            leaves.append(value)
            continue
        if depth == _DEEPEST:
            raise ReplicaValueError.endless(what)
        spec._levels.append(opened[0])
        pending.append(_END)
        pending += opened[1][::-1]  # the first child last, to pop it next
        depth += 1
    return leaves, spec


@functools.lru_cache(maxsize=64)
def tuple_of_leaves(name: str, count: int) -> tuple[Spec, tuple[object, ...], list[str]]:
    """What `flatten` finds of a tuple of that many leaves: its structure, with the key and the paths."""
    spec = flatten((None,) * count, name)[1]
    return spec, spec.key, spec.paths


class Spec:
    """A structure without its leaves."""

    __slots__ = ("_levels", "_name", "_stop")

    def __init__(self, name: str, stop: Callable[[object], bool] | None):
        self._name = name
        self._stop = stop
        self._levels: list[Level | None] = []  # each level before what is in it; None for a leaf

    @property
    def paths(self) -> list[str]:
        """The path to each leaf."""
        return list(itertools.compress(self._places(), map(operator.not_, self._levels)))

    def _places(self) -> list[str]:
        """The path to each level and leaf."""
        found, pending = [], [self._name]
        for level in self._levels:
            found.append(pending.pop())
            if level is not None:
                pending += map(found[-1].__add__, level.names[::-1])
        return found

    @property
    def key(self) -> tuple[object, ...]:
        """Hashable; equal for structures of the same types, with the same keys, fields and static data."""
        return tuple([level and level.key for level in self._levels])

    @property
    def is_leaf(self) -> bool:
        """Whether the value was a single leaf."""
        return self._levels == [None]

    def rebuild(self, leaves: Sequence[object]) -> Any:
        """Makes the structure around other leaves."""
        # From the last leaf to the first, so that the children of each level are complete before the level is made.
        stack: list[object] = []
        rest = list(leaves)
        for level in reversed(self._levels):
            if level is None:
                stack.append(rest.pop())
                continue
            count = len(level.names)
            children: list[object] | dict[object, object] = stack[: -count - 1 : -1]
            del stack[len(stack) - count :]
            if level.keys is not None:
                children = dict(zip(level.keys, children, strict=True))
            stack.append(children if level.make is dict else level.make(children))
        return stack[0]

    def builder(self, builds: Sequence[Build]) -> Build:
        """Makes a function that makes the structure, where each leaf is what `builds` makes of the same argument."""
        if self._levels == [None]:
            return builds[0]
        return lambda values: self.rebuild([build(values) for build in builds])

    def match_leaves(self, value: Any) -> list[Any]:
        """The leaves of another value of this structure; mappings may have their keys in another order.

        Raises:
            OtherStructure: the value has another structure.
        """
        leaves: list[Any] = []
        pending = [value]
        for index, level in enumerate(self._levels):
            value = pending.pop()
            opened = None if type(value) in LEAVES else open_level(value, self._stop)
            if level is None and opened is None:
                leaves.append(value)
            elif level is None or opened is None or opened[0].kind != level.kind or opened[0].keys != level.keys:
                wanted, given = level and level.text, opened and opened[0].text
                raise OtherStructure(self._places()[index], len(leaves), wanted, given, value)
            else:  # the last child first, for `pending`
                pending += opened[1][::-1] if level.keys is None else [value[key] for key in reversed(level.keys)]
        return leaves


def components(value: object, name: str) -> list[tf.Tensor]:
    """The components of a composite tensor; `name` is for the error.

    Raises:
        ReplicaValueError: a component is not a tensor.
    """
    try:
        return tf.nest.flatten(value, expand_composites=True)
    except (AttributeError, TypeError, ValueError) as error:
        raise ReplicaValueError.no_tensor(name, value, str(error)) from None


def build_composite(value: object, builds: Sequence[Build]) -> Build:
    """Like `Spec.builder`, for a composite tensor, or its type spec, with `builds` for its components."""
    return lambda values: tf.nest.pack_sequence_as(value, [build(values) for build in builds], expand_composites=True)


def as_tensor(value: object, name: str) -> tf.Tensor:
    """Converts a value like `tf.convert_to_tensor`, with one clear error instead of TensorFlow's many.

    Args:
        value: a tensor, or a value that may become one.
        name: the name of the value for the error, such as "args[0]".

    Raises:
        ReplicaValueError: the value cannot become a tensor, or contains itself.
    """
    if isinstance(value, tf.Tensor):
        return value
    if isinstance(value, tf.Variable):
        return tf.convert_to_tensor(value)  # a variable that cannot be read raises its own error
    try:
        return tf.convert_to_tensor(value)
    except RecursionError:
        raise ReplicaValueError.endless(name[0].lower() + name[1:]) from None
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError, tf.errors.OpError) as error:
        raise ReplicaValueError.no_tensor(name, value, str(error)) from None


class OtherStructure(Exception):
    """A value does not have the structure of a `Spec`.

    Attributes:
        path: the first place where they differ.
        leaf: how many leaves of the `Spec` come before.
        wanted: a description of the container at this place; None if there is a leaf.
        given: a description of the container that the value has there; None if it has a leaf.
        value: what the value has there.
    """

    def __init__(self, path: str, leaf: int, wanted: str | None, given: str | None, value: object):
        self.path, self.leaf, self.wanted, self.given, self.value = path, leaf, wanted, given, value


class Level(NamedTuple):
    """One level of a structure, without its children.

    Attributes:
        type: the type of the container.
        kind: a description; structures whose descriptions and keys are equal may be grouped.
        names: for each child, the next part of the path to it: "[0]", "['loss']", ".field".
        make: makes the same container from other children; a mapping from a dictionary.
        keys: the keys of a mapping, as a dictionary; None for other containers.
        static: data that `make` keeps and that is not a child.
    """

    type: type
    kind: str
    names: tuple[str, ...]
    make: Callable[[Any], object]
    keys: dict[object, None] | None = None
    static: object = None

    @property
    def text(self) -> str:
        """The description with the keys."""
        return self.kind if self.keys is None else f"{self.kind} {', '.join(sorted(map(repr, self.keys))) or 'of none'}"

    @property
    def key(self) -> tuple[object, ...]:
        """Hashable; equal for levels of the same type, with the same keys, fields and static data."""
        return self.type, self.names, self.static if self.static is None else constant_key(self.static)

    def rebuild(self, children: Sequence[object]) -> Any:
        """Makes the same container from other children."""
        return self.make(children if self.keys is None else dict(zip(self.keys, children, strict=True)))


def as_axis(name: str, axis: Any) -> Any:
    """An axis to join or to divide along, as an int; an integer that is a symbolic tensor stays one.

    Args:
        name: what takes it, for the message.
        axis: what the user gave.

    Raises:
        ReplicaValueError: it is something else.
    """
    if tf.is_tensor(axis) and not isinstance(axis, EagerTensor) and axis.dtype.is_integer:
        return axis
    if (number := base.as_int(axis)) is None:
        raise ReplicaValueError(f"{name}: `axis` must be an int, as in axis=0; got {base.brief(axis)}.")
    return number


def open_level(value: Any, stop: Callable[[object], bool] | None = None) -> tuple[Level, tuple[object, ...]] | None:
    """The outermost level of a structure, and the values in it; None for a leaf. `stop` is that of `flatten`."""
    kind: Any = type(value)
    if kind in LEAVES or (stop is not None and kind not in PLAIN and stop(value)):
        return None
    if isinstance(value, (list, tuple)):
        if kind is not list and kind is not tuple and hasattr(value, "_fields"):
            return _namedtuple(value.__class__), tuple(value)  # not the type, which may be TensorFlow's wrapper
        level_of = _sequence if len(value) <= _MOST_CACHED else _sequence.__wrapped__
        return level_of(kind, list if isinstance(value, list) else tuple, len(value)), tuple(value)
    if kind is dict or isinstance(value, Mapping):
        keys = tuple(value)
        # Keys of other types may be equal and not the same, as 1 and True are.
        is_cached = len(keys) <= _MOST_CACHED and set(map(type, keys)) <= {str}
        level = (_mapping if is_cached else _mapping.__wrapped__)(kind, keys)
        if isinstance(value, collections.defaultdict):
            default = value.default_factory
            level = level._replace(make=functools.partial(collections.defaultdict, default), static=default)
        return level, tuple(value.values() if kind is dict else map(value.__getitem__, keys))
    if isinstance(value, (type, tf.__internal__.CompositeTensor)):
        return None
    if hasattr(kind, "__tf_flatten__"):  # asked of the class: a distributed variable would read its value
        metadata, children = value.__tf_flatten__()
        names = _sequence.__wrapped__(kind, tuple, len(children)).names
        make = functools.partial(_unflatten, kind, metadata)
        return Level(kind, f"a {kind.__name__}", names, make, None, metadata), tuple(children)
    is_dataclass = hasattr(kind, "__dataclass_fields__")
    fields = dataclasses.fields(value) if is_dataclass else getattr(kind, "__attrs_attrs__", None)
    return None if fields is None else _open_fields(value, [field.name for field in fields])


class ById:
    """Compares by identity, and does not keep the compared object alive.

    An object whose type has no weak references is kept alive. A dead object equals no other one, also if a new object
    has its address.

    Attributes:
        value: a function that returns the object; None if it has died.
    """

    __slots__ = ("_hash", "value")

    def __init__(self, value: object):
        self._hash = id(value)
        self.value: Callable[[], object]
        try:
            self.value = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ById) or other._hash != self._hash:
            return False
        # The same reference is of the same object. It may have died: a table must still find its entry to drop it.
        return other.value is self.value or ((value := self.value()) is not None and other.value() is value)

    def __hash__(self) -> int:
        return self._hash


def by_id(key: object) -> Iterator[ById]:
    """All `ById` in a key, which is made of tuples."""
    if isinstance(key, ById):
        yield key
    elif type(key) is tuple:
        for part in key:
            yield from by_id(part)


def constant_key(value: Any, depth: int = 3) -> Hashable:
    """A hashable key for a value that is not a tensor: by value for plain Python values, by identity for others.

    Short lists, tuples and dictionaries are compared by their contents, `depth` levels deep.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, tf.DType)):
        return type(value), repr(value)  # repr: 0.0 is not -0.0, and nan is nan
    if depth and type(value) in PLAIN and len(value) <= 64:
        items = value.items() if isinstance(value, dict) else value
        return type(value), tuple(constant_key(item, depth - 1) for item in items)
    return ById(value)


LEAVES = frozenset((type(None), bool, int, float, str, EagerTensor, PerReplica, LaterPerReplica, Mirrored))
"""Types that are always leaves: the most common ones."""
PLAIN = (tuple, list, dict)
"""Types that are always structures: the most common ones."""
_END = object()  # follows the children of a level
_DEEPEST = 500  # levels; a structure that contains itself has more
_MOST_CACHED = 64  # children of a level that is made once


@functools.lru_cache(maxsize=256)
def _sequence(kind: type, make: type, length: int) -> Level:
    names = tuple(f"[{index}]" for index in range(length))
    return Level(kind, f"a {make.__name__} of length {length}", names, make)


@functools.lru_cache(maxsize=256)
def _namedtuple(kind: Any) -> Level:
    names = tuple(f".{name}" for name in kind._fields)
    return Level(kind, f"a {kind.__name__} of length {len(names)}", names, kind._make)


@functools.lru_cache(maxsize=256)
def _mapping(kind: Any, keys: tuple) -> Level:
    names = tuple(f"[{key!r}]" for key in keys)
    return Level(kind, "a mapping with the keys", names, kind, dict.fromkeys(keys))


def _unflatten(kind: Any, metadata: object, children: Sequence[object]) -> object:
    return kind.__tf_unflatten__(metadata, tuple(children))


def _open_fields(value: object, names: list[str]) -> tuple[Level, tuple[object, ...]]:
    names = [name for name in names if hasattr(value, name)]

    def rebuild(children: Sequence[object]) -> object:
        # Not through __init__, which may have other arguments, defaults and side effects. object.__setattr__ also sets
        # the fields of frozen classes.
        new = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)
        return new

    static = {name: rest for name, rest in getattr(value, "__dict__", {}).items() if name not in names}
    level = Level(type(value), f"a {type(value).__name__}", tuple(f".{name}" for name in names), rebuild, None, static)
    return level, tuple(getattr(value, name) for name in names)
