"""`replica-engine launch --workers MIN:MAX`: fewer workers when one is lost for good."""

import subprocess
import sys

import pytest
from helpers.jobs import LONG

# In each start one worker fails, after so many steps; none fails in the start after the last of them.
FAILS = """
import os, signal, sys
from replica_engine import workers
member = workers.join()
start, steps = int(os.environ["REPLICA_ENGINE_RESTART"]), [int(each) for each in sys.argv[1].split(",")]
print("start", start, "of", member.size, flush=True)
if start < len(steps):
    member.progress(step=steps[start])
    member.meet("all have made their steps, and said so")
    if member.worker == start % member.size: os.kill(os.getpid(), signal.SIGKILL)
    member.failed.wait(); member.check()
"""


def launched(folder, workers, steps, *options):
    (folder / "script.py").write_text(FAILS)
    command = [sys.executable, "-m", "replica_engine", "launch", "--workers", workers, *options]
    done = subprocess.run(
        [*command, str(folder / "script.py"), ",".join(map(str, steps))],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    sizes = {}
    for line in done.stdout.splitlines():
        _, start, _, size = line.partition("] ")[2].split()
        sizes.setdefault(int(start), []).append(int(size))
    assert all(each == [len(each)] * len(each) for each in sizes.values())
    said = [line.partition("launch: ")[2] for line in done.stderr.splitlines() if "restart" in line]
    return done.returncode, [len(sizes[start]) for start in sorted(sizes)], said


def test_one_failure_takes_none_off_and_a_second_at_once_does(tmp_path):
    status, sizes, said = launched(tmp_path, "1:3", [9, 1, 0, 0])
    assert (status, sizes) == (0, [3, 3, 2, 2, 1])
    assert [line for line in said if line.startswith("restart")] == [
        "restart 1 of 4: all workers start again",
        "restart 2 of 4: a worker has failed again at once, so 2 of 3 workers start",
        "restart 3 of 4: all workers start again",
        "restart 4 of 4: a worker has failed again at once, so 1 of 3 workers start",
    ]


@pytest.mark.parametrize(("steps", "sizes"), [([0, 2, 5], [2, 2, 2, 2]), ([0, 0, 0, 0], [2, 2, 1, 1, 1])])
def test_steps_clear_an_earlier_failure_and_the_fewest_are_kept(tmp_path, steps, sizes):
    status, found, _ = launched(tmp_path, "1:2", steps, "--max-restarts", "4")
    assert (status, found) == (0, sizes)


ALONE = """
import time
import replica_engine
strategy = replica_engine.MultiWorkerMirroredStrategy()
began = time.monotonic()
while time.monotonic() - began < 2: strategy.run(lambda: None)
print("trained", flush=True)
"""


def test_a_job_of_one_worker_has_nobody_to_wait_for(tmp_path):
    """Its strategy does not join, and no limit of joining ends it."""
    (tmp_path / "script.py").write_text(ALONE)
    command = [sys.executable, "-m", "replica_engine", "launch", "--workers", "1", "--join-timeout", "0.5"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[worker 0] trained"), done.stderr
