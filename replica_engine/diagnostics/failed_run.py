"""What a failed run leaves: its last sync points, as a note on the exception and optionally in a file.

If the environment variable REPLICA_ENGINE_DUMP_DIR names a folder, each failed run writes a JSON file there. The file
has the exception, the position of each replica, the last sync points of each replica, and the stacks of all threads.
Writing the file must never hide the exception itself, so errors in this module are only logged.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence

from replica_engine.diagnostics.flight_record import SyncPointRecord, as_json, lasts
from replica_engine.errors import ReplicaRow, ReplicaTimeoutError
from replica_engine.errors.base import add_note
from replica_engine.errors.threads import note_workers
from replica_engine.process import folders
from replica_engine.telemetry.watchdog import workers

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
        note_workers(error, workers())
    folder = folders.of_environment(os.environ.get(VARIABLE, ""))
    if run is None and not folder:
        return
    lines, path = [], None
    try:
        found = record()
        lines = lasts(found, run)
        if folder:
            path = _dump(folder, error, found)
    except Exception:
        _log.exception("The record of a failed run could not be collected or written to %s (%s).", folder, VARIABLE)
    if lines:
        add_note(error, "last sync points of the run:\n" + "\n".join(f"  {line}" for line in lines))
    if path:
        add_note(error, f"the full record of the run: {path}")


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
