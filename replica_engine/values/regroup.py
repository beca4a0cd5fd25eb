"""Converts N values, one per replica, to one distributed value, and back.

`regroup` turns the N values that replicas returned (or passed to a merge call) into one structure of the same shape
whose leaves are distributed values. `select` is its inverse: it returns one replica's part. For every list `values` of
N structures of the same shape, `select(i, regroup(values, ...))` equals `values[i]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from replica_engine.errors import ReplicaValueError, StructureMismatchError
from replica_engine.upstream import distribute
from replica_engine.values.structure import LEAVES, PLAIN, OtherStructure, flatten, open_level

_SEQUENCES = (tuple, list)
_DISTRIBUTED = (distribute.PerReplica, distribute.LaterPerReplica, distribute.Mirrored)
_OF_NO_VARIABLE = LEAVES.difference(_DISTRIBUTED)


def regroup(values: Sequence[object], what: str = "The values of the replicas", name: str = "result") -> Any:
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


def select(replica: int, value: object) -> Any:
    """Returns one replica's part of a structure of distributed and ordinary values.

    A distributed variable stays whole: inside a replica it stands for that replica's component. A dataclass without
    distributed values stays the same object. Lists, tuples and mappings are always new objects, so that a replica may
    change them.
    """
    leaves, spec = flatten(value, stop=_is_same)
    return spec.rebuild([leaf.values[replica] if _is_per_replica(leaf) else leaf for leaf in leaves])


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
    if type(value) in PLAIN and not value:  # the fast path: most calls have no keyword arguments
        return [type(value)() for _ in range(size)]
    if type(value) in _OF_NO_VARIABLE:
        return [value] * size
    if type(value) in _SEQUENCES and LEAVES.issuperset(map(type, value)):  # most arguments and results are such
        rows = _parts_of_leaves(value, size)
        if rows is not None:
            return rows
    leaves, spec = flatten(value, name, name, _is_same)
    columns = []
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, distribute.DistributedValues) or isinstance(leaf, distribute.DistributedVariable):
            columns.append([leaf] * size)
        elif len(leaf.values) == size:
            columns.append(leaf.values)
        else:
            raise ReplicaValueError.other_size(spec.paths[index], len(leaf.values), size)
    return list(map(spec.rebuild, zip(*columns, strict=True) if columns else [()] * size))


def _parts_of_leaves(leaves: Sequence[Any], size: int) -> list[Any] | None:
    """The parts of a tuple or list of leaves; None if one of them is for another number of replicas."""
    columns = []
    for leaf in leaves:
        if type(leaf) not in _DISTRIBUTED:
            columns.append((leaf,) * size)
        elif len(leaf.values) == size:
            columns.append(leaf.values)
        else:
            return None
    rows = zip(*columns, strict=True) if columns else ((),) * size
    return list(rows) if type(leaves) is tuple else list(map(list, rows))


def spread(value: object, size: int, name: str) -> Any:
    """Converts arguments that are one distributed value as a whole to a structure of distributed values.

    `call_for_each_replica(fn, args=PerReplica([[a], [b]]))` is `call_for_each_replica(fn, args=[PerReplica([a, b])])`.

    Args:
        value: the positional or the keyword arguments.
        size: the number of replicas.
        name: "args" or "kwargs".

    Raises:
        ReplicaValueError: `args` is neither a list nor a tuple; or a distributed value has another number of
            components, or its components are not lists, or not mappings.
        StructureMismatchError: two replicas have different numbers of arguments, or arguments of different structures.
    """
    if not isinstance(value, distribute.DistributedValues):
        if name == "args" and not isinstance(value, (list, tuple)):
            raise ReplicaValueError.no_positional(value)
        return value
    grouped = regroup(parts(value, size, name), f"The {name} of the replicas", name)
    if name == "args" and not isinstance(grouped, (list, tuple)):
        raise ReplicaValueError.no_positional(value)
    if name == "kwargs" and not isinstance(grouped, Mapping):
        raise ReplicaValueError.no_keywords(value)
    return grouped


def _regroup(values: Sequence[Any], what: str, name: str) -> Any:
    if LEAVES.issuperset(map(type, values)):
        return _regroup_leaf(values)
    first = values[0]
    if type(first) in _SEQUENCES and all(_is_like(value, first) for value in values):
        return type(first)([_regroup_leaf(column) for column in zip(*values, strict=True)])
    if _is_dataclass(first) and _are_one(values):
        return first
    # Dataclasses inside are regrouped by themselves: one that is the same object on all replicas stays that object.
    outermost = set(map(id, values))
    leaves, spec = flatten(first, name, stop=lambda value: _is_dataclass(value) and id(value) not in outermost)
    rows = [leaves]
    for replica, value in enumerate(values[1:], start=1):
        try:
            rows.append(spec.match_leaves(value))
        except OtherStructure as other:
            kinds = other.wanted or _leaf(leaves[other.leaf]), other.given or _leaf(other.value)
            raise StructureMismatchError.between(what, other.path, (0, replica), kinds) from None
    columns = zip(*rows, strict=True)
    if spec.is_leaf:
        return _regroup_leaf(*columns)
    return spec.rebuild([_regroup(column, what, path) for column, path in zip(columns, spec.paths, strict=True)])


def _is_like(value: Any, first: Sequence[Any]) -> bool:
    """Whether a value is a flat tuple or list of leaves, like the first one."""
    return type(value) is type(first) and len(value) == len(first) and LEAVES.issuperset(map(type, value))


def _are_one(values: Sequence[object]) -> bool:
    return len(set(map(id, values))) == 1


def _is_dataclass(value: object) -> bool:
    return hasattr(type(value), "__dataclass_fields__")


def _is_per_replica(value: object) -> bool:
    return isinstance(value, distribute.DistributedValues) and not isinstance(value, distribute.DistributedVariable)


def _is_same(value: object) -> bool:
    """Whether a value is a dataclass without distributed values, which stays the same object."""
    return _is_dataclass(value) and not _differs(value, frozenset())


def _differs(value: object, inside: frozenset[int]) -> bool:
    """Whether a structure contains a value that differs between replicas.

    `inside` has the ids of the structures around `value`, because dataclasses may refer to each other in cycles.
    """
    opened = None if id(value) in inside else open_level(value)
    if opened is None:
        return _is_per_replica(value)
    return any(_differs(child, inside | {id(value)}) for child in opened[1])


def _leaf(value: object) -> str:
    return f"one value of type {type(value).__name__}"


def _regroup_leaf(values: Sequence[object]) -> object:
    first = values[0]
    same = _are_one(values)
    if type(first) in _OF_NO_VARIABLE:
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
