"""Jobs of several workers: each program is worker 0 of 2, and a process beside it is worker 1."""

import logging
import os
import socket
import threading

import pytest
import tensorflow as tf
from helpers import jobs
from helpers.devices import DEVICES
from helpers.golden import shows

from replica_engine import MirroredStrategy, MultiWorkerMirroredStrategy, hosts
from replica_engine._tf import thread_state, versions
from replica_engine.errors import (
    ClusterConfigError,
    GraphModeError,
    ProgramDisagreementError,
    WorkerLostError,
    WorkersMissingError,
    WorkerVersionError,
    note_workers,
    only_local,
    slow_workers,
    tries_again,
)
from replica_engine.errors.hosts import WorkerRow
from replica_engine.hosts import find_cluster, joining, serve
from replica_engine.hosts.member import _members
from replica_engine.strategies.multi_worker.launches import Launches

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
    limits = {name: options[name] for name in ("join", "heartbeat", "statuses") if name in options}
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


@shows(ClusterConfigError.not_json)
def test_a_tf_config_that_cannot_be_read():
    find_cluster({"TF_CONFIG": "{'cluster': {'worker': ['host-a:2222']}}"})


@shows(ClusterConfigError.bad_value)
def test_an_address_without_a_port():
    find_cluster({"TF_CONFIG": '{"cluster": {"worker": ["a:2222", "b"]}, "task": {"type": "worker", "index": 0}}'})


@shows(ClusterConfigError.bad_value, "of_slurm")
def test_a_list_of_nodes_that_cannot_be_read():
    find_cluster({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "node[1-"})


@shows(ClusterConfigError.missing)
def test_a_number_of_workers_without_a_coordinator():
    find_cluster({"REPLICA_ENGINE_PROCESS_ID": "0", "REPLICA_ENGINE_NUM_PROCESSES": "2"})


@shows(ClusterConfigError.out_of_range)
def test_an_index_that_no_worker_has():
    find_cluster({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"})


@shows(ClusterConfigError.wrong_task)
def test_a_parameter_server_in_the_cluster():
    find_cluster({"TF_CONFIG": '{"cluster": {"worker": ["a:1"], "ps": ["b:1"]}, "task": {"type": "ps", "index": 0}}'})


@shows(ClusterConfigError.wrong_task, "evaluator")
def test_an_evaluator_in_the_cluster():
    find_cluster({"TF_CONFIG": '{"cluster": {"worker": ["host-a:2222"]}, "task": {"type": "evaluator", "index": 0}}'})


@shows(ClusterConfigError.no_token)
def test_a_job_without_a_token():
    environ = {
        "REPLICA_ENGINE_PROCESS_ID": "0",
        "REPLICA_ENGINE_NUM_PROCESSES": "2",
        "REPLICA_ENGINE_COORDINATOR": "host-a:4000",
    }
    hosts.join(environ=environ)


@beside(None)
@shows(ClusterConfigError.other_token)
def test_a_worker_with_another_token():
    os.environ["REPLICA_ENGINE_TOKEN"] = "another secret"
    hosts.join()


@beside(None)
@shows(ClusterConfigError.other_size)
def test_a_worker_that_counts_other_workers():
    os.environ["REPLICA_ENGINE_NUM_PROCESSES"] = "3"
    hosts.join()


@beside(FOLLOWS)
@shows(ClusterConfigError.taken)
def test_two_workers_with_one_index():
    hosts.join()
    os.environ["REPLICA_ENGINE_PROCESS_ID"] = "1"
    hosts.join()


@beside(FOLLOWS)
@shows(ClusterConfigError.joined)
def test_a_process_that_joins_twice():
    hosts.join()
    hosts.join()


@beside(None)
@shows(ClusterConfigError.started)
def test_a_tensor_before_the_strategy():
    import tensorflow as tf

    import replica_engine

    tf.constant(0.1)
    replica_engine.MultiWorkerMirroredStrategy()


@pytest.fixture
def _fresh(monkeypatch):
    """TensorFlow has not started yet, as far as the library knows."""
    monkeypatch.setattr(thread_state, "started", lambda: False)


@beside(FOLLOWS, versions=versions.of_worker(), replicas=len(DEVICES))
@pytest.mark.usefixtures("_fresh")
@shows(ClusterConfigError.port_taken)
def test_a_port_of_tensorflows_server_that_is_taken():
    taken = socket.create_server(("127.0.0.1", 0))
    workers = [f"127.0.0.1:{taken.getsockname()[1]}", "127.0.0.1:1"]
    cluster = tf.train.ClusterSpec({"worker": workers})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    try:
        MultiWorkerMirroredStrategy(resolver)
    finally:
        taken.close()


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(joining, "EARLIER_RUN", 1e-3)


@beside(None)
@pytest.mark.usefixtures("_impatient")
@shows(ClusterConfigError.not_bound)
def test_a_coordinator_whose_port_is_taken():
    """Without `replica-engine launch`."""
    del os.environ["REPLICA_ENGINE_LAUNCHED"]
    hosts.join()


@beside("os.kill(os.getpid(), signal.SIGKILL)", statuses=True)
@shows(WorkerLostError.killed)
def test_a_worker_that_is_killed():
    """Worker 1 is killed."""
    member = hosts.join()
    member.meet("the checkpoint of step 100")


@beside("os._exit(0)", statuses=True)
@shows(WorkerLostError.exited)
def test_a_worker_that_exits():
    """Worker 1 calls os._exit(0)."""
    member = hosts.join()
    member.meet("the checkpoint of step 100")


@beside("os.kill(os.getpid(), signal.SIGKILL)")
@shows(WorkerLostError.vanished)
def test_a_worker_that_is_gone():
    """Worker 1 is killed; `replica-engine launch` has not started it, so nobody knows its exit status."""
    member = hosts.join()
    member.meet("the checkpoint of step 100")


@beside("member.launched(TRAIN); member.progress(1, 'all_reduce SUM at train.py:12'); raise ValueError('no file')")
@shows(WorkerLostError.raised)
def test_a_worker_that_raises():
    """Worker 1 raises ValueError in its first step."""
    member = hosts.join()
    member.launched(hosts.Program("2d03aa77bb", "train_step", "train.py:40"))
    member.meet("the checkpoint of step 1")


@beside("member.launched(TRAIN)")
@shows(WorkerLostError.left)
def test_a_worker_whose_data_ends_early():
    """Worker 1 launches one step and ends."""
    member = hosts.join()
    step = hosts.Program("2d03aa77bb", "train_step", "train.py:40")
    for _ in range(2):
        member.launched(step)
    member.meet("the end of the epoch")


@beside("pass")
@shows(WorkerLostError.left, "in_a_save")
def test_a_chief_that_saves_alone():
    """As `if chief: model.save(...)` at the end of a script; worker 1 comes to the end of it."""
    member = hosts.join()
    member.meet("the saving of a model")


@beside("os.kill(os.getpid(), signal.SIGSTOP)", heartbeat=3.0)
@shows(WorkerLostError.silent)
def test_a_worker_that_is_stopped():
    """Worker 1 gets SIGSTOP, with REPLICA_ENGINE_HEARTBEAT_TIMEOUT=3."""
    member = hosts.join()
    member.meet("the checkpoint of step 100")


@beside("print('joined', flush=True); member.failed.wait()", closes=True)
@shows(WorkerLostError.no_coordinator)
def test_the_launcher_is_killed():
    """The launcher is killed."""
    member = hosts.join()
    member.meet("the checkpoint of step 100")


@beside(None, join=0.5)
@shows(WorkersMissingError.not_joined)
def test_a_worker_that_never_starts():
    """Nobody starts worker 1, with REPLICA_ENGINE_JOIN_TIMEOUT=0.5."""
    hosts.join()


@beside(None, join=0.5, closes=True)
@shows(WorkersMissingError.no_coordinator)
def test_a_coordinator_that_never_starts():
    """Nobody starts worker 0, with REPLICA_ENGINE_JOIN_TIMEOUT=0.5."""
    os.environ["REPLICA_ENGINE_PROCESS_ID"] = "1"
    hosts.join()


@beside("os._exit(0)")
@pytest.mark.usefixtures("_impatient")
@shows(tries_again)
def test_a_worker_that_comes_back_alone():
    """It tries again for a moment here, and not for 45 s."""
    try:
        hosts.join().failed.wait()
    finally:
        os.environ["REPLICA_ENGINE_LAUNCHED"] = ""
        os.environ["REPLICA_ENGINE_PROCESS_ID"] = "1"
        hosts.join()


@pytest.fixture
def _name_of_loopback(worker_1, monkeypatch):
    """Worker 0 starts the coordinator, and the name of its machine is 127.0.1.1 there."""
    monkeypatch.setattr(serve, "start", lambda *_: "127.0.1.1:2223")
    monkeypatch.setenv("REPLICA_ENGINE_LAUNCHED", "")
    monkeypatch.setenv("REPLICA_ENGINE_LISTEN", "")


@beside(None, join=0.5, closes=True)
@pytest.mark.usefixtures("_name_of_loopback")
@shows(only_local)
def test_a_name_that_is_127_0_1_1():
    os.environ["REPLICA_ENGINE_LISTEN"] = "node-0:2223"
    hosts.join()


@beside(FOLLOWS)
@shows(WorkersMissingError.not_met)
def test_a_worker_that_does_not_come():
    """Worker 1 never saves."""
    member = hosts.join()
    member.meet("the checkpoint of step 100", timeout=0.5)


@beside("sys.stdin.readline(); member.meet('the checkpoint of step 100'); member.failed.wait()", until_warned=True)
@shows(slow_workers)
def test_a_worker_that_is_waited_for():
    member = hosts.join()
    member.meet("the checkpoint of step 100", warn_after=1.0)


@beside(FOLLOWS)
@shows(WorkersMissingError.no_value)
def test_a_value_that_nobody_gives():
    member = hosts.join()
    member.get("address", timeout=0.5)


@beside(FOLLOWS)
@shows(WorkersMissingError.no_room)
def test_more_values_than_a_job_keeps():
    member = hosts.join()
    for step in range(10_001):
        member.put(f"loss of step {step}", 0.5)
    member.get("loss of step 10000")


@beside("", versions={"tensorflow": "2.20.0"})
@shows(WorkerVersionError.of_package)
def test_another_version():
    """Worker 1 has TensorFlow 2.20.0."""
    hosts.join(versions={"tensorflow": "2.21.0"})


@beside("", replicas=2)
@shows(WorkerVersionError.of_replicas)
def test_another_number_of_replicas():
    """Worker 1 has two devices."""
    hosts.join(replicas=4)


@beside("member.launched(TRAIN); member.launched(EVAL); member.failed.wait()")
@shows(ProgramDisagreementError.differ)
def test_another_order():
    """Worker 1 evaluates after its first step."""
    member = hosts.join()
    step = hosts.Program("2d03aa77bb", "train_step", "train.py:40")
    for _ in range(2):
        member.launched(step)
    member.meet("the end of the epoch")


@beside(f"member.launched(TRAIN); member.meet('a'); {FOLLOWS}")
@shows(note_workers)
def test_a_run_that_stands_still():
    """The timeout of a run says where each worker of the job is."""
    member = hosts.join()
    member.launched(jobs.TRAIN)
    member.meet("a")
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], timeout=0.5)

    def step():
        while True:
            threading.Event().wait(0.01)

    strategy.run(step)


@beside(FOLLOWS)
@shows(GraphModeError.of_workers)
def test_a_collective_in_a_graph_of_the_past():
    """This is what the strategy calls for each collective; see test_multi_worker.py."""
    launches = Launches(hosts.join())
    with tf.Graph().as_default():
        launches.describe("all_reduce", tf.constant(1.0))


def test_the_last_line_names_the_worker_and_the_cause(monkeypatch):
    """A worker that `replica-engine launch` has started need not: the launcher prints it last."""
    row = WorkerRow(1, 2, "node-a", 7)
    more = "more: replica-engine explain WorkerLostError.raised"
    monkeypatch.delenv("REPLICA_ENGINE_LAUNCHED", raising=False)
    first, *_, last = WorkerLostError.raised(row, "ValueError: no file").__notes__
    assert (first, last) == (more, "worker 1 of 2 (node-a, pid 7) has raised ValueError: no file")
    monkeypatch.setenv("REPLICA_ENGINE_LAUNCHED", "1")
    assert WorkerLostError.raised(row, "ValueError: no file").__notes__ == [more]
