"""Forks: "before" TensorFlow has started, `run` works in the child; "after", `run` in the child raises ForkedError."""

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
    check(status == 0, f"the child ended with {os.waitstatus_to_exitcode(status)}")
    if sys.argv[2] == "after":
        check_works(strategy)  # the parent goes on
        # A fork that starts another program works at any time.
        other = os.posix_spawn(sys.executable, [sys.executable, "-c", "import os; os._exit(0)"], os.environ)
        check(os.waitpid(other, 0)[1] == 0, "the forked process that started another program has another exit status")
    say("done")


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
