"""Abandoned programs: nothing waits for them, and they may never end.

When a client of jaxlib is destroyed, it waits for its threads, and so for its programs. If the garbage collector or the
exit of the process destroyed it while an abandoned program runs, it would wait for ever. So devices with an abandoned
program are kept alive. At exit the client of devices on which such a program still runs is never destroyed.
"""

from __future__ import annotations

import atexit
import ctypes
import os

from replica_engine.pjrt.group import DeviceGroup

_LAST_CALLS = 5.0  # seconds at exit for a program that calls Python, whose calls return at once, or returns to it

_left: dict[DeviceGroup, bool] = {}  # devices with an abandoned program; whether the program may call the host


def add(devices: DeviceGroup, calls_host: bool = False) -> None:
    """Notes that the program launched last on these devices is abandoned, unless it has ended."""
    let_go()
    if not devices.ends_within(0.0):
        _left[devices] = calls_host or _left.get(devices, False)


def let_go() -> None:
    """Forgets the devices whose program has ended, so that they can be freed."""
    for devices in [devices for devices in list(_left) if devices.ends_within(0.0)]:  # other threads change it too
        _left.pop(devices, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_left.clear)


@atexit.register
def _at_exit() -> None:
    """At exit: no program may call Python once Python is gone, nor return to it, and none is waited for for long.

    A thread in the launch of a program with a limit returns at the end of the program, on some devices. If Python has
    gone by then, the process is aborted.
    """
    for devices, calls_host in list(_left.items()):
        if not devices.ends_within(_LAST_CALLS if calls_host or devices.is_left_to_a_thread else 0.0):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(devices.devices[0].client))
