"""The flight record: the last sync points of each replica, and what a failed run leaves of them.

A record says what a replica brought to a sync point, when, and from which line. It is data, to print, compare and write
to a file. Records have two sources:

- The engine keeps the last sync points of each replica thread as they happen.
- A compiled program runs on the devices, where the host cannot observe it. The host knows only its collectives, in the
  order in which they were traced, and the times of the launch and of its end.

A failed run leaves its last sync points as a note on the exception. If the environment variable REPLICA_ENGINE_DUMP_DIR
names a folder, it also writes a JSON file there, with the exception, the position of each replica, the last sync points
of each replica, and the stacks of all threads. Collecting or writing this must never hide the exception itself, so
errors in `note_failed_run` are only logged.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.engine import SyncPoint
from replica_engine.errors import ReplicaRow, ReplicaTimeoutError, base, run_errors
from replica_engine.process import setup
from replica_engine.upstream import eager
from replica_engine.values.structure import LEAVES, flatten
from replica_engine.watch import timeline, watchdog


class Brought(NamedTuple):
    """A tensor that a replica brought to a sync point, described without its value.

    For a sparse tensor (`sparse`), the shape does not tell its size in bytes. For `tf.IndexedSlices`, the shape is that
    of the values.
    """

    dtype: tf.DType | np.dtype
    shape: tf.TensorShape | tuple[int, ...]
    sparse: bool


class CollectiveCall(NamedTuple):
    """A collective of a compiled body.

    Attributes:
        kind: "all_reduce", "all_gather", ...
        where: the user's line.
        dtype: the dtype of its operand.
        shape: the shape of its operand.
    """

    kind: str
    where: str
    dtype: tf.DType
    shape: tf.TensorShape


class LaunchRecord(NamedTuple):
    """One launch that has ended.

    Attributes:
        number: the number of the launch.
        collectives: the collectives of the program.
        began: the start, in seconds of `time.perf_counter`.
        ended: the end, in seconds of `time.perf_counter`.
    """

    number: int
    collectives: list[CollectiveCall]
    began: float
    ended: float


@dataclasses.dataclass(frozen=True)
class SyncPointRecord:
    """One sync point that one replica reached.

    Attributes:
        replica: the index of the replica, from 0.
        size: the number of replicas.
        device: the replica's device, in the short form "CPU:1".
        run: the number of the run, counted for this strategy.
        number: the 1-based index of this sync point in the replica's run.
        kind: "merge_call", "all_reduce", "all_gather", ...
        name: the name of the merge function, or of the function that the user called.
        where: the user's line, as "file:line in function"; "" if it is unknown.
        dtypes: the names of the dtypes of the tensors that the replica brought.
        shapes: for each tensor a tuple of sizes, in which None is an unknown size; None for a shape of unknown rank.
        bytes: the total size of the tensors, in bytes, as far as it is known.
        arrived: the time when the replica arrived, in seconds since the epoch.
        waited: the seconds until all replicas had arrived; 0.0 if the replica did not go on; None if it is unknown, as
            in a compiled program.
        merge: the seconds that the merge took; 0.0 and None as for `waited`.
        left: the time when the replica went on, in seconds since the epoch; None if it did not go on.
        traced: whether a function was being traced; then the record stands for each execution of the function. If the
            function has marks and has run, the times are those of its last execution.
        worker: the worker whose replica this is, if the job has several; replicas are counted in their worker.
    """

    replica: int
    size: int
    device: str
    run: int
    number: int
    kind: str
    name: str
    where: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...] | None, ...]
    bytes: int
    arrived: float
    waited: float | None
    merge: float | None
    left: float | None
    traced: bool
    worker: int | None = None

    def __str__(self) -> str:
        of = "" if self.worker is None else f"worker {self.worker}, "
        waited = "" if self.waited is None or self.left is None else f", waited {self.waited:.3g} s"
        return f"{of}replica {self.replica} of {self.size} ({self.device}): {self.text}{waited}"

    @property
    def text(self) -> str:
        """The sync point without its replica: "all_reduce at train.py:12 in step: float32[3], 12 bytes"."""
        tensors = [dtype + _shape_text(shape) for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        size = f", {self.bytes:,} bytes" if self.bytes else ""  # unknown for sparse tensors and strings
        values = f": {_shortened(tensors)}{size}" if tensors else ""
        where = f" at {self.where}" if self.where else ""
        return f"{self.name}{where}{values}"


class SyncPoints(list[SyncPointRecord]):
    """A list of records that prints one in a line, and that a notebook shows as a table."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def _repr_html_(self) -> str:
        columns = ("replica", "device", "run", "number", "sync point", "where", "tensors", "waited", "merge")
        rows = [
            (
                record.replica,
                record.device,
                record.run,
                record.number,
                record.name,
                record.where,
                ", ".join(d + _shape_text(s) for d, s in zip(record.dtypes, record.shapes, strict=True)),
                _milliseconds(record.waited),
                _milliseconds(record.merge),
            )
            for record in self
        ]
        return timeline.table(f"{len(self)} sync points", columns, rows)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"


def brought(args: Any, kwargs: object) -> tuple[Brought, ...]:
    """Describes the tensors in the arguments of a merge call."""
    found: list[Brought] = []
    is_flat = not kwargs and type(args) in (tuple, list) and LEAVES.issuperset(map(type, args))
    for value in args if is_flat else flatten((args, kwargs), what="the arguments of a merge call")[0]:
        if type(value) is eager.EagerTensor:
            found.append(Brought(value.dtype, eager.read_shape(value), False))
        elif isinstance(value, (tf.Tensor, np.ndarray)):
            found.append(Brought(value.dtype, value.shape, False))
        elif isinstance(value, tf.IndexedSlices):
            found.append(Brought(value.dtype, value.values.shape, True))
        elif isinstance(value, (tf.SparseTensor, tf.RaggedTensor)):
            found.append(Brought(value.dtype, value.shape, True))
    return tuple(found)


class Executed(NamedTuple):
    """The last execution of a sync point that was traced, for one replica, in seconds since the epoch.

    Attributes:
        arrived: when the replica arrived.
        together: when all had.
        left: when the replica went on; 0.0 if it has not.
    """

    arrived: float
    together: float
    left: float


Executions = Mapping[tuple[int, int, int], Executed]
"""By run, number in the run, and replica."""


def records(
    rings: Sequence[Iterable[SyncPoint]],
    devices: Sequence[str],
    worker: int | None = None,
    executions: Executions = MappingProxyType({}),
) -> SyncPoints:
    """The engine's record as data, in the order in which replicas arrived.

    Args:
        rings: for each replica, its last sync points.
        devices: the devices of the replicas, in the short form "CPU:1".
        worker: the worker that this process is, if the job has several.
        executions: the last execution of those that were traced.
    """
    offset = time.time() - time.perf_counter()
    found = [
        _with_times(_record(point, replica, devices, offset, worker), executions)
        for replica, ring in enumerate(rings)
        for point in list(ring)  # copied at once: the replica may be adding to it
    ]
    return SyncPoints(sorted(found, key=lambda record: (record.arrived, record.replica)))


def _with_times(record: SyncPointRecord, executions: Executions) -> SyncPointRecord:
    """The record with the times of the last execution, if there is one."""
    last = executions.get((record.run, record.number, record.replica)) if record.traced else None
    if last is None:
        return record
    waited = max(0.0, last.together - last.arrived) if last.left else 0.0
    merge = max(0.0, last.left - last.together) if last.left else 0.0
    return dataclasses.replace(record, arrived=last.arrived, waited=waited, merge=merge, left=last.left or None)


def _record(
    point: SyncPoint, replica: int, devices: Sequence[str], offset: float, worker: int | None
) -> SyncPointRecord:
    began, ended = point.merged
    waited, merge, left = 0.0, 0.0, None
    if point.left:
        waited, merge, left = began - point.arrived, ended - began, point.left + offset
    times = point.arrived + offset, waited, merge, left
    rest = point.kind, point.name, point.where, *as_data(point.values), *times, point.traced, worker
    return SyncPointRecord(replica, len(devices), devices[replica], point.run, point.number, *rest)


def launch_records(launches: Iterable[LaunchRecord], devices: Sequence[str], most: int) -> list[SyncPointRecord]:
    """The collectives of the last launches as data, in the order of time.

    Args:
        launches: the launches, the last one at the end.
        devices: the devices of the replicas, in the short form "CPU:1".
        most: the largest number of sync points to return for each replica.
    """
    offset = time.time() - time.perf_counter()
    chosen: list[tuple[LaunchRecord, int, CollectiveCall]] = []
    for launch in reversed(list(launches)):
        numbered = list(enumerate(launch.collectives, start=1))
        chosen += [(launch, number, collective) for number, collective in reversed(numbered)]
        if len(chosen) >= most:
            break
    found = SyncPoints()
    for launch, number, (kind, where, dtype, shape) in reversed(chosen[:most]):
        times = launch.began + offset, None, None, launch.ended + offset  # one program: nobody sees waits and merges
        rest = launch.number, number, kind, kind, where, *as_data([Brought(dtype, shape, False)]), *times, False
        found += [SyncPointRecord(replica, len(devices), device, *rest) for replica, device in enumerate(devices)]
    return found


def as_data(values: Iterable[Brought]) -> tuple[tuple[str, ...], tuple[tuple[int | None, ...] | None, ...], int]:
    """Returns the names of the dtypes, the shapes as tuples, and the total size in bytes."""
    dtypes, shapes, total = [], [], 0
    for value in values:
        shape = tf.TensorShape(value.shape)
        sizes = None if shape.rank is None else tuple(shape)
        dtypes.append(value.dtype.name)
        shapes.append(sizes)
        if sizes is not None and None not in sizes and not value.sparse:
            total += math.prod(sizes) * _element_bytes(value.dtype)
    return tuple(dtypes), tuple(shapes), total


def lasts(found: Sequence[SyncPointRecord], run: int | None, most: int = 3) -> list[str]:
    """The last `most` sync points of a run as lines of text; replicas with the same sync points share an entry."""
    by_replica: dict[int, list[str]] = {}
    for record in found:
        if record.run == run:
            by_replica.setdefault(record.replica, []).append(record.text)
    alike: dict[tuple[str, ...], list[int]] = {}
    for replica, points in sorted(by_replica.items()):
        alike.setdefault(tuple(points[-most:]), []).append(replica)
    lines = []
    for last, replicas in alike.items():
        lines.append(f"{'replica' if len(replicas) == 1 else 'replicas'} {', '.join(map(str, replicas))}:")
        lines += [f"  {point}" for point in last]
    return lines


def as_json(found: Iterable[SyncPointRecord]) -> list[dict[str, object]]:
    """The records as dictionaries, for a JSON file."""
    return [dataclasses.asdict(record) for record in found]


def texts(values: Iterable[Brought]) -> list[str]:
    """The dtype and shape of each value, as in "float32[2, ?]"."""
    dtypes, shapes, _ = as_data(values)
    return [f"{dtype}{_shape_text(shape)}" for dtype, shape in zip(dtypes, shapes, strict=True)]


def _element_bytes(dtype: tf.DType | np.dtype) -> int:
    """The size of one element, in bytes; 0 for strings, whose sizes vary."""
    return (dtype.size or 0) if isinstance(dtype, tf.DType) else dtype.itemsize


def _shape_text(shape: tuple[int | None, ...] | None) -> str:
    if shape is None:
        return "[...]"
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"


def _shortened(tensors: list[str]) -> str:
    return ", ".join(tensors) if len(tensors) <= 4 else f"{', '.join(tensors[:3])} and {len(tensors) - 3} more"


# What a failed run leaves.

VARIABLE = "REPLICA_ENGINE_DUMP_DIR"

_numbers = itertools.count()
_log = logging.getLogger("replica_engine")


def note_failed_run(error: BaseException, record: Callable[[], Sequence[SyncPointRecord]], run: int | None) -> None:
    """Adds the last sync points of a run to the exception that ended it, and writes the file.

    Args:
        error: the exception; it gets a note.
        record: returns the sync points of this run and of earlier runs.
        run: the number of the run; None if it is unknown which of its sync points the run reached.
    """
    if isinstance(error, ReplicaTimeoutError):
        run_errors.note_workers(error, watchdog.workers())
    folder = setup.resolve_environment_path(os.environ.get(VARIABLE, ""))
    if run is None and not folder:
        return
    lines, path = [], None
    try:
        found = record()
        lines = lasts(found, run)
        if folder:
            path = _dump(folder, error, found)
    except Exception:  # a record that cannot be written must not hide the exception that it is about
        _log.exception("The record of a failed run could not be collected or written to %s (%s).", folder, VARIABLE)
    if lines:
        base.add_note(error, "last sync points of the run:\n" + "\n".join(f"  {line}" for line in lines))
    if path:
        base.add_note(error, f"the full record of the run: {path}")


def _dump(folder: str, error: BaseException, found: Sequence[SyncPointRecord]) -> str:
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"replica_engine-{os.getpid()}-{next(_numbers)}.json")
    data = {
        "time": time.time(),
        "pid": os.getpid(),
        "program": sys.argv,
        "error": {
            "type": f"{type(error).__module__}.{type(error).__qualname__}",
            "message": str(error),
            "notes": list(getattr(error, "__notes__", ())),
            "traceback": traceback.format_exception(error),
        },
        "replicas": [dataclasses.asdict(row) for row in getattr(error, "rows", ()) if isinstance(row, ReplicaRow)],
        "sync_points": as_json(found),
        "threads": _stacks(),
    }
    with open(path, "w") as file:
        json.dump(data, file, indent=1, default=str)
    return path


def _stacks() -> list[dict[str, str | list[str]]]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [  # no local variable has the frames: one of them would be this call's, and would hold itself
        {"thread": names.get(ident, str(ident)), "stack": traceback.format_stack(frame)}
        for ident, frame in sys._current_frames().items()
    ]
