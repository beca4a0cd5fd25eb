"""A merge call as the engine sees it."""

import dataclasses
from typing import Any

from replica_engine.engine import Replica, SyncPoint

MEETING = SyncPoint("merge_fn", "user.py", 1, "fn", identity="merge_fn")


def meet(replica: Replica, value: Any = None, point: SyncPoint = MEETING) -> Any:
    """One merge call."""
    return replica.pause(dataclasses.replace(point), value)
