"""replica_engine: run one TensorFlow function on N replicas.

Two backends run the function. `threads` runs it on one Python thread for each replica (`MirroredStrategy`); `xla`
compiles it to one program for N devices (`TPUStrategy`). The packages follow, from the top layer to the bottom;
a package imports only itself and lower layers:

    compat/       the names of TensorFlow's contrib TPUStrategy of 2018
    testing/      helpers for tests, yours too: parity check, leak check, scripted interleavings
    keras/        replicate_model: a Keras model on N replicas, in one line
    strategies/   MirroredStrategy, MultiWorkerMirroredStrategy, TPUStrategy, and ReplicaThreads, the base class for
                  your own strategy
    debugging/    debug mode: mistakes that raise nothing, found while steps run
    threads/      first backend: the replica context of a thread, its inherited state, variables, gradients
    xla/          second backend: a replica body traced, lowered, compiled and launched; host calls; device loops
    backend.py    what both backends fulfil, and how to find the one of a strategy
    traced_steps/ calls of a `tf.function` in which replicas run: watched, and ended
    diagnostics/  the user's frames and lines, the flight record, what a failed run leaves
    values/       N values to one distributed value and back; the samples of a batch
    engine/       replica threads and the sync points where they meet; standard library only
    pjrt/         the runtime of compiled programs; nothing else imports jax
    workers/      jobs of several workers: the cluster, the coordinator, the launcher; standard library only
    process/      the whole process: logical devices, TensorFlow's thread pool, exit, fork, interrupts
    watch/        the watchdog and timelines; standard library only
    errors/       every exception, and the texts that several places use
    upstream/     every private TensorFlow and Keras name, each with its reason; engine, pjrt, workers, watch and
                  errors must not import it, since they know nothing of TensorFlow

`replica.py` is a facade with the names for strategy authors. docs/architecture.md describes the protocol and the path
of a run. setup.cfg lists the layers, and import-linter checks them.

>>> import replica_engine
>>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
>>> strategy.run(lambda x: x + 1, args=(1,))
2

TensorFlow is imported when a name that needs it is first used.
"""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from replica_engine import errors
from replica_engine._version import __version__
from replica_engine.process.setup import FOR_ONE_LAUNCH, make_room

if TYPE_CHECKING:
    from replica_engine import compat, keras, strategies, testing, xla
    from replica_engine.debugging import debug
    from replica_engine.keras.backup.training_state import TrainingState
    from replica_engine.process import set_ordered_sums
    from replica_engine.process.setup import logical_devices
    from replica_engine.replica import ReplicaContext, call_for_each_replica, sync_points
    from replica_engine.strategies import MirroredStrategy
    from replica_engine.strategies.multi_worker import MultiWorkerMirroredStrategy
    from replica_engine.strategies.tpu import TPUStrategy
    from replica_engine.values.split_batches import accumulate, join_outputs, split_batch
    from replica_engine.watch.timeline import timeline

__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ReplicaContext",
    "TPUStrategy",
    "TrainingState",
    "__version__",
    "accumulate",
    "call_for_each_replica",
    "compat",
    "debug",
    "errors",
    "join_outputs",
    "keras",
    "logical_devices",
    "set_ordered_sums",
    "split_batch",
    "strategies",
    "sync_points",
    "testing",
    "timeline",
    "xla",
]

_HOME = {
    "MirroredStrategy": "replica_engine.strategies",
    "MultiWorkerMirroredStrategy": "replica_engine.strategies.multi_worker",
    "ReplicaContext": "replica_engine.replica",
    "TPUStrategy": "replica_engine.strategies.tpu",
    "TrainingState": "replica_engine.keras.backup.training_state",
    "accumulate": "replica_engine.values.split_batches",
    "call_for_each_replica": "replica_engine.replica",
    "debug": "replica_engine.debugging",
    "join_outputs": "replica_engine.values.split_batches",
    "logical_devices": "replica_engine.process.setup",
    "set_ordered_sums": "replica_engine.process",
    "split_batch": "replica_engine.values.split_batches",
    "sync_points": "replica_engine.replica",
    "timeline": "replica_engine.watch.timeline",
}
_PACKAGES = ("compat", "keras", "strategies", "testing", "xla")

make_room(FOR_ONE_LAUNCH)

if "REPLICA_ENGINE_QUICK_SCOPES" in os.environ:  # of 0.2; may go with 0.4
    logging.getLogger("replica_engine").warning(
        "REPLICA_ENGINE_QUICK_SCOPES has no effect any more: eager runs always enter TensorFlow's own scopes."
    )


def __getattr__(name: str) -> Any:
    home = f"replica_engine.{name}" if name in _PACKAGES else _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'replica_engine' has no attribute {name!r}")
    # First: it names a version that does not serve.
    versions = importlib.import_module("replica_engine.upstream.versions")
    module = versions.imported(home)
    return module if name in _PACKAGES else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
