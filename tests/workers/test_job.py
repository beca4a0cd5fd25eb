"""What the coordinator decides, with a clock that the test moves."""

import pytest
from helpers.played_job import EVAL, LIMITS, SAVE, TRAIN, Played

from replica_engine.errors import (
    ClusterConfigError,
    ProgramDisagreementError,
    WorkerLostError,
    WorkersMissingError,
    WorkerVersionError,
)
from replica_engine.workers.job import DEVICES, STATUS_PATIENCE, STRATEGY, Job
from replica_engine.workers.messages import BadMessageError, Failure
from replica_engine.workers.program_log import END, LAUNCH, WAIT, packed
from replica_engine.workers.server import TICK


@pytest.fixture
def played():
    """A job of three workers that have joined."""
    return Played()


def test_all_are_told_when_all_are_there():
    played = Played(joined=2)
    assert played.told == []
    played.join(2)
    assert played.told == [(None, ["go", "10.0.0.1"])]


def test_the_first_member_is_told_of_strangers_that_came_before_it():
    played = Played(joined=0)
    played.job.refused_strangers("strangers are there")
    played.join(1)
    played.join(0)
    assert [told for told in played.told if told[1][0] == "warning"] == [(1, ["warning", "strangers are there"])]


def test_silence(played):
    played.wait(10, beats=(0, 1, 2))
    played.wait(10, beats=(0, 2))
    assert played.error is None
    played.wait(1, beats=(0, 2))
    assert isinstance(played.error, WorkerLostError)
    assert (played.error.worker, played.error.host, played.error.pid) == (1, "node-1", 101)
    assert len(played.told_to(None, "failure")) == 1


def test_two_that_do_not_reach_each_other(played):
    played.wait(5, beats=(0, 1, 2))
    played.say(1, "parted", 2, "its machine has not answered for 8 s")
    assert isinstance(played.error, WorkerLostError)
    assert played.error.worker == 2
    words = "worker 2 of 3 (node-2, pid 102) is not reached by worker 1 of 3 (node-1, pid 101), and the co"
    assert words in str(played.error)


def test_one_that_is_told_that_it_does_not_reach_itself(played):
    """By the text of the other one's error: what the other one says counts, whichever comes first."""
    played.wait(5, beats=(0, 1, 2))
    played.say(1, "parted", 1, "their connection broke")
    assert played.error is None
    played.say(0, "parted", 1, "their connection broke")
    assert "worker 1 of 3 (node-1, pid 101) is not reached by worker 0 of 3 (" in str(played.error)


def test_one_that_nobody_reaches_is_silent(played):
    """The coordinator does not hear it either, and it has not fallen silent for the heartbeat limit yet."""
    played.wait(8, beats=(0, 1))
    played.say(1, "parted", 2, "its machine has not answered for 8 s")
    assert "worker 2 of 3 (node-2, pid 102) has not been heard of for 8 s" in str(played.error)


def test_silence_before_all_have_joined():
    played = Played(joined=2)
    played.wait(11, beats=(0,))
    assert played.error.worker == 1


def test_the_time_in_which_the_coordinator_stood_still_is_nobodys_silence(played):
    played.wait(5, beats=(0, 1, 2))
    played.stand_still()
    assert played.error is None
    played.wait(11, beats=(0, 2))
    assert played.error.worker == 1


def test_the_time_in_which_the_coordinator_stood_still_counts_for_no_wait():
    played = Played(statuses=True)
    played.wait(1, beats=(0, 1, 2))
    played.say(0, "get", 1, "address", 3.0)
    played.job.closed(1, played.now)  # its status is still to come
    played.stand_still()
    assert played.told_to(0, "late") == []
    assert played.error is None
    played.wait(2, beats=(0, 2))
    assert played.told_to(0, "late") == []
    assert played.error.worker == 1, "no status came"
    played.wait(1, beats=(0, 2))
    assert len(played.told_to(0, "late")) == 1


def test_the_time_in_which_the_coordinator_stood_still_does_not_count_for_the_join_limit():
    played = Played(joined=0)
    played.join(1)
    played.stand_still()
    played.wait(99, beats=(1,))
    assert played.error is None
    played.wait(2, beats=(1,))
    assert played.error.workers == (0, 2)


def test_a_timeout_runs_from_the_arrival_of_the_question(played):
    """And not from the last look at the clock, which may be long ago."""
    played.now += 1.5
    played.say(0, "get", 1, "address", 1.0)
    played.launch(0, SAVE, wait=(2, 1.0))
    played.job.tick(played.now)
    assert played.told_to(0, "late") == []
    played.wait(1, beats=(0, 1, 2))
    assert [number for number, _ in played.told_to(0, "late")] == [1, 2]


def test_the_join_limit():
    played = Played(joined=0)
    played.join(1)
    played.wait(100, beats=(1,))
    assert played.error is None
    played.wait(1, beats=(1,))
    assert isinstance(played.error, WorkersMissingError)
    assert played.error.workers == (0, 2)
    assert played.join(0) == played.job.failure, "who comes then is told"


def test_only_the_first_failure_counts(played):
    played.say(2, "failed", "ValueError: x", [])
    first = played.job.failure
    played.say(1, "failed", "ValueError: y", [])
    played.job.closed(0, played.now)
    played.wait(50)
    assert played.job.failure is first
    assert len(played.told_to(None, "failure")) == 1


@pytest.mark.parametrize("first", ["connection", "status"])
def test_the_connection_ends_and_the_status_comes(first):
    played = Played(statuses=True)
    events = [lambda: played.job.closed(1, played.now), lambda: played.job.exited(1, -9, played.now)]
    for event in events if first == "connection" else events[::-1]:
        assert played.error is None
        event()
    assert (played.error.worker, played.error.signal) == (1, 9)


@pytest.mark.parametrize("first", ["connection", "status"])
def test_only_one_of_both_comes(first):
    """A child of the worker holds the connection open, or the process lives on without it."""
    played = Played(statuses=True)
    if first == "connection":
        played.job.closed(1, played.now)
    else:
        played.job.exited(1, 0, played.now)
    played.now += STATUS_PATIENCE / 2
    played.job.tick(played.now)
    assert played.error is None
    played.now = 1.0 - TICK  # it is told within a second
    played.job.tick(played.now)
    assert (played.error.worker, played.error.status) == (1, None if first == "connection" else 0)


def test_what_a_process_said_before_it_ended_is_read_first():
    """The exit status is often known before the goodbye is read."""
    played = Played(statuses=True)
    played.job.exited(1, 0, played.now)
    played.say(1, "bye")
    played.job.closed(1, played.now)
    played.wait(2, beats=(0, 2))
    assert played.error is None


def test_a_worker_that_never_joined_ends():
    played = Played(joined=1, statuses=True)
    played.job.exited(2, 3, played.now)
    assert (played.error.worker, played.error.status) == (2, 3)
    assert "worker 2 of 3 has exited with status 3 before it joined the job: it" in str(played.error)
    nobody = Played(joined=0, statuses=True)
    nobody.job.exited(2, 3, 0.0)
    assert nobody.error is None, "a script that never joins"
    nobody.join(0)
    assert nobody.error.worker == 2


@pytest.mark.parametrize(
    ("about", "text"),
    [
        ({"versions": {"tensorflow": "2.20.0"}}, "versions of tensorflow:\n  worker 0: 2.21.0\n  worker 1: 2.20.0\n"),
        (
            {"versions": {"tensorflow": "2.20.0", DEVICES: "GPU"}},  # which explains what else differs
            "kinds of devices:\n  worker 0: CPU\n  worker 1: GPU\n",
        ),
        (
            {"versions": {"tensorflow": "2.21.0", STRATEGY: "TPUStrategy"}, "replicas": 2},
            "strategies:\n  worker 0: MirroredStrategy\n  worker 1: TPUStrategy\n",
        ),
        ({"versions": {}}, "versions of tensorflow:\n  worker 0: 2.21.0\n  worker 1: not there\n"),
        ({"versions": {"tensorflow": "2.21.0"}, "replicas": 2}, "numbers of replicas:\n  worker 0: 1\n  worker 1: 2\n"),
    ],
)
def test_a_difference_is_told_at_once(about, text):
    """Not when all are there."""
    played = Played(joined=0)
    played.join(0, {"tensorflow": "2.21.0", DEVICES: "CPU", STRATEGY: "MirroredStrategy"})
    played.join(1, **about)
    assert isinstance(played.error, WorkerVersionError)
    assert text in str(played.error)


def test_who_is_refused():
    played = Played(joined=2)
    assert isinstance(played.job.refusal(1, 3).error(), ClusterConfigError)
    assert isinstance(played.job.refusal(2, 4).error(), ClusterConfigError)
    assert isinstance(played.job.refusal(3, 3).error(), ClusterConfigError)
    assert played.job.refusal(2, 3) is None


def test_all_wait_for_the_last(played):
    for worker in (0, 2):
        played.launch(worker, TRAIN, SAVE, wait=(5 + worker, None))
    played.launch(1, TRAIN)
    assert played.told[1:] == []
    played.launch(1, SAVE, wait=(9, None))
    assert sorted(played.told[1:]) == [(0, ["answer", 5, None]), (1, ["answer", 9, None]), (2, ["answer", 7, None])]


def test_one_that_waits_too_long_is_told_for_whom(played):
    played.say(0, "program", SAVE.hex(), WAIT, "the checkpoint")
    played.launch(0, TRAIN, SAVE, wait=(5, 3.0))
    played.launch(2, TRAIN, SAVE, wait=(6, None))
    played.wait(2, beats=(0, 1, 2))
    assert played.told_to(0, "late") == []
    played.wait(1, beats=(0, 1, 2))
    ((number, failure),) = played.told_to(0, "late")
    assert number == 5
    assert "worker 1 did not come to the checkpoint within 3 s" in str(Failure.from_json(failure).error())
    assert played.error is None, "the job goes on"
    played.launch(1, TRAIN, SAVE, wait=(7, None))
    assert played.told_to(0, "answer") == []
    assert played.told_to(2, "answer") == [[6, None]]


def test_a_wait_at_the_end_is_called_so(played):
    played.launch(0, END, wait=(1, 1.0))
    played.wait(1, beats=(0, 1, 2))
    ((_, failure),) = played.told_to(0, "late")
    assert "workers 1-2 did not come to the end of the program within 1 s" in str(Failure.from_json(failure).error())


def test_different_launches(played):
    for code, name in ((TRAIN, "`train_step`"), (EVAL, "`eval_step`")):
        played.say(0, "program", code.hex(), LAUNCH, name)
    played.launch(0, TRAIN, TRAIN)
    played.launch(2, TRAIN, TRAIN)
    played.launch(1, TRAIN, EVAL)
    assert isinstance(played.error, ProgramDisagreementError)
    assert (played.error.position, dict(played.error.groups)) == (
        1,
        {(0, 2): "launch of `train_step`", (1,): "launch of `eval_step`"},
    )


def test_the_end_of_one_program_too_early(played):
    played.launch(1, TRAIN, END, wait=(1, None))
    played.launch(0, TRAIN)
    assert played.error is None
    played.launch(0, TRAIN)
    assert isinstance(played.error, WorkerLostError)
    assert played.error.worker == 1


def test_values(played):
    played.say(1, "get", 4, "address", None)
    played.say(2, "get", 8, "address", 2.0)
    played.wait(2, beats=(0, 1, 2))
    ((number, failure),) = played.told_to(2, "late")
    assert number == 8
    assert "No worker has put a value under 'address' within 2 s" in str(Failure.from_json(failure).error())
    played.say(0, "get", 1, "address", 0.0)
    assert [number for number, _ in played.told_to(0, "late")] == [1], "without waiting"
    played.say(0, "put", "address", {"port": 1})
    played.say(2, "get", 9, "address", None)
    assert played.told_to(1, "answer") == [[4, {"port": 1}]]
    assert played.told_to(2, "answer") == [[9, {"port": 1}]]


def test_too_many_values_are_an_error_of_who_asks(played):
    played.say(1, "get", 1, "too many", None)
    for number in range(10_000):
        played.say(0, "put", f"value {number}", number)
    played.say(0, "put", "too many", 5)
    played.say(2, "get", 2, "another", None)
    for worker, key in ((1, "too many"), (2, "another")):
        ((_, failure),) = played.told_to(worker, "late")
        assert f"no value under '{key}', and no room for one" in str(Failure.from_json(failure).error())
    played.say(0, "put", "value 3", "new")
    played.say(0, "drop", "value 1", "value 2")
    played.say(0, "put", "too many", 6)
    for number, key in enumerate(("value 3", "too many")):
        played.say(2, "get", 10 + number, key, None)
    assert played.told_to(2, "answer") == [[10, "new"], [11, 6]]
    assert played.error is None


def test_how_far_all_are(played):
    played.say(0, "program", TRAIN.hex(), LAUNCH, "`train_step`")
    played.say(1, "log", packed([TRAIN, SAVE]), 1, [7, "all_reduce"])
    played.now += 2.0
    played.say(0, "rows", 3, 0)
    ((number, rows),) = played.told_to(0, "answer")
    assert (number, [row["silent"] for row in rows]) == (3, [0.0, 2.0, 2.0])
    assert (rows[1]["launches"], rows[1]["launched"], rows[1]["step"]) == (1, "`train_step`", 7)


def test_where_many_workers_are_is_summed_up():
    """And looked up once for all that ask at about the same time."""
    size, told = 1000, []
    job = Job(size, LIMITS, 0.0, lambda worker, message: told.append((worker, message)))
    for worker in range(size - 1):
        about = {"host": f"node-{worker}", "pid": 100, "versions": {}, "replicas": 1, "came_to": "10.0.0.1"}
        job.joined(worker, about, 0.0)
        job.received(worker, ["log", packed([TRAIN]), 1, [12, f"line 12; now waiting for {worker} s"]], 5.0)
    for worker in (3, 17, 800):
        job.received(worker, ["beat", [11, "line 7"]], 5.0)
    looked = []
    job.rows, rows = lambda now: looked.append(now) or rows(now), job.rows
    for worker in range(size - 1):
        job.received(worker, ["where", 1], 6.0)
    answers = [message[2] for _, message in told if message[0] == "answer"]
    assert answers == [answers[0]] * (size - 1)
    assert answers[0][0] == (
        "996 of 1,000, workers 0-2, 4-16, 18-799, 801-998: step 12, launch 1, sync point line 12; heard of 0 to 1 s ago"
    )
    assert answers[0][1].startswith("3 of 1,000, workers 3, 17, 800: step 11, launch 1, sync point line 7; heard of")
    assert answers[0][2].startswith("1 of 1,000, worker 999: not joined")
    assert looked == [6.0]


@pytest.mark.parametrize(
    "message",
    [
        ["nothing"],
        ["beat"],
        ["log", "xx", 1, []],
        ["log", 5, 1, []],
        ["put", "a"],
        ["program", "zz", "a", "b"],
        ["get", "x", "y", 1],
        ["log", TRAIN.hex(), 1, [1, 2, 3]],
        ["failed"],
        ["rows", None, 0],
        ["where", None],
    ],
)
def test_what_no_member_sends(message):
    with pytest.raises(BadMessageError):
        Played().say(0, *message)


def test_messages_grow_with_the_members_and_not_with_the_launches():
    """Each sign of life has one answer, launches have none, and a failure is one message to all."""
    size, seconds = 200, 3
    told = []
    job = Job(size, LIMITS, 0.0, lambda worker, message: told.append((worker, message[0])))
    for worker in range(size):
        job.joined(worker, {"host": "a", "pid": 1, "versions": {}, "replicas": 1, "came_to": "127.0.0.1"}, 0.0)
    for tenth in range(seconds * 10):
        for worker in range(size):
            job.received(worker, ["log", packed([TRAIN] * 1000), tenth * 1000, []], tenth / 10)
            if tenth % 10 == 0:
                job.received(worker, ["beat", []], tenth / 10)
        job.tick(tenth / 10)
    assert [kind for _, kind in told].count("beat") == size * seconds
    assert len(told) == size * seconds + 1, "and that all are there"
    job.received(0, ["failed", "ValueError: x", []], 4.0)
    assert told[size * seconds + 1 :] == [(None, "failure")]


def left_by(played, worker, exception="KeyboardInterrupt"):
    played.say(worker, "gave up", exception, exception == "KeyboardInterrupt")


AT_THE_END = "OutOfRangeError: End of sequence"


def test_a_step_in_which_one_was_interrupted(played):
    for worker in (0, 1):
        played.launch(worker, TRAIN, TRAIN)
    left_by(played, 1)
    played.wait(5, beats=(0, 1, 2), in_step=(0,))
    assert played.error is None
    played.wait(1, beats=(0, 1, 2), in_step=(0,))
    error = played.error
    assert isinstance(error, WorkerLostError)
    assert (error.worker, error.exception) == (1, "KeyboardInterrupt")
    assert "has left a step before its end (KeyboardInterrupt), and worker 0 did not leave that step" in str(error)


def test_a_step_that_all_gave_up_or_have_behind_them(played):
    """Workers 0 and 1 leave the second step one after the other, and worker 2 leaves it and goes on at once."""
    for worker in range(3):
        played.launch(worker, TRAIN, TRAIN)
        left_by(played, worker)
        played.wait(1, beats=(0, 1, 2), in_step=range(worker + 1, 3))
    played.launch(2, EVAL)
    played.wait(20, beats=(0, 1, 2), in_step=(2,))
    assert played.error is None
    for worker in (0, 1):
        played.launch(worker, EVAL)
    left_by(played, 0)  # and the others have left another step, which was before
    played.wait(7, beats=(0, 1, 2), in_step=(1, 2))
    assert played.error.worker == 0
    assert "workers 1-2 did not leave that step" in str(played.error)


def test_others_that_come_to_the_end_of_their_data_later(played):
    """Worker 0 saves a checkpoint before that step, and worker 2 needs long to see that no batch is left."""
    for worker in (1, 2):
        played.launch(worker, TRAIN)
    left_by(played, 1, AT_THE_END)
    played.wait(9, beats=(0, 1, 2), in_step=(2,))
    left_by(played, 2, AT_THE_END)
    played.wait(100, beats=(0, 1, 2))
    played.launch(0, TRAIN)
    played.wait(9, beats=(0, 1, 2), in_step=(0,))
    left_by(played, 0, AT_THE_END)
    played.wait(20, beats=(0, 1, 2))
    assert played.error is None


def test_one_whose_data_do_not_end_with_those_of_the_others(played):
    played.all_launch(TRAIN)
    for worker in (1, 2):
        left_by(played, worker, AT_THE_END)
    played.wait(12, beats=(0, 1, 2), in_step=(0,))
    assert (played.error.worker, played.error.exception) == (1, AT_THE_END)


def test_a_step_that_the_others_have_behind_them(played):
    """The exception came after the collectives. The others make no step for a while."""
    played.all_launch(TRAIN)
    played.wait(1, beats=(0, 1, 2), in_step=(0, 1, 2))
    left_by(played, 1, "ValueError: NaN")
    played.wait(100, beats=(0, 1, 2))
    assert played.error is None
    played.all_launch(TRAIN)
    played.wait(100, beats=(0, 1, 2), in_step=(0, 1, 2))
    assert played.error is None


def test_one_that_leaves_each_step_at_once(played):
    played.all_launch(TRAIN)
    for _ in range(12):
        left_by(played, 1, "ValueError: NaN")
        played.wait(1, beats=(0, 1, 2), in_step=(0, 2))
        played.launch(1, TRAIN)
    assert played.error.worker == 1
    assert "workers 0, 2 did not leave that step" in str(played.error)


@pytest.mark.parametrize(
    ("in_step", "text"), [((2,), "worker 2 did not leave that step"), ((), "others may wait in its sum")]
)
def test_a_sum_that_is_left_blames_only_workers_in_a_step(played, in_step, text):
    played.wait(1, beats=(0, 1, 2), in_step=(0, *in_step))
    played.say(1, "bye")
    played.say(0, "gave up", "KeyboardInterrupt", True, True)
    assert f"has left a step before its end (KeyboardInterrupt), and {text}. " in str(played.error)


def test_a_launch_that_was_left_before_it_was_made(played):
    """Worker 1 has no entry for it; the others come to it, and wait there."""
    for worker in (0, 2):
        played.launch(worker, TRAIN)
    played.say(1, "gave up", "KeyboardInterrupt", True, False, True)
    played.wait(5, beats=(0, 1, 2), waits=(0, 2))
    assert played.error is None
    played.wait(1, beats=(0, 1, 2), waits=(0, 2))
    assert played.error.worker == 1
    assert "workers 0, 2 did not leave that step" in str(played.error)


def test_a_launch_that_was_left_and_is_made_after_all(played):
    """And is left again later, for which the others have the same time."""
    played.say(1, "gave up", "KeyboardInterrupt", True, False, True)
    for worker in (0, 2):
        played.launch(worker, TRAIN)
    played.wait(3, beats=(0, 1, 2), waits=(0, 2))
    played.launch(1, TRAIN)
    played.wait(100, beats=(0, 1, 2), waits=(0, 1, 2))
    played.say(1, "gave up", "KeyboardInterrupt", True, False, True)
    for worker in (0, 2):
        played.launch(worker, TRAIN)
    played.wait(5, beats=(0, 1, 2), waits=(0, 2))
    assert played.error is None
    played.wait(2, beats=(0, 1, 2), waits=(0, 2))
    assert played.error.worker == 1


def test_a_launch_that_two_have_left_and_one_makes_after_all(played):
    """The time runs when the third has come: without it, nobody can make the launch again."""
    for worker in (0, 1):
        played.say(worker, "gave up", "KeyboardInterrupt", True, False, True)
    played.launch(0, TRAIN)
    played.wait(20, beats=(0, 1, 2), waits=(0,))
    assert played.error is None
    played.launch(2, TRAIN)
    played.wait(7, beats=(0, 1, 2), waits=(0, 2))
    assert played.error.worker == 1
    assert "workers 0, 2 did not leave that step" in str(played.error)


def test_a_launch_that_all_have_left(played):
    """They may save together; if one makes it after all, the others have the heartbeat limit to come."""
    for worker in range(3):
        played.say(worker, "gave up", "KeyboardInterrupt", True, False, True)
    for worker in (0, 2):
        played.launch(worker, SAVE, wait=(1, None))
    played.wait(100, beats=(0, 1, 2), asks=(0, 2))
    assert played.error is None
    played.launch(1, SAVE, wait=(1, None))
    for worker in range(3):
        played.say(worker, "gave up", "KeyboardInterrupt", True, False, True)
    for worker in (0, 2):
        played.launch(worker, TRAIN)
    played.wait(9, beats=(0, 1, 2), waits=(0, 2))
    assert played.error is None
    played.wait(3, beats=(0, 1, 2), waits=(0, 2))
    assert played.error.worker == 1


def test_a_launch_that_was_left_while_the_others_ask_whether_all_come(played):
    """Before a first launch all meet, and meet again before the comparison."""
    for worker in range(3):
        played.launch(worker, SAVE, wait=(1, None))
    played.say(1, "gave up", "KeyboardInterrupt", True, False, True)
    for worker in (0, 2):
        played.launch(worker, TRAIN, SAVE, wait=(2, None))
    played.wait(7, beats=(0, 1, 2), asks=(0, 2))
    assert played.error.worker == 1


def test_the_time_in_which_the_coordinator_stood_still_counts_for_no_step(played):
    played.all_launch(TRAIN)
    left_by(played, 0)
    played.wait(2, beats=(0, 1, 2), in_step=(1, 2))
    played.stand_still()
    for worker in (1, 2):
        left_by(played, worker)
    played.wait(8, beats=(0, 1, 2))
    assert played.error is None
