"""The logical devices of a replica: as many as it has devices, from number 0."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

from replica_engine.errors import DeviceError


def logical_device(logical_device_id: int, count: int) -> contextlib.AbstractContextManager[None]:
    """A block whose variables and ops are on a device of their replica; see `TPUFacts`.

    Raises:
        DeviceError: a replica has no device of this number.
    """
    check("experimental_logical_device", logical_device_id, count)
    return contextlib.nullcontext()


def check(method: str, logical_device_id: Any, count: int) -> None:
    """Raises DeviceError for a logical device that none of the `count` devices of a replica is."""
    if not 0 <= as_int(logical_device_id) < count:
        raise DeviceError.no_logical_device(method, logical_device_id, count)


def as_int(value: Any) -> int:
    """The value as an int; -1 for a value that is not an integer, which the caller's check then refuses."""
    try:
        return operator.index(value)
    except TypeError:
        return -1
