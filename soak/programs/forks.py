"""Forks: before TensorFlow has started, `run` works in the child; afterwards, `run` in the child raises ForkedError.

python -m soak.programs.forks threads before
python -m soak.programs.forks threads after
"""

from __future__ import annotations

import os
import sys

import tensorflow as tf

from replica_engine import errors
from soak.programs.common import check, check_works, make_strategy, say


def main() -> None:
    """Forks."""
    if sys.argv[2] == "before":
        child = os.fork()
        check_works(make_strategy(sys.argv[1]))  # in both
        if child == 0:
            os._exit(0)
    else:
        strategy = make_strategy(sys.argv[1])
        check_works(strategy)
        child = os.fork()
        if child == 0:
            _expect_forked_error(strategy)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    check(os.waitstatus_to_exitcode(status) == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}")
    if sys.argv[2] == "after":
        check_works(strategy)  # the parent goes on
        _, status = os.waitpid(_spawned(), 0)
        check(
            os.waitstatus_to_exitcode(status) == 0,
            "the forked process that started another program has another exit status",
        )
    say("done")


def _spawned() -> int:
    """Checks that a fork which starts another program works at any time."""
    return os.posix_spawn(sys.executable, [sys.executable, "-c", "import os; os._exit(0)"], os.environ)


def _expect_forked_error(strategy: tf.distribute.Strategy) -> None:
    for body in (lambda: None, tf.function(lambda: None)):
        try:
            strategy.run(body)
        except errors.ForkedError as error:
            check("forked" in str(error), str(error))
        else:
            check(False, "run in the child raised nothing")


if __name__ == "__main__":
    main()
