"""The devices of a strategy: parses, checks and completes device names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine.errors import DeviceError
from replica_engine.threads.call import short_name

_MOST_NAMED = 4


def resolve_devices(devices: Sequence[str | tf.config.LogicalDevice] | None) -> list[str] | None:
    """Returns the full names of `devices`.

    Args:
        devices: names such as "CPU:0", "/gpu:1", "/device:GPU:1", or `tf.config.LogicalDevice`s; one of them alone is
            a list of one. None, or an empty list, means all GPUs, or all CPUs on a machine without GPUs.

    Returns:
        Full names in the order given; None where TensorFlow must choose, which is the case in tf.compat.v1 graphs.

    Raises:
        DeviceError: a device does not exist, is named twice, or is of another kind than the rest.
    """
    eager = tf.compat.v1.executing_eagerly_outside_functions()
    given = listed(devices)
    if not given:
        if not eager:
            return None
        given = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    names = [_full_name(device) for device in given]
    if len(set(names)) < len(names):
        twice = sorted({short_name(name) for name in names if names.count(name) > 1})
        raise DeviceError(
            f"No duplicates allowed in `devices`: {', '.join(twice)}. One replica runs on each device, so name each "
            "device once. For several replicas on one CPU, make logical devices: "
            "replica_engine.logical_devices(n)."
        )
    kinds = sorted({tf.DeviceSpec.from_string(name).device_type for name in names})
    if len(kinds) > 1:
        raise DeviceError(
            f"`devices` mixes kinds ({', '.join(kinds)}), so the slowest kind would delay every step. Pass devices "
            "of one kind."
        )
    if eager:  # In a tf.compat.v1 program the session decides which devices exist.
        _check_exist(names, kinds[0])
    return names


def described(strategy: tf.distribute.Strategy, devices: Sequence[str]) -> str:
    """A strategy in one line: "MirroredStrategy(2 replicas: CPU:0, CPU:1)".

    Args:
        strategy: the strategy.
        devices: the devices of this process, as messages name them; of a worker: "worker:0/CPU:1", "worker 0, CPU:1".
    """
    size = strategy.num_replicas_in_sync
    devices = [re.split(r"/|, ", device)[-1] for device in devices]
    named = [*devices[: _MOST_NAMED - 2], "...", devices[-1]] if len(devices) > _MOST_NAMED else devices
    here = "" if len(devices) == size else ", on this worker"
    return f"{type(strategy).__name__}({size} replica{'' if size == 1 else 's'}{here}: {', '.join(named)})"


def listed(devices: object) -> list[Any]:
    """The devices that the user named, as `resolve_devices` takes them; none if they are left to it."""
    if devices is None:
        return []
    if isinstance(devices, (str, bytes, tf.config.LogicalDevice)):
        return [devices]
    if not isinstance(devices, Iterable):
        raise DeviceError.unreadable(devices)
    try:
        return list(devices)
    except Exception:  # a scalar array, or a tensor that cannot be iterated
        raise DeviceError.unreadable(devices) from None


def _full_name(device: object) -> str:
    name = device.name if isinstance(device, tf.config.LogicalDevice) else device
    if not isinstance(name, str) or not name.strip():  # TensorFlow takes no name for any device
        raise DeviceError.unreadable(device)
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        full = distribute.resolve(name)
        if tf.DeviceSpec.from_string(full).device_type is not None:
            return full
    raise DeviceError.unreadable(device)


def _check_exist(names: list[str], kind: str) -> None:
    present = {device.name for device in tf.config.list_logical_devices()}
    known = {(spec.device_type, spec.device_index) for spec in map(tf.DeviceSpec.from_string, present)}
    missing = []
    for name in names:
        spec = tf.DeviceSpec.from_string(name)
        if spec.job in (None, "localhost") and (spec.device_type, spec.device_index) not in known:
            missing.append(short_name(name))
    if missing:
        more = (
            "To make more CPU devices, call replica_engine.logical_devices(n) before TensorFlow starts"
            if kind == "CPU"
            else f"tf.config.list_physical_devices({kind!r}) lists the {kind} devices that TensorFlow finds"
        )
        raise DeviceError(
            f"No such device: {', '.join(missing)}. This process has {', '.join(sorted(map(short_name, present)))}. "
            f"{more}."
        )
