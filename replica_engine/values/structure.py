"""Nested structures, one level at a time: the values that a structure contains, and how to rebuild it.

This module handles lists, tuples, namedtuples, mappings, dataclasses, attrs classes, and classes that take part in
`tf.nest` through `__tf_flatten__`. Every other value is a leaf: tensors, variables, composite tensors, None, Python
scalars, strings.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from replica_engine._tf.distribute import Mirrored, PerReplica
from replica_engine._tf.eager import EagerTensor


class Level(NamedTuple):
    """One level of a structure.

    Attributes:
        kind: a description; structures whose descriptions are equal may be grouped.
        names: for each child, the next part of the path to it: "[0]", "['loss']", ".field".
        children: the values at this level.
        rebuild: makes the same structure from other children.
        static: data that `rebuild` keeps and that is not a child.
    """

    kind: str
    names: tuple[str, ...]
    children: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]
    static: Any = None


def open_level(value: Any, like: Any = None) -> Level | None:
    """Opens `value`, or returns None for a leaf.

    Args:
        value: the structure.
        like: a mapping whose order of keys to follow, so that mappings which differ only in order can be compared.
    """
    if type(value) in _LEAVES:
        return None
    if isinstance(value, list):
        return Level(f"a list of length {len(value)}", _indices(value), tuple(value), list)
    if isinstance(value, tuple):
        return _open_tuple(value)
    if isinstance(value, Mapping):
        return _open_mapping(value, like)
    if isinstance(value, type):
        return None
    if hasattr(type(value), "__tf_flatten__"):  # asked of the class: a distributed variable would read its value
        metadata, children = value.__tf_flatten__()
        return Level(
            f"a {type(value).__name__}",
            _indices(children),
            tuple(children),
            lambda new: type(value).__tf_unflatten__(metadata, tuple(new)),
            metadata,
        )
    if dataclasses.is_dataclass(value):
        return _open_fields(value, [field.name for field in dataclasses.fields(value)])
    if hasattr(type(value), "__attrs_attrs__"):
        return _open_fields(value, [attribute.name for attribute in type(value).__attrs_attrs__])
    return None


# The most common leaves, which the checks above would recognize last.
_LEAVES = frozenset((type(None), bool, int, float, str, EagerTensor, PerReplica, Mirrored))


def _indices(values: Sequence[Any]) -> tuple[str, ...]:
    return tuple(f"[{index}]" for index in range(len(values)))


def _open_tuple(value: tuple) -> Level:
    if hasattr(value, "_fields"):
        names = tuple(f".{name}" for name in value._fields)
        make: Callable[[Sequence[Any]], Any] = type(value)._make  # type: ignore[attr-defined]
        return Level(f"a {type(value).__name__} of length {len(value)}", names, tuple(value), make)
    return Level(f"a tuple of length {len(value)}", _indices(value), tuple(value), tuple)


def _open_mapping(value: Mapping, like: Any) -> Level:
    ordered = isinstance(like, Mapping) and set(like) == set(value)
    keys = tuple(like if ordered else value)

    def rebuild(children: Sequence[Any]) -> Any:
        items = dict(zip(keys, children, strict=True))
        if isinstance(value, collections.defaultdict):
            return collections.defaultdict(value.default_factory, items)
        return type(value)(items)  # type: ignore[call-arg]

    kind = f"a mapping with the keys {', '.join(sorted(map(repr, keys))) or 'of none'}"
    return Level(
        kind,
        tuple(f"[{key!r}]" for key in keys),
        tuple(value[key] for key in keys),
        rebuild,
        getattr(value, "default_factory", None),
    )


def _open_fields(value: Any, names: list[str]) -> Level:
    names = [name for name in names if hasattr(value, name)]

    def rebuild(children: Sequence[Any]) -> Any:
        # Not through __init__, which may have other arguments, defaults and side effects. object.__setattr__ also sets
        # the fields of frozen classes.
        new = copy.copy(value)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(new, name, child)
        return new

    children = tuple(getattr(value, name) for name in names)
    static = {name: rest for name, rest in getattr(value, "__dict__", {}).items() if name not in names}
    return Level(f"a {type(value).__name__}", tuple(f".{name}" for name in names), children, rebuild, static)
