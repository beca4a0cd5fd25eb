"""The arguments of `check_parity`: the numbers, the strategies to compare with one device, and the batches.

Everything here happens before the first run, so a wrong argument costs no time.
"""

from __future__ import annotations

import dataclasses
import itertools
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import thread_state
from replica_engine.errors import BackendMissingError, DeviceError, ParityArgumentError
from replica_engine.errors.base import positive_int, shown
from replica_engine.keras.choice import compiled_strategy, divided_strategy, is_divided
from replica_engine.process.devices import logical_devices
from replica_engine.strategies import MirroredStrategy
from replica_engine.strategies.backend import compiles
from replica_engine.values import samples

DEFAULT_ROWS = 32
"""The number of rows of a batch if neither the user nor the data gives it."""

MIRRORED, TPU = "MirroredStrategy", "TPUStrategy"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The arguments that both forms share, after they are read.

    Attributes:
        replicas: the number of replicas.
        steps: the number of training steps.
        batch_size: the number of rows of a batch, or None.
        rtol: the relative tolerance, or None for the default.
        atol: the absolute tolerance.
        seed: the seed of the random numbers.
        strategies: the strategies to compare with one device, by name.
        left_out: strategies and comparisons that cannot be made here, with the reason; a check adds to it.
    """

    replicas: int
    steps: int
    batch_size: int | None
    rtol: float | None
    atol: float
    seed: int
    strategies: dict[str, tf.distribute.Strategy] = dataclasses.field(default_factory=dict)
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)


def read(
    replicas: Any, steps: Any, batch_size: Any, strategies: Any, distribution: Any, rtol: Any, atol: Any, seed: Any
) -> Settings:
    """Checks the arguments, and makes the strategies.

    Raises:
        ParityArgumentError: an argument is invalid, or no strategy can run here.
        DistributionError: `distribution` is none.
        DeviceError: there are too few devices for a strategy that was named.
        BackendMissingError: a `TPUStrategy` was named, and jax is missing.
    """
    settings = Settings(
        replicas=_positive("replicas", replicas),
        steps=_positive("steps", steps),
        batch_size=None if batch_size is None else _positive("batch_size", batch_size),
        rtol=None if rtol is None else _tolerance("rtol", rtol),
        atol=0.0 if atol is None else _tolerance("atol", atol),
        seed=int(seed),
    )
    for each in _listed(strategies):
        try:
            name, strategy = _made(each, settings.replicas)
        except (DeviceError, BackendMissingError) as error:
            if strategies is not None:
                raise
            settings.left_out[each] = str(error)
        else:
            same = sum(each.startswith(name) for each in settings.strategies)
            settings.strategies[f"{name} {same + 1}" if same else name] = strategy
    if distribution is not None:
        shown = repr(distribution) if isinstance(distribution, str) else type(distribution).__name__
        settings.strategies[f"{TPU}({shown})"] = divided_strategy(distribution, settings.replicas)
    if not settings.strategies:
        raise ParityArgumentError.nothing_to_compare(settings.left_out)
    return settings


def of_arrays(data: Any, settings: Settings, uneven: bool | None) -> list[Any]:
    """Cuts batches from arrays as an epoch does; after the last full batch it begins again.

    Args:
        data: a structure of arrays with the same number of rows.
        settings: the number and size of the batches. Without a size, the replicas divide a full batch.
        uneven: True makes the last batch one that the replicas do not divide. None makes the last batch the rest that
            the data leaves, if there is one, of at least one row per replica.

    Raises:
        BatchError: the arrays have different lengths.
        ParityArgumentError: the arrays have no rows.
    """
    data, replicas = samples.as_tensors(data), settings.replicas
    total = samples.count(data)
    if not total:
        raise ParityArgumentError.no_rows()
    size = min(settings.batch_size or max(min(DEFAULT_ROWS, total) // replicas, 1) * replicas, total)
    epoch = [samples.take(data, start, start + size) for start in range(0, total - size + 1, size)]
    made = _repeated(epoch, settings, bool(uneven))
    rest = total % size
    if uneven is None and rest and total > replicas:
        made[-1] = samples.take(data, total - (rest if rest >= replicas else rest + replicas), total)
    return made


def of_batches(batches: Iterable[Any], settings: Settings, uneven: bool | None) -> list[Any]:
    """The first batches of a dataset or list; after the last batch it begins again. `uneven` as in `of_arrays`.

    Raises:
        ParityArgumentError: there is no batch with rows.
    """
    epoch = [samples.as_tensors(batch) for batch in itertools.islice(iter(batches), settings.steps)]
    return _repeated([batch for batch in epoch if samples.count(batch)], settings, bool(uneven))


def even(batch: Any, replicas: int) -> Any:
    """Shortens a batch to a multiple of `replicas` rows; fills up a smaller batch with copies of its last row."""
    total = samples.count(batch)
    if total < replicas:
        return samples.pad(batch, replicas - total)
    return samples.take(batch, 0, total - total % replicas)


def shares(batch: Any, count: int) -> list[Any]:
    """Splits a batch into `count` parts as evenly as possible; the first parts have one row more."""
    total = samples.count(batch)
    sizes = [total // count + (replica < total % count) for replica in range(count)]
    stops = list(itertools.accumulate(sizes))
    return [samples.take(batch, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def _repeated(epoch: Sequence[Any], settings: Settings, uneven: bool) -> list[Any]:
    if not epoch:
        raise ParityArgumentError.no_rows()
    made = list(itertools.islice(itertools.cycle(epoch), settings.steps))
    total = samples.count(made[-1])
    if uneven and settings.replicas > 1 and total > 1 and total % settings.replicas == 0:
        made[-1] = samples.take(made[-1], 0, total - 1)
    return made


def _listed(strategies: Any) -> list[Any]:
    if strategies is None:
        return [MIRRORED, TPU]
    if isinstance(strategies, (str, type, tf.distribute.Strategy)):
        return [strategies]
    if not isinstance(strategies, Iterable):
        raise ParityArgumentError.unknown_strategy(strategies)
    return list(strategies)


def _made(strategy: Any, replicas: int) -> tuple[str, tf.distribute.Strategy]:
    """The name of a strategy, and the strategy itself, which is made if only its name or class was given."""
    if isinstance(strategy, tf.distribute.Strategy):
        name = type(strategy).__name__
        if not isinstance(strategy, MirroredStrategy) and not compiles(strategy):
            raise ParityArgumentError.unknown_strategy(strategy)
        present = strategy.num_replicas_in_sync
        if present != (1 if is_divided(strategy) else replicas):
            raise ParityArgumentError(
                f"The {name} in strategies has {present} replicas, but replicas={replicas}. Make them equal: "
                f"check_parity(..., replicas={present}, strategies=[strategy])."
            )
        return name, strategy
    name = getattr(strategy, "__name__", strategy)
    if name == MIRRORED:
        return name, _mirrored(replicas)
    if name == TPU:
        return name, compiled_strategy(replicas)
    raise ParityArgumentError.unknown_strategy(strategy)


def _mirrored(replicas: int) -> tf.distribute.Strategy:
    gpus = tf.config.list_logical_devices("GPU") if thread_state.started() else []
    if len(gpus) >= replicas:
        return MirroredStrategy([device.name for device in gpus[:replicas]])
    return MirroredStrategy(logical_devices(replicas))


def _positive(name: str, value: Any) -> int:
    number = positive_int(value)
    if number is None:
        raise ParityArgumentError(f"{name} must be a positive int; got {shown(value)}.")
    return number


def _tolerance(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not float(value) >= 0:
        raise ParityArgumentError(f"{name} must be a number, 0 or larger, or None for the default; got {shown(value)}.")
    return float(value)
