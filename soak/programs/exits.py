"""Ends a process while replicas are at work, in several ways.

    python -m soak.programs.exits threads atexit

- atexit: runs once more in a function registered with atexit;
- error: raises on replica 1, and nothing catches it;
- exit: calls sys.exit(3) on replica 1;
- daemon: leaves daemon threads in the middle of their runs;
- main dies: raises on the main thread while another thread continues its runs;
- parked: ends with parked replica threads;
- del: ends with the strategy in a reference cycle that has a finalizer.
"""

from __future__ import annotations

import atexit
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
    def run_again() -> None:
        check_works(strategy)
        say("done")

    atexit.register(run_again)


def _fails(error: BaseException) -> Any:
    def body() -> None:
        tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([]))
        if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) in (1, None):
            raise error

    return body


def _error(strategy: Any) -> None:
    say("done")
    strategy.run(_fails(ValueError("nobody catches this")))


def _exit(strategy: Any) -> None:
    say("done")
    strategy.run(_fails(SystemExit(3)))


def _daemon(strategy: Any) -> None:
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
    begun = threading.Event()

    def runs() -> None:
        for _ in range(200):
            check_works(strategy)
            begun.set()
        say("done")

    threading.Thread(target=runs).start()
    begun.wait()
    raise ValueError("the main thread ends here")


def _parked(strategy: Any) -> None:
    say("done")


def _del(strategy: Any) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me, self.strategy = self, strategy

        def __del__(self) -> None:
            say("done")

    Cycle()


_WAYS = {
    "atexit": _atexit,
    "error": _error,
    "exit": _exit,
    "daemon": _daemon,
    "main dies": _main_dies,
    "parked": _parked,
    "del": _del,
}

if __name__ == "__main__":
    main()
