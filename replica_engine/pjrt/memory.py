"""How much memory a CPU device can have: what the machine has, or as much of it as this process may use."""

from __future__ import annotations

import contextlib
import os

from replica_engine.pjrt.group import DeviceGroup


def memory_limit(devices: DeviceGroup) -> int | None:
    """The limit in bytes; None if it is unknown, as for GPUs and TPUs, which report it themselves when memory runs out.

    No single allocation can be larger. Several allocations that together exceed the limit may succeed, since the
    operating system needs to find memory only for pages that are written.
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
    """Bytes of the address space limit that this process already uses."""
    with contextlib.suppress(OSError, AttributeError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _swap() -> int:
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0
