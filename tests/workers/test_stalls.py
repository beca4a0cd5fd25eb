"""Workers that are alive and stuck, or have left a launch for which the others come: who it is, where, and an end."""

import pytest
from helpers.jobs import LONG, LONGER, job
from helpers.played_job import TRAIN, Played
from helpers.workers import HEAD, TAIL, TPU_HEAD, TPU_TAIL, read

from replica_engine.errors import WorkerLostError
from replica_engine.workers import stalls
from replica_engine.workers.job import Limits
from replica_engine.workers.messages import Failure
from replica_engine.workers.program_log import END

EVERYONE = (0, 1, 2)


def stands(played, seconds, waits):
    played.wait(seconds, beats=EVERYONE, waits=waits)


def test_all_are_told_every_ten_minutes_of_one_that_the_others_wait_for():
    played = Played()
    for worker in (0, 2):
        played.launch(worker, TRAIN)
    stands(played, 595, waits=(0, 2))
    assert not played.told_to(None, "warning")
    while not played.told_to(1, "stack"):
        stands(played, 1, waits=(0, 2))
    assert not played.told_to(0, "stack")
    played.answer_stacks(1)
    stands(played, 1, waits=(0, 2))
    ((text,),) = played.told_to(None, "warning")
    assert text.startswith("worker 1 did not go on for 60")
    assert "while workers 0, 2 waited" in text
    assert "worker 1 of 3 (node-1, pid 101): nothing launched yet" in text
    assert "in fetch, of worker 1" in text
    stands(played, 610, waits=(0, 2))  # nobody says where it is, the second time
    assert [text.partition(",")[0] for (text,) in played.told_to(None, "warning")][1].startswith(
        "worker 1 did not go on for 12"
    )
    assert played.error is None


WAITS = Limits(stall=20.0)


@pytest.mark.parametrize(
    ("entries", "states", "stalled"),
    [
        ((1, 1, 1), "w.w", []),  # the others compute, and worker 1 has that step behind it
        ((1, 1, 1), "wsw", [1]),  # its user code runs in the launch
        ((1, 0, 1), "www", [1]),  # in the launch before
        ((1, 0, 1), "w.w", [1]),  # before that launch
        ((0, 1, 0), ".w.", [0, 2]),
        ((0, 1, 0), "ww.", [2]),  # worker 0 waits too
        ((1, 1, 1), "www", None),  # nobody knows whose fault it is
        ((1, 0, 1), "w..", []),  # worker 2 does something else
        ((1, 1, 1), "sss", []),  # all compute
        ((1, 1, 1), "aa.", [2]),  # they ask for a value that it is to put
        ((1, 1, 1), "aw.", []),
        ((1, 0, 1), "a.a", [1]),  # at a checkpoint
        ((1, 1, 1), "aaa", []),
    ],
)
def test_who_is_waited_for(entries, states, stalled):
    """Each worker waits in a program (w), for an answer (a), is in a step (s), or does something else (.)."""
    played = Played(limits=WAITS)
    for worker, count in enumerate(entries):
        if count:
            played.launch(worker, *[TRAIN] * count)
    of_kind = {kind: [worker for worker, each in enumerate(states) if each == kind] for kind in "was"}
    do = {"beats": EVERYONE, "waits": of_kind["w"], "asks": of_kind["a"], "in_step": of_kind["s"]}
    played.wait(20, **do)
    assert played.error is None
    for _ in range(5):
        played.wait(1, **do)
        played.answer_stacks(*EVERYONE)
    if stalled == []:
        assert played.error is None
        return
    error = played.error
    assert isinstance(error, WorkerLostError)
    if stalled is None:
        assert error.worker is None
        assert "All 3 workers have been in the same launch for " in str(error)
        return
    assert error.worker == stalled[0]
    assert "is alive, but did not go on for " in str(error)
    assert all(f"in fetch, of worker {each}" in str(error.__notes__) for each in stalled)
    assert Failure.from_json(played.job.failure.as_json()).is_stall


def test_one_that_goes_on_slowly_is_not_stuck():
    played = Played(limits=WAITS)
    for _ in range(5):
        for worker in (0, 2):
            played.launch(worker, TRAIN)
        stands(played, 15, waits=(0, 2))
        played.launch(1, TRAIN)
        stands(played, 15, waits=EVERYONE)
    assert played.error is None


def test_a_launch_that_calls_the_host_again_and_again_is_not_stuck():
    played = Played(limits=WAITS)
    played.all_launch(TRAIN)
    played.wait(100, beats=EVERYONE, waits=(0, 2), in_step=(1,), calls=40)
    assert played.error is None


def test_one_that_works_on_when_the_programs_of_the_others_have_ended_is_not_stuck():
    played = Played(limits=WAITS)
    played.all_launch(TRAIN)
    for worker in (1, 2):
        played.launch(worker, END, wait=(1, None))
    played.wait(100, beats=EVERYONE, asks=(1, 2))
    assert played.error is None
    played.wait(25, beats=EVERYONE, asks=(1, 2), in_step=(0,))  # but a launch may be
    assert played.error.worker == 0


def test_two_pauses_of_one_worker_do_not_add_up():
    """In a host call, and then between two launches."""
    played = Played(limits=WAITS)
    played.all_launch(TRAIN)
    played.wait(15, beats=EVERYONE, waits=(0, 2), in_step=(1,))
    for worker in (0, 2):
        played.launch(worker, TRAIN)
    stands(played, 15, waits=(0, 2))
    assert played.error is None


def test_a_silent_one_is_not_called_alive():
    played = Played(limits=Limits(heartbeat=60.0, stall=20.0))
    for worker in (0, 2):
        played.launch(worker, TRAIN)
    played.wait(59, beats=(0, 2), waits=(0, 2))
    assert played.error is None
    played.wait(2, beats=(0, 2), waits=(0, 2))
    assert "has not been heard of for 60 s" in str(played.error)


def line_with(text, pipe):
    """Reads until a line has a text, and returns what was read."""
    lines = []
    while not lines or text not in lines[-1]:
        lines.append(pipe.readline())
        assert lines[-1], "".join(lines)
    return "".join(lines)


STUCK = """
def stuck():
    sys.stdin.readline()


member.launched(TRAIN)
member.progress(7)
if member.worker == 1:
    stuck()
member.meet("the checkpoint of step 7")
"""


@pytest.mark.parametrize("comment", ["", "x" * (1 << 20)], ids=["short", "a line of a megabyte"])
def test_a_worker_that_the_others_wait_for_is_named_on_all_with_its_stack(made, monkeypatch, tmp_path, comment):
    """A message has less room than a megabyte; the worker would be lost."""
    monkeypatch.setattr(stalls, "NOTICE", 1.0)
    script = tmp_path / "script.py"
    script.write_text(STUCK.replace("readline()", f"readline()  # {comment}"))
    run = f"exec(compile(open({str(script)!r}).read(), {str(script)!r}, 'exec'))"
    processes = [made.start(worker, run) for worker in range(2)]
    for process in processes:
        text = line_with("in stuck", process.stderr)
        assert "worker 1 did not go on for " in text
        assert "while worker 0 waited" in text
        assert "--stall-timeout" in text
        assert "step 7, launch 1 (`train_step` at train.py:40" in text
        assert "MainThread:" in text
    processes[1].stdin.write("\n")
    processes[1].stdin.flush()
    for process in processes:
        process.communicate(timeout=LONG)
        assert process.returncode == 0


IN_A_STEP = """
strategy = KIND(**GIVEN)


def stuck(value):
    if me and value > 2:
        threading.Event().wait()
    return value


def step(value):
    value = CALL
    return context().all_reduce("SUM", value)


step = WRAP(step)
total = []
try:
    for number in (1.0, 2.0, 3.0):
        total.append(float(strategy.experimental_local_results(strategy.run(step, args=(tf.constant(number),)))[0]))
except replica_engine.errors.WorkerLostError as error:
    found["lost"] = [error.worker, str(error), getattr(error, "__notes__", [])]
found["total"] = total
"""

HOST_OP = "tf.ensure_shape(tf.numpy_function(stuck, [value], tf.float32), [])"
OUTSIDE = "xla.outside_compilation(xla.returns(tf.TensorSpec([]))(stuck), value)"
KINDS = {
    "threads": (HEAD, {"GIVEN": "{}", "CALL": HOST_OP, "WRAP": "tf.function"}),
    "compiled": (
        TPU_HEAD.replace("import json", "import threading, json") + "KIND = replica_engine.TPUStrategy\n",
        {"GIVEN": "{'num_cores': 2}", "CALL": OUTSIDE, "WRAP": ""},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_whose_host_call_is_stuck_in_one_worker_ends_in_the_others(programs, kind):
    head, words = KINDS[kind]
    program = IN_A_STEP
    for name, value in words.items():
        program = program.replace(name, value)
    tail = TPU_TAIL if kind == "compiled" else TAIL
    with job(join=LONGER) as made:
        made.limit(stall=3.0)
        started = made.start_all(programs, head + program + tail, LOCAL="1")
        try:
            found = read(started[0])
        finally:
            started[1].kill()
    found = found[0] if kind == "compiled" else found
    assert found["total"] == [2.0, 4.0]
    lost, text, notes = found["lost"]
    assert lost == 1
    assert "is alive, but did not go on for " in text
    assert "while worker 0 waited for it (--stall-timeout or REPLICA_ENGINE_STALL_TIMEOUT)" in text
    assert any("in stuck" in note and "threading.Event().wait()" in note for note in notes)


LEAVES = """
import logging
from replica_engine.workers import member

strategy = replica_engine.TPUStrategy(num_cores=2, warn_after=0.5)
(connection,) = member._members


def sums():
    return context().all_reduce("SUM", 1.0)


def others():
    return context().all_reduce("MAX", 7.0)


def number(step):
    return float(strategy.experimental_local_results(strategy.run(step))[0])


class Interrupts(logging.Handler):  # Ctrl-C, when the warning comes that a launch waits
    def emit(self, record):
        if "`sums`" in record.getMessage() and actions:
            actions.pop()()


actions = []
logging.getLogger("replica_engine").addHandler(Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
found["numbers"] = [number(sums), number(others)]
if me:
    connection.get("the other was interrupted")
else:
    actions.append(lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    number(sums)
except KeyboardInterrupt:
    connection.put("the other was interrupted", True)
    connection.failed.wait()  # something else than that launch
    found["lost"] = str(connection.failure)
except replica_engine.errors.WorkerLostError as error:
    found["lost"] = str(error)
"""


def test_a_launch_that_one_worker_has_left_ends_in_the_others(programs):
    """Worker 0 catches Ctrl-C while it waits for the other in a launch, and does not make it again."""
    with job(join=LONGER) as made:
        started = [programs.start(TPU_HEAD + LEAVES + TPU_TAIL, env=made.environment(each)) for each in range(2)]
        for process in started:
            found, _ = read(process)
            assert found["numbers"] == [2.0, 7.0]
            assert (
                "has left a step before its end (KeyboardInterrupt), and worker 1 did not leave that step"
                in (found["lost"])
            )
