"""The strategies to compare with one device: makes those that can run here, and says why others cannot."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine.errors import BackendMissingError, DeviceError, ParityArgumentError
from replica_engine.process.devices import logical_devices
from replica_engine.strategies import MirroredStrategy
from replica_engine.strategies.backend import compiled_strategy, compiles

MIRRORED, TPU = "MirroredStrategy", "TPUStrategy"


def candidates(
    strategies: Iterable[Any] | str | tf.distribute.Strategy | None, replicas: int
) -> tuple[dict[str, tf.distribute.Strategy], dict[str, str]]:
    """Makes the strategies of a check.

    Args:
        strategies: names or strategies; None for all.
        replicas: the number of replicas of each strategy.

    Returns:
        The strategies by name, and for each strategy that cannot run here the reason. If the user named the strategy,
        the reason is raised instead.

    Raises:
        ParityArgumentError: no strategy can run here, a strategy is unknown, or its number of replicas is different.
        DeviceError: there are too few devices for a strategy that was named.
        BackendMissingError: a `TPUStrategy` was named, and jax is missing.
    """
    made: dict[str, tf.distribute.Strategy] = {}
    left_out: dict[str, str] = {}
    for each in _listed(strategies):
        if isinstance(each, tf.distribute.Strategy):
            name = _free_name(_checked(each, replicas), made)
            made[name] = each
            continue
        name = getattr(each, "__name__", each)
        make = {MIRRORED: _mirrored, TPU: compiled_strategy}.get(name) if isinstance(name, str) else None
        if make is None:
            raise ParityArgumentError.unknown_strategy(each)
        try:
            made[name] = make(replicas)
        except (DeviceError, BackendMissingError) as error:
            if strategies is not None:
                raise
            left_out[name] = str(error)
    if not made:
        raise ParityArgumentError.nothing_to_compare(left_out)
    return made, left_out


def _listed(strategies: Any) -> list[Any]:
    if strategies is None:
        return [MIRRORED, TPU]
    if isinstance(strategies, (str, type, tf.distribute.Strategy)):
        return [strategies]
    if not isinstance(strategies, Iterable):
        raise ParityArgumentError.unknown_strategy(strategies)
    return list(strategies)


def _checked(strategy: tf.distribute.Strategy, replicas: int) -> str:
    name = type(strategy).__name__
    if not isinstance(strategy, MirroredStrategy) and not compiles(strategy):
        raise ParityArgumentError.unknown_strategy(strategy)
    if strategy.num_replicas_in_sync != replicas:
        raise ParityArgumentError.other_size(name, strategy.num_replicas_in_sync, replicas)
    return name


def _free_name(name: str, taken: dict[str, Any]) -> str:
    return name if name not in taken else f"{name} {sum(each.startswith(name) for each in taken) + 1}"


def _mirrored(replicas: int) -> tf.distribute.Strategy:
    gpus = tf.config.list_logical_devices("GPU") if thread_state.started() else []
    if len(gpus) >= replicas:
        return MirroredStrategy([device.name for device in gpus[:replicas]])
    return MirroredStrategy(logical_devices(replicas))
