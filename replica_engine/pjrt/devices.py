"""The devices of each platform: TPUs and GPUs as jax finds them, CPU devices in any number; the memory of a device."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import Any

from replica_engine import workers
from replica_engine.errors import DeviceError, base
from replica_engine.pjrt import accelerators, jaxlib, job_devices
from replica_engine.pjrt.device_group import DeviceGroup, let_go
from replica_engine.pjrt.partitioned_group import make_device_group
from replica_engine.pjrt.stablehlo.partition_local import ReplicaMesh
from replica_engine.process import cores

PLATFORMS = ("tpu", "gpu", "cpu")
"""The platforms, in the order of preference."""

MOST_CPU_DEVICES = 1024
"""The most CPU devices. Each costs a few threads; more than this is a mistake in the program."""

_lock = threading.Lock()
# Kept: strategies with as many replicas share a group, so they can use each other's variables where these are.
_cpu_groups: dict[tuple[int, ReplicaMesh | None], DeviceGroup] = {}


def device_group(platform: str | None = None, count: int | None = None, mesh: ReplicaMesh | None = None) -> DeviceGroup:
    """The first `count` devices of a platform.

    Args:
        platform: "tpu", "gpu" or "cpu"; None takes the first of these that the machine has.
        count: how many. None takes all TPUs or GPUs. CPU devices are made on request; None makes one for each core
            that the process may use.
        mesh: the devices of each replica, if it has several; `count` divides by their number.

    Raises:
        DeviceError: the platform is unknown, has no device here, could not start, has fewer than `count`, or cannot run
            one program on so many.
    """
    if count is not None:
        count = _number(count)
    platform = platform_named(platform) or _best()
    if platform == "cpu":
        count = count or cores()
        if count > MOST_CPU_DEVICES:
            raise DeviceError.too_many(count, MOST_CPU_DEVICES)
        let_go()
        with _lock:
            group = _cpu_groups.get((count, mesh))
            # While an abandoned program runs, its devices are busy, perhaps forever: a new client has others.
            if group is None or (group.interrupted and not group.ends_within(0.0)):
                group = _cpu_groups[count, mesh] = _cpu_group(count, mesh)
            return group
    devices = _accelerators(platform)
    if not devices:
        raise accelerators.make_missing_error(
            platform, [name for name in PLATFORMS if name == "cpu" or _accelerators(name)]
        )
    if count is not None and count > len(devices):
        present = len(devices)
        raise DeviceError(
            f"{count} replicas need {count} {platform.upper()} devices, but this process has {present}. Ask for "
            f"{present} or fewer, or run on CPU devices, which are made in the number that you ask for: "
            f"TPUStrategy(xla.PjrtClusterResolver('cpu'), num_cores={min(count, 1024)})."
        )
    if platform == "tpu" and count is not None:
        accelerators.check_devices(devices, count)
    return _group(platform, devices[:count], mesh)


def group_of_job(
    cluster: workers.Cluster,
    platform: str | None,
    count: int | None,
    versions: dict[str, str],
    mesh: ReplicaMesh | None = None,
) -> DeviceGroup:
    """The devices of all workers of a job; joins it, if this process has not joined it before.

    Args:
        cluster: the place of this process in the job.
        platform: as for `device_group`; the same on all workers.
        count: the number of devices of all workers, which all have equally many. None takes all of each; on CPU, one
            for each core.
        versions: the versions of packages that must be equal on all workers, besides those of jax and jaxlib.
        mesh: the devices of each replica, if it has several. A worker has all devices of some, or some of one.

    Raises:
        DeviceError: the platform is unknown, or there are fewer devices, or the workers cannot share them evenly.
        ClusterConfigError, WorkersMissingError, WorkerVersionError, WorkerLostError: see `workers.join`.
    """
    own = None
    if count is not None:
        own, left = divmod(_number(count), cluster.num_processes)
        if left:
            less, more = max(own, 1) * cluster.num_processes, (own + 1) * cluster.num_processes
            raise DeviceError(
                f"num_cores={count} counts the devices of all workers, and {cluster.num_processes} workers cannot have "
                f"equally many. Write num_cores={more if less == more else f'{less} or {more}'}, or leave it out: then "
                "each worker takes all that it has."
            )
        if own > MOST_CPU_DEVICES:
            raise DeviceError.too_many(own, MOST_CPU_DEVICES)
    platform = platform_named(platform) or (None if accelerators.may_be_there() else "cpu")
    if mesh is not None and own is not None and own % mesh.size and mesh.size % own:
        raise DeviceError(
            f"Each worker has {own} devices and each replica {mesh.size}. A worker must have all devices of some "
            "replicas, or some of those of one: choose num_cores or cores_per_replica so that one number divides the "
            "other."
        )
    return job_devices.group_of_job(cluster, platform, own, versions, mesh)


def platform_named(platform: str | None) -> str | None:
    """A platform's name in small letters; None for None.

    Raises:
        DeviceError: the platform is unknown.
    """
    if platform is None:
        return None
    if not isinstance(platform, str) or platform.lower() not in PLATFORMS:
        raise DeviceError(
            f"No such platform: {base.shown(platform)}. Pass one of {', '.join(PLATFORMS)}, or None for the first of "
            "these that has devices."
        )
    return platform.lower()


def has_accelerators(platform: str, instead: str | None = None) -> bool:
    """Whether jax finds devices of a platform, "tpu" or "gpu", on this machine.

    Args:
        platform: the platform.
        instead: the platform that is taken if there are none; then there is a warning if they could not start.
    """
    found = bool(_accelerators(platform))
    if instead is not None and not found:
        accelerators.warn_of_fallback(platform, instead)
    return found


def memory_limit(devices: DeviceGroup) -> int | None:
    """The memory in bytes that a device can have: of CPU devices, as much of the machine's as this process may use.

    None if it is unknown. No single allocation can be larger. On CPU devices several allocations that together exceed
    the limit may succeed, since the operating system needs to find memory only for pages that are written.
    """
    if devices.platform != "cpu":
        found: dict[str, int] = devices.devices[0].memory_stats() or {}
        return found.get("bytes_limit")
    limits = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _swap())
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            limits.append(max(1, soft - _mapped()))  # 0 would count as unknown
    return min((limit for limit in limits if limit > 0), default=None)


def chip_memory(devices: DeviceGroup) -> int | None:
    """The memory in bytes of each device: of CPU devices, an equal part of the machine's. None if it is unknown."""
    limit, shared_by = memory_limit(devices), len(devices.devices) if devices.platform == "cpu" else 1
    return None if limit is None else limit // shared_by


def _cpu_group(count: int, mesh: ReplicaMesh | None) -> DeviceGroup:
    """Makes a separate CPU client for a number of devices.

    jax's own client has the number of devices that was set before jax started. A separate client leaves jax's client
    alone, and has at least one thread for each device, which replicas that wait for each other need.
    """
    client: Any = jaxlib.make_cpu_client(num_devices=count)
    return make_device_group("cpu", tuple(client.devices()), mesh)


_group = functools.cache(make_device_group)


@functools.cache
def _accelerators(platform: str) -> tuple:
    if not accelerators.may_be_there():
        return ()
    return accelerators.local(platform)


def _best() -> str:
    """The first platform that has devices. If one before it could not start, there is a warning."""
    best = next(name for name in PLATFORMS if name == "cpu" or _accelerators(name))  # CPU devices are made on request
    for before in PLATFORMS[: PLATFORMS.index(best)]:
        accelerators.warn_of_fallback(before, best)
    return best


def _number(count: object) -> int:
    """A number of devices; NumPy integers are accepted too."""
    number = base.positive_int(count)
    if number is None:
        raise DeviceError.bad_count(count, "num_cores, the number of devices,")
    return number


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
