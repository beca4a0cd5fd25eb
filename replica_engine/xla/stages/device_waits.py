"""When each replica of a compiled program came to each collective, for timelines: XLA's profiler saw it.

All replicas run inside one program, and the host sees when it begins and ends. XLA:CPU tells its profiler of each
operation of each device, and, inside the operation, of the wait in which devices meet ("Rendezvous"). So while a
timeline records, launches are profiled. What a replica waits for the last one is drawn inside its span of the program;
the rest of that span is its work, by which stragglers are found.

Reading a profile takes some milliseconds, so a launch is profiled if the reading before took less than a fifth of the
time since. A process has one profiler: while the user's runs, nothing is drawn.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, NamedTuple

from replica_engine.pjrt.group import DeviceGroup
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS, ProfileOptions, ProfilerSession, TraceAnnotation
from replica_engine.telemetry import timeline

REST = 4  # times as long as the last reading took
_CLOCK = "replica_engine: clock"  # an event whose time is known on the clock of timelines
_MEETING = "Rendezvous"


class Wait(NamedTuple):
    """A wait of a replica in a collective.

    Attributes:
        replica: its number in the group of devices.
        name: XLA's name for the collective.
        begin: when the replica came, in seconds of `timeline.now`.
        end: when the last one came.
    """

    replica: int
    name: str
    begin: float
    end: float


class seen:
    """A context manager around the launch of a program and the wait for its end.

    Args:
        devices: the devices of the program.

    Attributes:
        waits: the waits, once the block is over; those of replicas that waited.
    """

    _rests_until = 0.0

    def __init__(self, devices: DeviceGroup):
        self.waits: list[Wait] = []
        self._devices = devices
        self._session: Any = None
        self._clock = 0.0

    def __enter__(self) -> seen:
        devices = self._devices
        one_process = devices.member is None and devices.mesh is None and devices.platform == "cpu"
        if one_process and devices.size > 1 and timeline.keeps_spans() and timeline.now() > seen._rests_until:
            options = ProfileOptions()
            options.python_tracer_level, options.host_tracer_level, options.enable_hlo_proto = 0, 1, False
            self._session = ProfilerSession(options)
            self._clock = timeline.now()
            with TraceAnnotation(_CLOCK):
                pass
        return self

    def __exit__(self, kind: object, error: BaseException | None, frames: TracebackType | None) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        began = time.perf_counter()
        try:
            profile = session.stop_and_get_profile_data()
        except RUNTIME_ERRORS:  # the user's profiler runs, and this one never began
            return
        if error is None:
            replicas = {device.id: number for number, device in enumerate(self._devices.devices)}
            self.waits = list(_waits(profile, replicas, self._clock))
        ended = time.perf_counter()
        seen._rests_until = ended + REST * (ended - began)


def _waits(profile: Any, replicas: Mapping[int, int], clock: float) -> Iterator[Wait]:
    """The waits in a profile whose clock event was at `clock`."""
    lines = [sorted(line.events, key=lambda event: event.start_ns) for plane in profile.planes for line in plane.lines]
    zero = next((event.start_ns for line in lines for event in line if event.name == _CLOCK), None)
    if zero is None:
        return
    came: dict[tuple[str, int], dict[int, float]] = {}
    made: Counter[tuple[str, int]] = Counter()
    for name, replica, begin in sorted(_arrivals(lines, replicas), key=lambda arrival: arrival[2]):
        came.setdefault((name, made[name, replica]), {})[replica] = clock + (begin - zero) / 1e9
        made[name, replica] += 1  # in a loop, a replica comes to one collective again and again
    for (name, _), there in came.items():
        if len(there) == len(replicas):  # in a branch, some replicas meet without the others
            last = max(there.values())
            for replica, begin in there.items():
                if begin < last:
                    yield Wait(replica, name, begin, last)


def _arrivals(lines: list[list[Any]], replicas: Mapping[int, int]) -> Iterator[tuple[str, int, float]]:
    """For each wait in which devices meet: the collective, the replica, and when it began, in nanoseconds."""
    for line in lines:
        for number, event in enumerate(line):
            if event.name != _MEETING:
                continue
            for around in reversed(line[:number]):
                if around.start_ns + around.duration_ns < event.start_ns + event.duration_ns:
                    continue
                device: Any = dict(around.stats).get("device_ordinal")
                if device in replicas:
                    yield around.name, replicas[device], event.start_ns
                    break
