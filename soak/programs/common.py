"""Helpers of the programs."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import replica_engine
from replica_engine import logical_devices

SIZE = 2


def make_strategy(name: str, **options: Any) -> Any:
    """A strategy by its name: "threads", "concurrent", "compiled", and of a job "workers" or "compiled workers"."""
    if name == "compiled workers":
        return replica_engine.TPUStrategy(num_cores=SIZE * int(os.environ["REPLICA_ENGINE_NUM_PROCESSES"]), **options)
    if name == "workers":
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [one] * SIZE)
        return replica_engine.MultiWorkerMirroredStrategy(**options)
    devices = logical_devices(SIZE)
    if name == "compiled":
        return replica_engine.TPUStrategy(num_cores=SIZE, **options)
    return replica_engine.MirroredStrategy(devices, concurrent=name == "concurrent", **options)


def say(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)


def all_reduce_ones() -> tf.Tensor:
    """A body whose result is the number of replicas."""
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))


def check_works(strategy: Any) -> None:
    """Checks that the next run returns the right number."""
    values = [float(value) for value in strategy.experimental_local_results(strategy.run(all_reduce_ones))]
    check(values == [float(SIZE)] * SIZE, f"the next run returned {values}")


def check(holds: bool, text: str) -> None:
    """Ends the process at once with status 70 if a condition is false."""
    if not holds:
        print(f"FAILED: {text}", file=sys.stderr, flush=True)
        os._exit(70)
