"""What a worker of TPUStrategy gets when another one is lost, comes late, or launches something else."""

import json
import re
import signal

import pytest
from helpers.jobs import LONGER, is_stopped, job, until
from helpers.workers import IN_ANOTHER_ORDER, TPU_HEAD

STEPS = """
from replica_engine.workers import member

victim = int(os.environ["VICTIM"])
strategy = replica_engine.TPUStrategy(
    num_cores=int(os.environ["CORES"]), distribution=os.environ["DISTRIBUTION"] or None
)
with strategy.scope():
    w = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)


def step(x):
    w.assign_add(xla.cross_replica_sum(tf.reduce_sum(x)))
    return w.read_value()


def several(_, x):
    step(x)


for _ in range(5):
    strategy.run(step, args=(tf.ones([4]),))
if os.environ["LOOP"]:
    strategy.reduce("SUM", strategy.run(step, args=(tf.ones([4]),)), axis=None)  # a launch, and no step
    strategy.run_steps(several, [tf.ones([4])] * 4, iterations=4)
(connection,) = member._members
if me == victim:
    connection.get("the other has made these steps")  # else it may be told of the loss before its `try`
    connection.rows()  # sends what was launched, which is told a tenth of a second later otherwise
    {fault}
connection.put("the other has made these steps", True)
try:
    while True:
        strategy.run(step, args=(tf.ones([4]),))
except replica_engine.errors.WorkerLostError as error:
    try:
        float(w)
    except replica_engine.errors.LostVariableError as lost:
        pass
    print(json.dumps([error.worker, error.pid, error.step, str(error)]), flush=True)
    raise
"""

FAULTS = {  # what worker's program does, the words of the others' error, and its own exit status
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "has closed its connection without a word", -signal.SIGKILL),
    "stopped": ("os.kill(os.getpid(), signal.SIGSTOP)", "has not been heard of for 8 s", -signal.SIGKILL),
    "raised": ("raise ValueError('the body')", "has raised ValueError: the body", 1),
    "left": ("sys.exit(0)", "has come to the end of its program or to sys.exit", 0),
}


@pytest.mark.parametrize(  # with one replica a worker, which is two cores, XLA starts programs differently
    ("fault", "victim", "cores", "distribution"),
    [
        *(("killed", 0, 2, ""), ("raised", 1, 4, "")),
        *(
            pytest.param(*case, marks=pytest.mark.full("differs in how it ends, or as on threads"))
            for case in (("killed", 1, 4, ""), ("left", 0, 2, ""), ("stopped", 0, 2, "fsdp"))
        ),
    ],
)
def test_the_others_are_told_who_is_lost(programs, fault, victim, cores, distribution):
    code, words, status = FAULTS[fault]
    told = fault in ("raised", "left")  # with the very last words of the worker
    asked = {"VICTIM": str(victim), "CORES": str(cores), "LOOP": "loop" if told else "", "DISTRIBUTION": distribution}
    with job(join=LONGER) as made:
        text = TPU_HEAD + STEPS.replace("{fault}", code)
        lost, other = (programs.start(text, env=made.environment(worker, **asked)) for worker in (victim, 1 - victim))
        try:
            if fault == "stopped":
                until(lambda: is_stopped(lost.pid), LONGER)
                made.limit(heartbeat=8.0)
            out, err = other.communicate(LONGER)
        finally:
            lost.kill() if fault == "stopped" else lost.communicate(LONGER)
            other.kill()
    assert other.returncode == 1, err[-4000:]  # its own exception: no abort
    line = next(line for line in out.splitlines() if line.startswith(f"[{victim}, "))  # Gloo prints too
    worker, pid, step, message = json.loads(line)
    assert (worker, pid, lost.returncode) == (victim, lost.pid, status)
    if fault == "stopped":  # not before the limit, by the clock of the coordinator
        assert made.coordinator.failure.arguments[0].silent >= 8.0
    assert step == 10 if told else step in (None, *range(6))
    assert f"worker {victim} of 2" in message
    assert words in message
    assert f"`{'several' if told else 'step'}` at program.py:" in message


JOINING = """
import socket
from replica_engine.workers import member
from replica_engine.pjrt import job_devices, jaxlib_service


def dies(*_, **__):
    (connection,) = member._members
    if os.environ["LATE"]:
        connection.get("the other knows where the service is")
    os.kill(os.getpid(), signal.SIGKILL)


def late(place, hold=jaxlib_service.hold):
    (connection,) = member._members
    connection.put("the other knows where the service is", True)
    assert connection.failed.wait(300)
    host, port = place["lifeline"].rsplit(":", 1)
    try:
        while True:  # the service ends after worker 0
            socket.create_connection((host, int(port))).close()
    except OSError:
        hold(place)


if me == int(os.environ["VICTIM"]):
    setattr(job_devices.jaxlib, os.environ["IN"], dies)
elif os.environ["LATE"]:
    jaxlib_service.hold = late
try:
    replica_engine.TPUStrategy(num_cores=2)
except replica_engine.errors.WorkerLostError as error:
    print(json.dumps([error.worker, type(error.__cause__).__name__]), flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("victim", "place", "late", "cause"),
    [
        *(
            pytest.param(*case, marks=pytest.mark.full("differs in the moment"))
            for case in ((1, "get_distributed_runtime_client", "", "NoneType"), (0, "make_cpu_client", "", "NoneType"))
        ),
        (1, "make_cpu_client", "", "NoneType"),
        (0, "get_distributed_runtime_client", "late", "ConnectionRefusedError"),
    ],
)
def test_a_worker_that_is_killed_while_the_job_joins(programs, victim, place, late, cause):
    """jaxlib would wait for it for minutes; the other is told by the job, and ends with its own exception."""
    with job(join=LONGER) as made:
        asked = {"VICTIM": str(victim), "IN": place, "LATE": late}
        lost, other = (
            programs.start(TPU_HEAD + JOINING, env=made.environment(worker, **asked)) for worker in (victim, 1 - victim)
        )
        try:
            out, err = other.communicate(LONGER / 2)  # jaxlib gives up after 300 s
        finally:
            lost.communicate(LONGER)
            other.kill()
    assert other.returncode == 1, err[-4000:]  # its own exception: no abort
    assert json.loads(out.splitlines()[-1]) == [victim, cause]


LATE = """
import logging, re
from replica_engine.workers import member

strategy = replica_engine.TPUStrategy(num_cores=2, warn_after=0.5)
limited = replica_engine.TPUStrategy(num_cores=2, timeout=1, warn_after=0.1)  # warns long before its time is up
numbers = tf.data.Dataset.range(12).map(lambda x: tf.cast(x, tf.float32)).batch(4, drop_remainder=True)
next(iter(strategy.experimental_distribute_dataset(numbers)))
divided = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp", timeout=15)  # both compile in that time


def loop():
    return divided.run_steps(lambda _, x: None, [tf.ones([4])], iterations=1)


loop()


def sums():
    return context().all_reduce("SUM", 1.0)


if me:
    (connection,) = member._members

    def stay(*_):  # instead of waiting for the other to launch what both have compiled
        connection.failed.wait(300)
        connection.check()

    connection.meet = stay
    strategy.run(sums)


def kind(work):
    try:
        return work()
    except (replica_engine.errors.ReplicaTimeoutError, replica_engine.errors.WorkersMissingError) as error:
        text = str([error, *getattr(error, "__notes__", [])])
        waited = re.search(r"waiting for the question whether all workers have a next batch for ([0-9.e+]+) s", text)
        return type(error).__name__, "worker 1 of 2" in text, waited and float(waited[1]) < 300


def variable():
    with limited.scope():
        tf.Variable(1.0)


interrupts = []


class Interrupts(logging.Handler):  # Ctrl-C, as soon as the warning comes that the first launch waits
    def emit(self, record):
        print(record.getMessage(), file=sys.stderr)
        if "the first launch of `sums`" in record.getMessage() and not interrupts:
            interrupts.append(record)  # once: a second one would not be caught
            os.kill(os.getpid(), signal.SIGINT)


logging.getLogger("replica_engine").addHandler(Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    strategy.run(sums)
except KeyboardInterrupt:
    print("interrupted", flush=True)
batches = iter(limited.experimental_distribute_dataset(numbers))
print(json.dumps([kind(variable), kind(lambda: next(batches)), kind(loop)]), flush=True)
raise ValueError("the other must know")
"""


def test_waits_for_others_end_at_the_limit_and_with_ctrl_c(programs):
    with job(join=LONGER) as made:
        waits, late = made.start_all(programs, TPU_HEAD + LATE)
        try:
            out, err = waits.communicate(LONGER)
            _, of_late = late.communicate(LONGER)
        finally:
            waits.kill()
            late.kill()
    assert waits.returncode == 1, err[-4000:]  # its own exception: no abort
    lines = out.splitlines()  # Gloo prints at the exit
    assert "interrupted" in lines
    expired = ["ReplicaTimeoutError", True, True]
    assert json.dumps([["WorkersMissingError", True, None], expired, expired]) in lines
    assert "for the other workers to come to the question whether all workers have a next batch:" in err
    assert "WorkerLostError: worker 0 (" in of_late
    assert "more: errors/WorkerLostError.html" in of_late


ORDER = """
strategy = replica_engine.TPUStrategy(num_cores=2)


def sums(x):
    return context().all_reduce("SUM", x)


def maxima(x):
    return context().all_reduce("MAX", x)


both = [sums, maxima]
"""

BATCHES = """
strategy = replica_engine.TPUStrategy(num_cores=2)
x = tf.data.Dataset.range(48).map(lambda i: tf.cast(i, tf.float32)).batch(16 if me else 8)
for batch in strategy.experimental_distribute_dataset(x):
    strategy.run(lambda x: context().all_reduce("SUM", tf.reduce_sum(x)), args=(batch,))
    print("a number", flush=True)
"""


def errors_of_all(programs, text, **environment):
    """What each of two workers, none of which comes to a number, says at its end."""
    with job(join=LONGER) as made:
        for process in made.start_all(programs, TPU_HEAD + text, **environment):
            out, err = process.communicate(LONGER)
            assert process.returncode == 1, err[-4000:]
            assert "a number" not in out
            yield err


@pytest.mark.full("found as reductions that differ are, below")
def test_another_size_of_batches_is_named(programs):
    for err in errors_of_all(programs, BATCHES):
        for worker, rows in ((0, 4), (1, 8)):
            place = rf"compilation of `lambda` at program.py:\d+ of .* float32\[{rows}\], program"
            assert re.search(f"worker {worker}: {place}", err)


@pytest.mark.parametrize("later", [0, pytest.param(1, marks=pytest.mark.full("test_job.py has it without processes"))])
def test_another_order_is_found(programs, later):
    """When the programs are compiled, before there is a number; later, soon after the launch."""
    for err in errors_of_all(programs, ORDER + IN_ANOTHER_ORDER, LATER=str(later)):
        for words in ("ProgramDisagreementError: After", "`sums` at program.py:", "`maxima` at program.py:"):
            assert words in err


REDUCTIONS = """
strategy = replica_engine.TPUStrategy(num_cores=2)
for size in range(1, 10):
    strategy.reduce("SUM", strategy.experimental_distribute_values_from_function(lambda _: tf.ones([size])), axis=None)
shares = strategy.experimental_distribute_values_from_function(lambda _: tf.ones([10]))
strategy.reduce("MEAN" if me else "SUM", shares, axis=None)
"""


def test_reductions_that_differ_are_named_by_the_line_that_makes_them(programs):
    with job(join=LONGER) as made:
        started = made.start_all(programs, TPU_HEAD + REDUCTIONS)
        for process in started:
            _, err = process.communicate(LONGER)
            assert process.returncode == 1, err[-4000:]
            line = (TPU_HEAD + REDUCTIONS).splitlines().index(
                next(x for x in REDUCTIONS.splitlines() if "MEAN" in x)
            ) + 1
            assert f"`reduce_SUM` at program.py:{line}" in err
            assert f"`reduce_MEAN` at program.py:{line}" in err
            assert "has been traced" not in err
