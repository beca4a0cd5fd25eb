"""Helpers of the programs."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf

import replica_engine
from replica_engine import logical_devices

SIZE = 2

GRACE = 5.0  # seconds in which threads must end


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


def running_threads() -> list[str]:
    """The names of all threads, without those that Python knows only from calls from C++."""
    return sorted(thread.name for thread in threading.enumerate() if "Dummy" not in thread.name)


def left_threads(before: int) -> list[str]:
    """The problem with new threads, where there were so many before; waits for those that are about to end."""
    deadline = time.monotonic() + GRACE
    while len(names := running_threads()) > before:
        if time.monotonic() > deadline:
            return [f"there are {len(names)} threads where there were {before}: {names}"]
        time.sleep(0.001)
    return []


def serve(train: Callable[..., None]) -> None:
    """Trains in a fork of this process, which has not started TensorFlow, for each line of the input, as JSON.

    Prints "pid" and the fork's, and "ended" and its status when it has ended.
    """
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                train(**json.loads(line))
                status = 0
            finally:
                sys.stdout.flush()
                os._exit(status)
        say(f"pid {pid}")
        say(f"ended {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")


def check(holds: bool, text: str) -> None:
    """Ends the process at once with status 70 if a condition is false."""
    if not holds:
        print(f"FAILED: {text}", file=sys.stderr, flush=True)
        os._exit(70)
