"""The quickest faults that take a process of their own; `make soak` has them all. Of forks see test_forked.py."""

import pathlib
import signal
import textwrap

import pytest
import tensorflow as tf

from soak.processes import Ended
from soak.programs.common import make_strategy
from soak.programs.training import train

ROOT = pathlib.Path(__file__).parents[2]

PROGRAM = """
    import os, runpy, signal, sys, threading

    sys.path[0] = {root!r}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    write = sys.stdout.write

    def killed_soon(text):
        if "ready" in text:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return write(text)

    if {killed}:
        sys.stdout.write = killed_soon
    runpy.run_module("soak.programs.{name}", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def ended(programs):
    """`ended(name, *arguments)`: how a program of `soak.programs` ended, or was ended with `killed=True`."""

    def ended(name, *arguments, killed=False):
        source = textwrap.dedent(PROGRAM).format(root=str(ROOT), name=name, killed=killed)
        done = programs.run(source, *arguments)
        return Ended(done.returncode, done.stdout, done.stderr)

    return ended


def test_ctrl_c_at_random_moments(ended):
    # The second that users are promised is measured by `make soak`; here other tests may take the processor for longer.
    interrupts = ended("interrupts", "threads", "--rounds", 20, "--within", 15)
    assert not interrupts.wrong()
    assert interrupts.last.startswith("20 interrupts")


def test_kill_9_in_a_training_that_goes_on_from_its_checkpoint(ended, tmp_path):
    killed = ended("training", "threads", tmp_path / "killed", "--steps", 4000, killed=True)
    assert killed.code == -signal.SIGKILL
    # Not the last file: the kill may have come between its end and the note that it is the last checkpoint.
    steps = 10 + int(tf.train.latest_checkpoint(str(tmp_path / "killed")).rpartition("-")[2])
    strategy = make_strategy("threads")
    resumed, whole = (train(strategy, str(tmp_path / each), steps) for each in ("killed", "undisturbed"))
    assert resumed.startswith(f"from {steps - 10}: ")
    assert whole.startswith("from 0: ")
    assert resumed.partition(": ")[2] == whole.partition(": ")[2]


def test_a_run_at_exit(ended):
    assert not ended("exits", "threads", "atexit").wrong()


def test_daemon_threads_in_the_middle_of_compiled_runs_at_exit(ended):
    assert not ended("exits", "compiled", "daemon").wrong()
