"""Ends a process while replicas are at work, in several ways: `python -m soak.programs.exits threads atexit`."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from typing import Any

import tensorflow as tf

from soak.programs.common import check_works, make_strategy, say


def main() -> None:
    """Ends in one of these ways."""
    strategy: Any = make_strategy(sys.argv[1])
    check_works(strategy)
    _WAYS[sys.argv[2]](strategy)


def _atexit(strategy: Any) -> None:
    """Runs once more in a function registered with atexit."""

    def run_again() -> None:
        check_works(strategy)
        say("done")

    atexit.register(run_again)


def _fails(error: BaseException, strategy: Any) -> None:
    def body() -> None:
        tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))
        if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) in (1, None):
            raise error

    say("done")
    strategy.run(body)


def _daemon(strategy: Any) -> None:
    """Leaves daemon threads in the middle of their runs."""
    begun = threading.Event()
    with strategy.scope():
        count = tf.Variable(0.0)

    def runs() -> None:
        while True:
            check_works(strategy)
            strategy.run(lambda: count.assign(1.0))
            count.numpy()
            begun.set()

    for _ in range(3):
        threading.Thread(target=runs, daemon=True).start()
    begun.wait()
    say("done")


def _main_dies(strategy: Any) -> None:
    """Raises on the main thread while another thread continues its runs."""
    begun = threading.Event()

    def runs() -> None:
        for _ in range(200):
            check_works(strategy)
            begun.set()
        say("done")

    threading.Thread(target=runs).start()
    begun.wait()
    raise ValueError("the main thread ends here")


def _del(strategy: Any) -> None:
    """Ends with the strategy in a reference cycle that has a finalizer."""

    class Cycle:
        def __init__(self) -> None:
            self.me, self.strategy = self, strategy

        def __del__(self) -> None:
            say("done")

    Cycle()


_WAYS = {
    "atexit": _atexit,
    "error": functools.partial(_fails, ValueError("nobody catches this")),  # on replica 1
    "exit": functools.partial(_fails, SystemExit(3)),
    "daemon": _daemon,
    "main dies": _main_dies,
    "parked": lambda strategy: say("done"),  # and so are its replica threads
    "del": _del,
}

if __name__ == "__main__":
    main()
