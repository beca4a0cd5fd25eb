"""Whose variables a checkpoint, a model or a SavedModel has: those of a strategy of this library, on which workers."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from replica_engine.backend import find_backend, has_backend
from replica_engine.errors import ReplicaValueError
from replica_engine.upstream import distribute
from replica_engine.upstream.keras import keras_training
from replica_engine.workers.saving import Saving


def concerns(saved: object) -> bool:
    """Whether a checkpoint has a variable of a strategy of this library, or a state, or is saved by several workers."""
    tracked = parts(saved)
    if any(getattr(type(part), "_saves_at_once", False) for part in tracked):
        return True
    strategies = (each.distribute_strategy for each in _distributed(tracked))
    return any(map(has_backend, strategies)) or find_team(saved) is not None


def check_values(saved: object) -> None:
    """Looks for variables without a value that can be saved.

    Raises:
        ReplicaValueError: replicas have different values of one, and nothing says which of them is the variable's.
    """
    for each in _distributed(parts(saved)):
        if isinstance(each, distribute.SyncOnReadVariable) and each.aggregation == tf.VariableAggregation.NONE:
            raise ReplicaValueError(
                f"The variable {each.name!r} has a value on each replica (synchronization ON_READ), and its "
                "aggregation NONE does not say which one a checkpoint has. Make it with "
                "aggregation=tf.VariableAggregation.SUM, MEAN or ONLY_FIRST_REPLICA, or leave it out of the checkpoint."
            )


def _distributed(tracked: list[object]) -> Iterator[distribute.DistributedVariable]:
    """The distributed variables among objects: themselves, and TensorFlow's in Keras' variables."""
    for part in tracked:
        # A distributed variable reads its value, and adds up its replicas, to answer for an attribute that it lacks.
        own = part if isinstance(part, distribute.DistributedVariable) else getattr(part, "_value", part)
        if isinstance(own, distribute.DistributedVariable):
            yield own


def belong(team: Saving, *models: object) -> None:
    """Notes that models are trained on several workers, although they were not built under a strategy."""
    _belonging.update(dict.fromkeys(models, team))


def find_team(saved: object) -> Saving | None:
    """The workers that save a model, a checkpoint, or anything trackable together; None if it is a single one."""
    own = _find_own_team(saved)
    if own is not None or not isinstance(saved, tf.__internal__.tracking.Trackable):
        return own
    tracked = parts(saved)
    found = next((part for part in map(_find_own_team, tracked) if part is not None), None)
    return found or _find_model_team(tracked)


def parts(root: object) -> list[object]:
    """An object and all that it tracks; nothing for what tracks nothing."""
    if not isinstance(root, tf.__internal__.tracking.Trackable):
        return []
    return list(tf.train.TrackableView(root).descendants())


def _find_model_team(saved: list[object]) -> Saving | None:
    """The team, if any of these objects is part of a model in `_belonging`: a layer, a variable, the optimizer."""
    identities = {id(part) for part in saved}
    for model, team in list(_belonging.items()):
        # Looked up now: layers, variables and the optimizer may have come after the model was replicated.
        owners = [model, getattr(model, "optimizer", None)]
        variables = [variable for owner in owners for variable in getattr(owner, "variables", ())]
        tracked = [part for owner in owners for part in parts(owner)]
        tracked += [getattr(variable, "value", variable) for variable in variables]  # TensorFlow's in Keras' variables
        if not identities.isdisjoint(map(id, tracked)):
            return team
    return None


def _find_own_team(each: object) -> Saving | None:
    if isinstance(each, distribute.DistributedVariable):
        return find_strategy_team(each.distribute_strategy)
    with contextlib.suppress(TypeError):  # not hashable
        if each in _belonging:
            return _belonging[each]
    return find_strategy_team(keras_training.find_strategy(each))


def find_strategy_team(strategy: tf.distribute.Strategy | None) -> Saving | None:
    """The workers on which a strategy runs, as those that save together; None if it is a single one."""
    backend = find_backend(strategy)
    return None if backend is None else backend.saving


_belonging: weakref.WeakKeyDictionary[Any, Saving] = weakref.WeakKeyDictionary()
