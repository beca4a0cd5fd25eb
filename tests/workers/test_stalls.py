"""Workers that are alive and stuck, or have left a launch for which the others come: who it is, where, and an end."""

import pytest
from helpers.jobs import LONG, LONGER, job
from helpers.workers import HEAD, TAIL, TPU_HEAD, TPU_TAIL, read

from replica_engine.workers import job as job_state


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


def test_a_worker_that_the_others_wait_for_is_named_on_all_with_its_stack(made, monkeypatch):
    monkeypatch.setattr(job_state, "STALL_NOTICE", 1.0)
    processes = [made.start(worker, STUCK) for worker in range(2)]
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
