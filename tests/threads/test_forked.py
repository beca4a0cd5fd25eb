"""Forks: of a process in which TensorFlow had not started, and of the same one when it had."""

import os
import textwrap

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PROGRAM = """
    import functools, os, sys
    import tensorflow as tf, replica_engine
    from replica_engine import errors

    def say(*words):
        os.write(1, " ".join(map(str, words)).encode() + bytes([10]))  # whole, though both processes write

    def forked(do):
        child = os.fork()
        if not child:
            do()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7

    def step():
        return tf.distribute.get_replica_context().all_reduce("SUM", 1.0)

    def starts():
        strategy = replica_engine.MirroredStrategy(replica_engine.logical_devices(2))
        say(sys._getframe(1).f_code.co_name, strategy.run(step).values[0].numpy())
        return strategy

    forked(starts)
    strategy = starts()

    def refused():
        for run in (strategy.run, functools.partial(replica_engine.call_for_each_replica, strategy)):
            for body in (step, tf.function(step)):
                try:
                    run(body)
                except errors.ForkedError as error:
                    say("no:", str(error))

    forked(refused)
    say(strategy.run(step).values[0].numpy())
    spawned = os.posix_spawn(sys.executable, [sys.executable, "-c", "import os; os._exit(5)"], os.environ)
    say(os.waitstatus_to_exitcode(os.waitpid(spawned, 0)[1]))  # a fork that starts another program works at any time
"""


def test_a_child_works_or_says_why_not_and_the_parent_goes_on(programs):
    """It works if it was forked before TensorFlow started."""
    result = programs.run(textwrap.dedent(PROGRAM))
    assert result.returncode == 0, result.stderr
    before, parent, *refused, goes_on, spawned = result.stdout.splitlines()
    assert (before, parent, goes_on, spawned) == ("forked 2.0", "<module> 2.0", "2.0", "5")
    assert len(refused) == 4
    assert all(line.startswith("no: Process ") for line in refused)
