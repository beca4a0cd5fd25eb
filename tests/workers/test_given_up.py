"""A step of MultiWorkerMirroredStrategy that ends early in some workers: by Ctrl-C, or by an error that is caught."""

import pytest
from helpers.jobs import LONGER, job
from helpers.workers import outputs

from replica_engine.workers import job as job_state

PROGRAM = """
import logging
from replica_engine.pjrt import worker_sums
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS


class Interrupts(logging.Handler):  # Ctrl-C, as soon as the warning comes that a step waits
    def emit(self, record):
        if "has not returned" in record.getMessage() and armed:
            armed.clear()
            os.kill(os.getpid(), signal.SIGINT)


logging.getLogger("replica_engine").addHandler(Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
armed = []
strategy = KIND(warn_after=0.5)
member = strategy.extended.job.member
never = tf.queue.FIFOQueue(1, [tf.float32], [[]])


def step(value, waits, fails):
    if waits:
        value += never.dequeue()
    if fails:
        tf.debugging.assert_greater(value, 0.0)
    return context().all_reduce("SUM", value)


@tf.function
def train(value, waits=False, fails=False):
    return strategy.experimental_local_results(strategy.run(step, args=(value, waits, fails)))[0]


found["first"] = float(train(tf.constant(1.0), fails=True))
armed.append(True)
try:
    train(tf.constant(1.0), waits=True)
except KeyboardInterrupt:
    found["interrupted"] = True
member.meet("after a step that both have left")
found["both"] = float(train(tf.constant(2.0)))
values = tf.fill([3000] if os.environ["HOW"] == "compiler" else [], 1.0)


def no_memory(*given):
    raise RUNTIME_ERRORS[0]("no memory")


if me:
    if os.environ["HOW"] == "ctrl-c":
        armed.append(True)
    if os.environ["HOW"] == "compiler":
        worker_sums._compiled = no_memory
    try:
        train(-values, fails=os.environ["HOW"] == "error")
    except (KeyboardInterrupt, tf.errors.InvalidArgumentError, replica_engine.errors.ProgramError) as error:
        found["left"] = type(error).__name__
    member.put("left", True)
    try:
        train(tf.constant(1.0))
    except replica_engine.errors.WorkerLostError as error:
        found["next"] = error.worker
else:
    try:
        if os.environ["HOW"] != "compiler":
            member.get("left")  # after Ctrl-C in a sum, the job has failed already
        train(values, fails=os.environ["HOW"] == "error")
    except replica_engine.errors.WorkerLostError as error:
        found["lost"] = [error.worker, error.exception, str(error)]
"""


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("ctrl-c", "KeyboardInterrupt"),
        ("compiler", "ProgramError"),
        pytest.param("error", "InvalidArgumentError", marks=pytest.mark.full("leaves the step as Ctrl-C does")),
    ],
)
def test_a_step_that_one_worker_leaves_ends_in_the_others(programs, monkeypatch, how, error):
    """Both leave the same step before, and go on together."""
    monkeypatch.setattr(job_state, "INTERRUPTED", 8.0)
    with job(join=LONGER) as made:
        made.limit(heartbeat=15.0)
        of_0, of_1 = outputs(programs, made, PROGRAM, local=2, HOW=how)
    for each in of_0, of_1:
        assert (each["first"], each["interrupted"], each["both"]) == (4.0, True, 8.0)
    assert (of_1["left"], of_1["next"]) == (error, 1)
    lost, exception, text = of_0["lost"]
    assert (lost, exception.partition(":")[0].rpartition(".")[2]) == (1, error)
    stayed = ["worker 0 did not leave that step", *(["others may wait in its sum"] if how != "error" else [])]
    assert any(f"has left a step before its end ({exception}), and {each}" in text for each in stayed)
    if how == "compiler":
        assert ", call 1 failed in worker 1: no memory" in exception


NOT_LEFT = """
from replica_engine.upstream import worker_collectives as collectives

strategy = KIND()
left = []
collectives.on_left(left.append)


@tf.function
def fails(value):
    tf.debugging.assert_greater(value, 0.0)


def reads():
    try:
        fails(tf.constant(-1.0))
    except tf.errors.InvalidArgumentError:
        found["caught"] = found.get("caught", 0) + 1


def step(value, beside):
    if beside:
        tf.py_function(reads, [], [])
    return context().all_reduce("SUM", value)


@tf.function
def train(value, beside=False):
    return strategy.experimental_local_results(strategy.run(step, args=(value, beside)))[0]


concrete = train.get_concrete_function(tf.TensorSpec([]))
found["sums"] = [float(concrete(tf.constant(1.0)))]
reads()
found["sums"].append(float(train(tf.constant(1.0), beside=True)))
found["left"] = len(left)
"""


def test_an_exception_beside_a_step_leaves_no_step(programs):
    """After the call of a concrete function, and on another thread, which reads data for example, while a step runs."""
    with job(join=LONGER) as made:
        for each in outputs(programs, made, NOT_LEFT):
            assert each == {"sums": [2.0, 2.0], "caught": 2, "left": 0}
