"""The sync points of compiled programs as data: their collectives, at each of the last launches.

A program runs on the devices out of the host's sight. So what is known is which collectives it has, in the order in
which they were traced, and when it was launched and had ended.
"""

from __future__ import annotations

import time

from replica_engine.pjrt.group import DeviceGroup
from replica_engine.replica.sync_record import Brought, SyncPointRecord, as_data
from replica_engine.xla.body import Body, Collective, LaunchRecord


def records(body: Body, devices: DeviceGroup) -> list[SyncPointRecord]:
    """The collectives of the last launches, up to `Body.KEPT` for each replica, in the order of time."""
    offset = time.time() - time.perf_counter()
    chosen: list[tuple[LaunchRecord, int, Collective]] = []
    for launch in reversed(list(body.launches)):
        numbered = list(enumerate(launch.collectives, start=1))
        chosen += [(launch, number, collective) for number, collective in reversed(numbered)]
        if len(chosen) >= body.KEPT:
            break
    return [
        _record(launch, number, collective, replica, devices, offset)
        for launch, number, collective in reversed(chosen[: body.KEPT])
        for replica in range(devices.size)
    ]


def _record(
    launch: LaunchRecord, number: int, collective: Collective, replica: int, devices: DeviceGroup, offset: float
) -> SyncPointRecord:
    dtypes, shapes, size = as_data([Brought(collective.dtype, collective.shape, False)])
    return SyncPointRecord(
        replica=replica,
        size=devices.size,
        device=devices.names[replica],
        run=launch.number,
        number=number,
        kind=collective.kind,
        name=collective.kind,
        where=collective.where,
        dtypes=dtypes,
        shapes=shapes,
        bytes=size,
        arrived=launch.began + offset,
        waited=None,
        merge=None,
        left=launch.ended + offset,
        traced=False,
    )
