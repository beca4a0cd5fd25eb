"""replica_engine: run one TensorFlow function on N replicas.

The map of the house; imports run one way, from the top of this list to the bottom:

    demo/        the program behind `python -m replica_engine demo`, to read and to copy
    trace_report/  the program behind `python -m replica_engine timeline`
    testing/     helpers for tests, yours too: parity check, logical devices, leak check, scripted interleavings
    keras/       replicate_model: a Keras model on N replicas, in one line
    compat/      the names of the past, for programs that were written for them
    strategies/  MirroredStrategy, TPUStrategy, and the base to write your own on
    xla/         a replica body on its way: traced, lowered, compiled; collectives; variables on devices
    replica/     what a replica is to TensorFlow: its context, the state it inherits, values, variables
    pjrt/        the runtime of compiled programs; nothing else imports jax
    engine/      replica threads and the sync points where they meet; standard library only
    telemetry/   who is late, and where the time goes: watchdog and timeline; standard library only
    process/shutdown.py  the end of the process in the middle of a run
    process/pool.py   enough threads for TensorFlow, so that launches and what they call do not starve each other
    errors/      every exception, with its wording
    _tf/     every private TensorFlow name, each with its reason

>>> import replica_engine
>>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
>>> strategy.run(lambda x: x + 1, args=(1,))
2

TensorFlow is imported when a name that needs it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from replica_engine import errors
from replica_engine._version import __version__
from replica_engine.process.pool import FOR_ONE_LAUNCH, make_room

if TYPE_CHECKING:
    from replica_engine import compat, keras, strategies, testing, xla
    from replica_engine.replica import ReplicaContext, call_for_each_replica, sync_points
    from replica_engine.strategies import MirroredStrategy
    from replica_engine.strategies.tpu import TPUStrategy
    from replica_engine.telemetry.timeline import timeline
    from replica_engine.values.uneven_batches import join_outputs, split_batch

__all__ = [
    "MirroredStrategy",
    "ReplicaContext",
    "TPUStrategy",
    "__version__",
    "call_for_each_replica",
    "compat",
    "errors",
    "join_outputs",
    "keras",
    "split_batch",
    "strategies",
    "sync_points",
    "testing",
    "timeline",
    "xla",
]

_HOME = {
    "MirroredStrategy": "replica_engine.strategies",
    "ReplicaContext": "replica_engine.replica",
    "TPUStrategy": "replica_engine.strategies.tpu",
    "call_for_each_replica": "replica_engine.replica",
    "join_outputs": "replica_engine.values.uneven_batches",
    "split_batch": "replica_engine.values.uneven_batches",
    "sync_points": "replica_engine.replica",
    "timeline": "replica_engine.telemetry.timeline",
}
_PACKAGES = ("compat", "keras", "strategies", "testing", "xla")

make_room(FOR_ONE_LAUNCH)


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"replica_engine.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'replica_engine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
