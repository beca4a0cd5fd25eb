"""Replicas and merge functions that do not return, and how `run` still ends.

What is stuck:

- op: a replica, in an op in C++;
- loop: a replica, in Python;
- merge: a merge function, asleep;
- merge op: a merge function, in an op in C++;
- host: a host call of a compiled body, asleep;
- other thread: a replica, in an op in C++, in a run of a thread other than the main one.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine import errors, xla
from soak.programs.common import check, check_works, make_strategy, say

TOO_LONG = 600.0

_go = threading.Event()


def main() -> None:
    """Gets stuck, and checks how `run` ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategy")
    parser.add_argument("what")
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--interrupt", action="store_true")
    flags = parser.parse_args()

    options = {} if flags.timeout is None else {"timeout": flags.timeout}
    strategy = make_strategy(flags.strategy, **options)
    with strategy.scope():
        count = tf.Variable(0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    strategy.run(lambda: count.assign_add(1))
    body = _bodies()[flags.what]
    for number in range(2):
        if flags.interrupt:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        before = time.perf_counter()
        found: BaseException | None = None
        try:
            if flags.what == "other thread":
                with concurrent.futures.ThreadPoolExecutor(1) as pool:
                    pool.submit(strategy.run, body).result()
            else:
                strategy.run(body)
        except BaseException as error:
            found = error
        took = time.perf_counter() - before
        wanted = KeyboardInterrupt if flags.interrupt else errors.ReplicaTimeoutError
        check(isinstance(found, wanted), f"{found!r} came out")
        limit = 0.5 if flags.interrupt else flags.timeout
        check(took < limit + 1.0, f"it took {took:.2f} s")
        # A host call that sleeps goes on: its program occupies the devices until the call ends.
        _go.set()
        time.sleep(0.3)
        _go.clear()
        check_works(strategy)
        strategy.run(lambda: count.assign_add(1))
        check(int(count.numpy()) == number + 2, f"{int(count.numpy())} steps were counted")
        say(f"{type(found).__name__} after {took:.2f} s")
    say("done")


def _bodies() -> dict[str, Callable[[], Any]]:
    queue = tf.queue.FIFOQueue(1, [tf.float32])  # empty for ever

    def is_last() -> bool:
        return tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) == 1

    def op() -> None:
        if is_last():
            queue.dequeue()

    def loop() -> None:
        while is_last():
            pass

    def merge(stuck: Callable[[], Any]) -> Callable[[], None]:
        return lambda: tf.distribute.get_replica_context().merge_call(lambda strategy: stuck())

    def host() -> None:
        def wait(replica: Any) -> None:
            if int(replica) == 1:
                _go.wait(TOO_LONG)

        xla.outside_compilation(wait, xla.replica_id())

    asleep = merge(lambda: time.sleep(TOO_LONG))
    return {"op": op, "loop": loop, "merge": asleep, "merge op": merge(queue.dequeue), "host": host, "other thread": op}


if __name__ == "__main__":
    main()
