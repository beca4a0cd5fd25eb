"""How much memory a CPU device can have: what the machine has, or what this process may use of it."""

from __future__ import annotations

import contextlib
import os

from replica_engine.pjrt.group import DeviceGroup


def memory_limit(devices: DeviceGroup) -> int | None:
    """In bytes; None if it is not known, as of GPUs and TPUs, which say themselves when they have no more.

    No single allocation can be larger. The system may grant several that are together, since it has to find memory for
    what is written only.
    """
    if devices.platform != "cpu":
        return None
    limits = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _swap())
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            limits.append(max(1, soft - _mapped()))
    return min((limit for limit in limits if limit > 0), default=None)


def _mapped() -> int:
    """What this process has of that limit already."""
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _swap() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0
