"""Jobs of several workers: each program is worker 0 of 2, and a process beside it is worker 1."""

import logging
import os
import threading

import pytest
import tensorflow as tf
from helpers import jobs
from helpers.golden import eager_only, shows

from replica_engine import MirroredStrategy
from replica_engine.errors import (
    ClusterConfigError,
    ProgramDisagreementError,
    WorkerLostError,
    WorkersMissingError,
    WorkerVersionError,
)
from replica_engine.errors.run_errors import note_workers
from replica_engine.errors.worker_errors import WorkerRow, runs_alone, tries_again
from replica_engine.workers import Program, cluster, find_cluster, join, joining
from replica_engine.workers.member import _members

FOLLOWS = "member.failed.wait()"


class _Telling(logging.Filter):
    """Gives a process a line to read when the library warns, and lets no later warning through.

    If the process is slow to read it, the library warns again.
    """

    def __init__(self, process):
        super().__init__()
        self._process = process
        self._has_told = False

    def filter(self, record):
        if self._has_told:
            return False
        self._has_told = True
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return True


@pytest.fixture
def worker_1(request, monkeypatch):
    """Runs a program as worker 1, in an environment in which the test's process is worker 0."""
    program, options = request.param
    limits = {name: options[name] for name in ("join", "heartbeat", "stall", "statuses") if name in options}
    about = {name: options[name] for name in ("versions", "replicas") if name in options}
    with jobs.job(2, **limits) as job:
        for name, value in job.environment(0).items():
            monkeypatch.setenv(name, value)
        closing = None
        if program is not None:
            process = job.start(1, program, **about)
            closing = threading.Thread(target=lambda: process.stdout.readline() and job.coordinator.close())
            telling = _Telling(process)
        elif "closes" in options:
            job.coordinator.close()
        if closing and "closes" in options:
            closing.start()
        if "until_warned" in options:
            logging.getLogger("replica_engine").addFilter(telling)
        yield
        if "until_warned" in options:
            logging.getLogger("replica_engine").removeFilter(telling)
        for member in list(_members):
            member.close()
        if closing and "closes" in options:
            closing.join()


def beside(program, **options):
    """Has a program run as worker 1.

    Args:
        program: what it does after it has joined; None starts no worker 1.
        options: of the job, and of the worker; `closes` ends the coordinator as soon as the program prints a line,
            and `until_warned` gives it a line to read as soon as the library warns.
    """

    def mark(test):
        test = pytest.mark.parametrize("worker_1", [(program, options)], indirect=True, ids=["beside"])(test)
        return pytest.mark.usefixtures("worker_1")(test)

    return mark


@shows(ClusterConfigError)
def test_an_address_without_a_port():
    workers = '{"cluster": {"worker": ["a:2222", "b"]}, "task": {"type": "worker", "index": 0}}'
    find_cluster({"TF_CONFIG": workers})


@beside(None)
def test_a_tensor_before_a_strategy_that_needs_a_server(monkeypatch):
    """As on GPUs; on CPUs there is none."""
    import replica_engine
    from replica_engine.strategies import multi_worker

    monkeypatch.setattr(multi_worker, "OVER_SERVER", ("CPU",))
    tf.constant(0.1)
    with pytest.raises(ClusterConfigError, match="TensorFlow has run an op in this process already, and"):
        replica_engine.MultiWorkerMirroredStrategy()


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(joining, "EARLIER_RUN", 1e-3)


@beside("os.kill(os.getpid(), signal.SIGKILL)", statuses=True)
@shows(WorkerLostError)
def test_a_worker_that_is_killed():
    """Worker 1 is killed."""
    member = join()
    member.meet("the checkpoint of step 100")


@beside("member.launched(TRAIN)")
@shows(WorkerLostError.left)
def test_a_worker_whose_data_ends_early():
    """Worker 1 launches one step and ends."""
    member = join()
    step = Program("2d03aa77bb", "train_step", "train.py:40")
    for _ in range(2):
        member.launched(step)
    member.meet("the end of the epoch")


STUCK = """
def reads():
    sys.stdin.readline()


member.launched(TRAIN)
reads()
"""


@beside(STUCK, stall=1.0)
@shows(WorkerLostError.stalled)
def test_a_worker_that_is_stuck():
    """Worker 1 is stuck after its first step, with REPLICA_ENGINE_STALL_TIMEOUT=1."""
    member = join()
    member.launched(Program("2d03aa77bb", "train_step", "train.py:40"))
    member.meet("the checkpoint of step 100")


@beside("print('joined', flush=True); member.failed.wait()", closes=True)
@shows(WorkerLostError.no_coordinator)
def test_the_launcher_is_killed():
    """The launcher is killed."""
    member = join()
    member.meet("the checkpoint of step 100")


@beside(None, join=0.5)
@shows(WorkersMissingError.not_joined)
def test_a_worker_that_never_starts():
    """Nobody starts worker 1, with REPLICA_ENGINE_JOIN_TIMEOUT=0.5."""
    join()


@beside("os._exit(0)")
@pytest.mark.usefixtures("_impatient")
@shows(tries_again)
def test_a_worker_that_comes_back_alone():
    """It tries again for a moment here, and not for 45 s."""
    try:
        join().failed.wait()
    finally:
        os.environ["REPLICA_ENGINE_LAUNCHED"] = ""
        os.environ["REPLICA_ENGINE_PROCESS_ID"] = "1"
        join()


@beside("sys.stdin.readline(); member.meet('the checkpoint of step 100'); member.failed.wait()", until_warned=True)
@shows("slow_workers")
def test_a_worker_that_is_waited_for():
    member = join()
    member.meet("the checkpoint of step 100", warn_after=1.0)


@beside("", versions={"tensorflow": "2.20.0"})
@shows(WorkerVersionError)
def test_another_version():
    """Worker 1 has TensorFlow 2.20.0."""
    join(versions={"tensorflow": "2.21.0"})


@beside("member.launched(TRAIN); member.launched(EVAL); member.failed.wait()")
@shows(ProgramDisagreementError)
def test_another_order():
    """Worker 1 evaluates after its first step."""
    member = join()
    step = Program("2d03aa77bb", "train_step", "train.py:40")
    for _ in range(2):
        member.launched(step)
    member.meet("the end of the epoch")


@beside(f"member.launched(TRAIN); member.meet('a'); {FOLLOWS}")
@shows(note_workers)
@eager_only("a process joins its job once")
def test_a_run_that_stands_still():
    """The timeout of a run says where each worker of the job is."""
    member = join()
    member.launched(jobs.TRAIN)
    member.meet("a")
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], timeout=2.0)

    def step():
        while True:
            threading.Event().wait(0.01)

    strategy.run(step)


def test_the_last_line_names_the_worker_and_the_cause(monkeypatch):
    """A worker that `replica-engine launch` has started need not: the launcher prints it last."""
    row = WorkerRow(1, 2, "node-a", 7)
    (more,) = WorkerLostError("a message").__notes__
    monkeypatch.delenv("REPLICA_ENGINE_LAUNCHED", raising=False)
    first, *_, last = WorkerLostError.raised(row, "ValueError: no file").__notes__
    assert (first, last) == (more, "worker 1 of 2 (node-a, pid 7) has raised ValueError: no file")
    monkeypatch.setenv("REPLICA_ENGINE_LAUNCHED", "1")
    assert WorkerLostError.raised(row, "ValueError: no file").__notes__ == [more]


@pytest.fixture
def _without_a_place(monkeypatch):
    monkeypatch.setattr(cluster, "_warned", [])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")


@pytest.mark.usefixtures("_without_a_place")
@shows(runs_alone)
def test_a_process_of_an_indexed_job_of_kubernetes():
    find_cluster()
