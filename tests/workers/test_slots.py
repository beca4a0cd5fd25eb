"""`replica-engine launch --workers MIN:MAX`: fewer workers when one is lost for good, and all when it is back."""

import subprocess
import sys

from helpers.jobs import LONG

from replica_engine.workers.launcher import Slots

LAUNCH = [sys.executable, "-m", "replica_engine", "launch", "--workers"]


def test_one_failure_leaves_none_out_and_a_second_at_once_does():
    slots = Slots(2, 4)
    assert not slots.failed(3, None), "kill -9, and the system may start it again"
    assert not slots.failed(3, 20), "it worked meanwhile"
    assert slots.failed(3, 1), "in its first step"
    assert (slots.present, slots.missing) == ([0, 1, 2], 1)
    slots.restore()
    assert (slots.present, slots.missing) == ([0, 1, 2, 3], 0)
    assert not slots.failed(3, 0), "what failed before it was back does not count"


def test_two_that_are_lost_together_take_turns_in_failing_first():
    slots = Slots(2, 4)
    assert [slots.failed(slot, step) for slot, step in ((1, 500), (3, 0), (1, None))] == [False, False, True]
    assert slots.failed(3, 0)
    assert slots.present == [0, 2]
    assert not any(slots.failed(0, 0) for _ in range(3)), "fewer than two may not go on"


def test_steps_of_others_clear_an_earlier_failure():
    slots = Slots(1, 3)
    assert [slots.failed(slot, step) for slot, step in ((1, 0), (2, 9), (1, 0))] == [False, False, False]


SHRINKS_AND_GROWS = """
import os, signal
from replica_engine import workers
member = workers.join()
slot, start = os.environ["REPLICA_ENGINE_SLOT"], int(os.environ["REPLICA_ENGINE_RESTART"])
print("start", start, "slot", slot, "of", member.size, flush=True)
if slot == "1" and start < 2: os.kill(os.getpid(), signal.SIGKILL)
if start == 2: member.meet("the output of all")
if slot == "0" and start in (0, 2): os.kill(os.getppid(), signal.SIGUSR1)
if start == 3 and slot == "2": os._exit(5)
if start < 4: member.failed.wait(); member.check()
"""


def test_the_launcher_goes_on_with_fewer_and_with_all_again(tmp_path):
    """The restart after the growth is the third one, and is allowed because restarts are counted from then on."""
    (tmp_path / "script.py").write_text(SHRINKS_AND_GROWS)
    done = subprocess.run(
        [*LAUNCH, "2:3", str(tmp_path / "script.py")], capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stderr
    sizes = ((0, 3), (1, 3), (2, 2), (3, 3), (4, 3))
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[worker {index}] start {start} slot {slot} of {size}"
        for start, size in sizes
        for index, slot in enumerate((0, 2) if size == 2 else (0, 1, 2))
    )
    said = [line.removeprefix("replica-engine launch: ") for line in done.stderr.splitlines()]
    assert "SIGUSR1 starts workers again that were left out, and none is" in said
    (shrinks,) = (line for line in said if "without slot" in line)
    assert shrinks.startswith(
        "restart 2 of 2 without slot 1, which failed again at once: 2 of 3 workers start. When it "
    )
    assert said.index("1 of 3 workers are back: the others save and end") < said.index("all 3 workers start again")
    assert "restart 1 of 2: all workers start again" in said[said.index("all 3 workers start again") :]
