"""What the soak makes of jobs whose worker was killed; `make soak` runs the jobs. See also test_multi_worker.py."""

from soak.processes import Ended
from soak.restarts import STEPS, WORKERS, Kill, problems, results

KILL = Kill(1, 11, 0.01)
OUTPUT = """[worker 0] ready
[worker 1] ready
[worker 0] from 10: aa bb
[worker 1] from 10: aa bb
[worker 0] done
"""
RESTARTED = "replica-engine launch: restart 1 of 1: all workers start again\n"


def test_a_job_that_comes_to_the_weights_of_an_undisturbed_one_is_well():
    assert problems(KILL, Ended(0, OUTPUT, RESTARTED), "aa bb") == []
    assert results(Ended(0, OUTPUT, "")) == {"worker 0": ("from 10", "aa bb"), "worker 1": ("from 10", "aa bb")}


def test_other_weights_are_lost():
    (wrong,) = problems(KILL, Ended(0, OUTPUT.replace("1] from 10: aa bb", "1] from 10: aa cc"), RESTARTED), "aa bb")
    assert wrong.endswith("worker 1 from 10 came to aa cc, not to aa bb")


def test_a_job_that_fails_or_was_not_disturbed_counts_as_lost():
    (failed,) = problems(KILL, Ended(137, OUTPUT, RESTARTED), "aa bb")
    assert "ended with 137" in failed
    (alone,) = problems(KILL, Ended(0, OUTPUT.partition("[worker 1] from")[0], RESTARTED), "aa bb")
    assert "ended with 0" in alone
    assert problems(KILL, Ended(0, OUTPUT, ""), "aa bb") == [f"{KILL}: nothing was started again"]


def test_kills_are_drawn_from_their_seeds():
    drawn = [Kill.drawn(seed) for seed in range(50)]
    assert drawn == [Kill.drawn(seed) for seed in range(50)]
    assert {kill.worker for kill in drawn} == set(range(WORKERS))
    assert len({kill.step for kill in drawn}) > 10
    assert max(kill.step for kill in drawn) < STEPS - 5
