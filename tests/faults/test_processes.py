"""The quickest faults that take a process of their own; `make soak` has them all. Of forks see test_forked.py."""

import signal

from soak.processes import one, program
from soak.programs.common import make_strategy
from soak.programs.training import train


def test_ctrl_c_at_random_moments():
    wrong, found = one("interrupts", "threads", "--rounds", 20, longest=100)
    assert not wrong
    assert found.startswith("20 interrupts")


def test_kill_9_in_a_training_that_goes_on_from_its_checkpoint(tmp_path):
    killed = program("training", "threads", tmp_path / "killed", "--steps", 4000, send=signal.SIGKILL, after=0.1)
    assert killed.code == -signal.SIGKILL
    steps = 10 + max(int(path.stem.rpartition("-")[2]) for path in (tmp_path / "killed").glob("ckpt-*.index"))
    strategy = make_strategy("threads")
    resumed, whole = (train(strategy, str(tmp_path / each), steps) for each in ("killed", "undisturbed"))
    assert resumed.startswith(f"from {steps - 10}: ")
    assert whole.startswith("from 0: ")
    assert resumed.partition(": ")[2] == whole.partition(": ")[2]


def test_a_run_at_exit():
    wrong, _ = one("exits", "threads", "atexit", longest=100)
    assert not wrong
