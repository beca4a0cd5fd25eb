"""Programs that were left behind: nobody waits for them, and they may never end.

A client of jaxlib that is destroyed waits for its threads, and so for its programs. Destroyed while one of these runs,
by the garbage collector or at the exit of the process, it would wait for ever. So devices that a program was left on
are kept, and at exit the client of those on which it still runs is left undestroyed.
"""

from __future__ import annotations

import atexit
import ctypes
import os

from replica_engine.pjrt.group import DeviceGroup

_LAST_CALLS = 5.0  # seconds at exit for a program that calls Python; its calls return at once

_left: dict[DeviceGroup, bool] = {}  # with whether the program may call the host


def add(devices: DeviceGroup, calls_host: bool = False) -> None:
    """The program that was launched last on these devices is left behind, if it has not ended."""
    for other in [other for other in _left if other.ends_within(0.0)]:
        _left.pop(other, None)
    if not devices.ends_within(0.0):
        _left[devices] = calls_host or _left.get(devices, False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_left.clear)


@atexit.register
def _at_exit() -> None:
    """A program must not call Python when there is none any more, and the process must not wait for it."""
    for devices, calls_host in _left.items():
        if not devices.ends_within(_LAST_CALLS if calls_host else 0.0):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(devices.devices[0].client))
