"""The logical devices of a replica, of which there is one: number 0."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from replica_engine.errors import DeviceError


def logical_device(logical_device_id: int) -> contextlib.AbstractContextManager[None]:
    """A block whose variables and ops are on a device of their replica; see `TPUFacts`.

    Raises:
        DeviceError: `logical_device_id` is not 0.
    """
    check_only("experimental_logical_device", logical_device_id)
    return contextlib.nullcontext()


def check_only(method: str, logical_device_id: Any) -> None:
    """Raises DeviceError for a logical device other than the only one."""
    if as_int(logical_device_id) != 0:
        raise DeviceError.one_a_replica(method, "logical_device_id", logical_device_id)


def as_int(value: Any) -> int:
    """The value as an int; -1 for a value that is not an integer, which the caller's check then refuses."""
    try:
        return operator.index(value)
    except TypeError:
        return -1
