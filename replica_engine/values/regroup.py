"""Converts N values, one per replica, to one distributed value, and back.

`regroup` turns the N values that replicas returned (or passed to a merge call) into one structure of the same shape
whose leaves are distributed values. `select` is its inverse: it returns one replica's part. For every list `values` of
N structures of the same shape, `select(i, regroup(values, ...))` equals `values[i]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from replica_engine._tf import distribute
from replica_engine._tf.eager import EagerTensor
from replica_engine.errors import ReplicaValueError, StructureMismatchError
from replica_engine.values.structure import Level, open_level


def regroup(values: Sequence[Any], what: str = "The values of the replicas", name: str = "result") -> Any:
    """Groups N structures of the same shape into one.

    A leaf that is the very same object on all replicas stays unchanged (None, a small integer, a mirrored variable, a
    value from outside). The components of one distributed variable become that variable. All other leaves become a
    `PerReplica` of the N leaves.

    Args:
        values: one structure per replica.
        what: a description of the values, for errors.
        name: the start of the path that an error shows.

    Raises:
        StructureMismatchError: two replicas differ in structure; the error says where.
        ReplicaValueError: a structure contains itself.

    Example:
        >>> regroup([{"loss": 1, "extra": None}, {"loss": 1, "extra": None}])
        {'loss': 1, 'extra': None}
    """
    try:
        return _regroup(values, what, name)
    except RecursionError:
        raise ReplicaValueError.endless(what[0].lower() + what[1:]) from None


def select(replica: int, value: Any) -> Any:
    """Returns one replica's part of a structure of distributed and ordinary values.

    A distributed variable stays whole: inside a replica it stands for that replica's component. A dataclass without
    distributed values stays the same object. Lists, tuples and mappings are always new objects, so that a replica may
    change them.
    """
    if isinstance(value, distribute.DistributedVariable):
        return value
    if isinstance(value, distribute.DistributedValues):
        return value.values[replica]
    level = open_level(value)
    if level is None:
        return value
    if dataclasses.is_dataclass(value) and not _differs(value, frozenset()):
        return value
    return level.rebuild([select(replica, child) for child in level.children])


def parts(value: Any, size: int, name: str) -> list[Any]:
    """Splits a structure into the parts of `size` replicas, as `select` does, and checks it before a replica starts.

    Args:
        value: the structure.
        size: the number of replicas.
        name: the start of the path that an error shows, such as "args".

    Raises:
        ReplicaValueError: a distributed value has another number of components, or the structure contains itself.

    Example:
        >>> parts({"rate": 0.1}, 2, "kwargs")
        [{'rate': 0.1}, {'rate': 0.1}]
    """
    try:
        return _parts(value, size, name)
    except RecursionError:
        raise ReplicaValueError.endless(name) from None


def spread(value: Any, size: int, name: str) -> Any:
    """Converts arguments that are one distributed value as a whole to a structure of distributed values.

    `call_for_each_replica(fn, args=PerReplica([[a], [b]]))` is `call_for_each_replica(fn, args=[PerReplica([a, b])])`.

    Args:
        value: the positional or the keyword arguments.
        size: the number of replicas.
        name: "args" or "kwargs".

    Raises:
        ReplicaValueError: `value` has another number of components, or they are not lists or not mappings.
        StructureMismatchError: two replicas have different numbers of arguments, or arguments of different structures.
    """
    if not isinstance(value, distribute.DistributedValues):
        return value
    grouped = regroup(_parts(value, size, name), f"The {name} of the replicas", name)
    if name == "args" and not isinstance(grouped, (list, tuple)):
        raise ReplicaValueError.no_positional(value)
    if name == "kwargs" and not isinstance(grouped, Mapping):
        raise ReplicaValueError.no_keywords(value)
    return grouped


def _parts(value: Any, size: int, name: str) -> list[Any]:
    if isinstance(value, distribute.DistributedValues) and not isinstance(value, distribute.DistributedVariable):
        if len(value.values) != size:
            raise ReplicaValueError.other_size(name, len(value.values), size)
        return list(value.values)
    kind = type(value)
    if kind is list or kind is tuple:  # the most common types; this takes a third of the time
        of_children = [_parts(child, size, f"{name}[{index}]") for index, child in enumerate(value)]
        return [kind(each) for each in zip(*of_children, strict=True)] if value else [kind() for _ in range(size)]
    if kind is dict:
        of_keys = {key: _parts(child, size, f"{name}[{key!r}]") for key, child in value.items()}
        return [{key: column[replica] for key, column in of_keys.items()} for replica in range(size)]
    level = open_level(value)
    if level is None or (dataclasses.is_dataclass(value) and not _differs(value, frozenset())):
        return [value] * size
    columns = [_parts(child, size, name + step) for child, step in zip(level.children, level.names, strict=True)]
    return [level.rebuild([column[replica] for column in columns]) for replica in range(size)]


def _regroup(values: Sequence[Any], what: str, name: str) -> Any:
    first = values[0]
    kind = type(first)
    if (kind is list or kind is tuple) and all(type(value) is kind and len(value) == len(first) for value in values):
        columns = enumerate(zip(*values, strict=True))  # the most common types; this takes a third of the time
        return kind([_regroup(column, what, f"{name}[{index}]") for index, column in columns])
    if kind is dict and all(type(value) is dict and value.keys() == first.keys() for value in values):
        return {key: _regroup([value[key] for value in values], what, f"{name}[{key!r}]") for key in first}
    if dataclasses.is_dataclass(first) and all(value is first for value in values):
        return first
    level = open_level(first)
    if level is None:
        for replica, value in enumerate(values):
            if (other := open_level(value)) is not None:
                raise StructureMismatchError.between(what, name, (0, replica), (_leaf(first), other.kind))
        return _regroup_leaf(values)
    levels = [level]
    for replica, value in enumerate(values[1:], start=1):
        levels.append(_open_like(level, first, value, what, name, replica))
    children = zip(*(one.children for one in levels), strict=True)
    return level.rebuild(
        [_regroup(child, what, name + step) for step, child in zip(level.names, children, strict=True)]
    )


def _differs(value: Any, inside: frozenset[int]) -> bool:
    """Whether a structure contains a value that differs between replicas.

    `inside` has the ids of the structures around `value`, because dataclasses may refer to each other in cycles.
    """
    if isinstance(value, distribute.DistributedValues):
        return not isinstance(value, distribute.DistributedVariable)
    level = None if id(value) in inside else open_level(value)
    return level is not None and any(_differs(child, inside | {id(value)}) for child in level.children)


def _leaf(value: Any) -> str:
    return f"one value of type {type(value).__name__}"


def _open_like(level: Level, first: Any, value: Any, what: str, name: str, replica: int) -> Level:
    other = open_level(value, like=first)
    if other is None:
        raise StructureMismatchError.between(what, name, (0, replica), (level.kind, _leaf(value)))
    if other.kind != level.kind:
        raise StructureMismatchError.between(what, name, (0, replica), (level.kind, other.kind))
    return other


def _regroup_leaf(values: Sequence[Any]) -> Any:
    first = values[0]
    same = all(value is first for value in values[1:])
    if type(first) is EagerTensor:  # an eager tensor belongs to no variable
        return first if same else distribute.PerReplica(tuple(values))
    if same and isinstance(first, distribute.DistributedVariable):
        return first
    container = distribute.value_container(first)
    if same and container is first:
        return first
    # With one replica, a component is the same object on "all" replicas, but it still represents its variable.
    is_component = container is not first and not isinstance(first, distribute.UnreadVariable)
    if is_component and all(distribute.value_container(value) is container for value in values):
        return container
    return distribute.PerReplica(tuple(values))
