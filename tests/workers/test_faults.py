"""What the others get when something happens to a worker: real processes, the first worker or another as victim."""

import os
import pathlib
import signal
import socket
import threading

import psutil
import pytest
from helpers.jobs import EVAL, LONG, TRAIN, Ending, Proxy, is_stopped, job, until

from replica_engine.errors import (
    ClusterConfigError,
    ProgramDisagreementError,
    WorkerLostError,
    WorkersMissingError,
    WorkerVersionError,
)
from replica_engine.workers import job as job_state
from replica_engine.workers import joining
from replica_engine.workers.server import Coordinator

VICTIMS = pytest.mark.parametrize("victim", [0, 1])
SHORT = 8.0  # the heartbeat limit of tests that must wait for it, once the worker has fallen silent


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """How a process ended is known soon after its connection has, but how soon depends on the machine."""
    monkeypatch.setattr(job_state, "STATUS_PATIENCE", LONG)


def lost(member):
    """The error that a worker gets when another is lost."""
    assert member.failed.wait(LONG)
    with pytest.raises(WorkerLostError) as caught:
        member.check()
    return caught.value


@VICTIMS
@pytest.mark.parametrize("statuses", [True, False], ids=["launched", "no launcher"])
def test_killed(victim, statuses):
    with job(statuses=statuses) as made:
        process = made.start(victim, "os.kill(os.getpid(), signal.SIGKILL)")
        error = lost(made.join(1 - victim))
    assert (error.worker, error.pid, error.signal) == (victim, process.pid, signal.SIGKILL if statuses else None)
    what = "was ended by signal 9 (SIGKILL)" if statuses else "has closed its connection without a word"
    assert f"worker {victim} of 2 ({error.host}, pid {process.pid}) {what}" in str(error)


@VICTIMS
def test_raised(victim, made):
    program = """
member.launched(TRAIN)
member.progress(150, "all_reduce SUM at train.py:12")
raise ValueError("the body")
"""
    process = made.start(victim, program)
    error = lost(made.join(1 - victim))
    _, printed = process.communicate(timeout=LONG)
    assert process.returncode == 1
    assert printed.endswith("ValueError: the body\n")
    assert (error.exception, error.step, error.worker) == ("ValueError: the body", 150, victim)
    assert error.sync_point == "all_reduce SUM at train.py:12"
    assert "Its last: step 150, launch 1 (`train_step` at train.py:40, program 2d03aa77), sync point all_re" in str(
        error
    )


@VICTIMS
def test_exit_0_too_early_past_python(victim):
    with job(statuses=True) as made:
        made.start(victim, "os._exit(0)")
        error = lost(made.join(1 - victim))
    assert (error.worker, error.status) == (victim, 0)
    assert "has exited with status 0 before the others came to their end" in str(error)


@VICTIMS
@pytest.mark.parametrize("program", ["", "sys.exit(0)", "sys.exit(3)"], ids=["end", "exit 0", "exit 3"])
def test_exit_too_early(victim, program, made):
    process = made.start(victim, f"member.launched(TRAIN)\n{program}")
    member = made.join(1 - victim)
    member.launched(TRAIN)
    member.launched(TRAIN)
    error = lost(member)
    process.communicate(timeout=LONG)
    assert error.worker == victim
    assert f"has come to the end of its program or to sys.exit, and worker {1 - victim} goes on" in str(error)
    assert process.returncode == (3 if "3" in program else 0)


@VICTIMS
def test_stopped(victim, made):
    process = made.start(victim, "os.kill(os.getpid(), signal.SIGSTOP)")
    member = made.join(1 - victim)
    until(lambda: is_stopped(process.pid))
    made.limit(heartbeat=SHORT)
    error = lost(member)
    assert process.poll() is None
    assert error.worker == victim
    assert f"has not been heard of for {SHORT:g} s" in str(error)


@VICTIMS
def test_the_network_is_cut(victim, made):
    """The one on the other side of the cut hears no coordinator; the others do not hear of it."""
    proxy = Proxy(made.address)
    program = """
print("joined", flush=True)
member.heartbeat = float(sys.stdin.readline())
member.failed.wait()
member.check()
"""
    process = made.start(victim, program, address=proxy.address)
    member = made.join(1 - victim)
    assert process.stdout.readline() == "joined\n"
    proxy.cut()
    made.limit(heartbeat=SHORT)
    process.stdin.write(f"{SHORT}\n")
    process.stdin.flush()
    error = lost(member)
    _, printed = process.communicate(timeout=LONG)
    failure = made.coordinator.failure
    proxy.close()
    assert error.worker == victim
    assert failure.arguments[0].silent >= SHORT  # by the clock of the coordinator
    assert f"has not been heard of for {SHORT:g} s" in str(error)
    assert process.returncode == 1
    assert "WorkerLostError: The coordinator of the job at" in printed
    assert f"has not been heard of for {SHORT:g} s" in printed


def test_never_starts():
    """The limit passes when two of four are there."""
    with job(size=4) as made:
        other = made.start(2, "")

        def limit():
            until(lambda: len(made.coordinator._job._members) == 2)
            made.limit(join=0.5)

        thread = threading.Thread(target=limit)
        thread.start()
        with pytest.raises(WorkersMissingError, match=r"did not join within 0.5 s: worker") as caught:
            made.join(0)
        thread.join(LONG)
        other.communicate(timeout=LONG)
    assert caught.value.workers == (1, 3)
    assert other.returncode == 1


def test_dies_before_all_have_joined():
    """The others do not wait for the join limit then."""
    with job(size=3, statuses=True) as made:
        made.start(1, "", REPLICA_ENGINE_PROCESS_ID="7").communicate(timeout=LONG)
        with pytest.raises(WorkerLostError, match="worker 1 of 3 has exited with status 1") as caught:
            made.join(0)
    assert caught.value.status == 1


def test_comes_late():
    """Who comes after the first failure gets it too."""
    with job(size=3) as made:
        program = "raise AssertionError('joined, and not all are there')"
        first = made.start(0, program, versions={"tensorflow": "2.21.0"})
        second = made.start(1, program, versions={"tensorflow": "2.20.0"})
        assert "WorkerVersionError" in first.communicate(timeout=LONG)[1]
        assert "WorkerVersionError" in second.communicate(timeout=LONG)[1]
        with pytest.raises(WorkerVersionError, match="different versions of tensorflow"):
            made.join(2)


@pytest.mark.parametrize(
    ("ours", "theirs", "groups"),
    [
        ({"versions": {"tensorflow": "2.21.0"}}, {"versions": {"tensorflow": "2.20.0"}}, ("2.20.0", "2.21.0")),
        ({"versions": {"jaxlib": "0.10.2"}}, {}, ("0.10.2", "not there")),
        ({"replicas": 4}, {"replicas": 2}, ("2", "4")),
    ],
)
def test_another_version_or_number_of_replicas(ours, theirs, groups, made):
    other = made.start(1, "raise AssertionError", **theirs)
    with pytest.raises(WorkerVersionError) as caught:
        made.join(0, **ours)
    assert "WorkerVersionError" in other.communicate(timeout=LONG)[1]
    assert sorted(value for _, value in caught.value.groups) == list(groups)
    assert sorted(indices for indices, _ in caught.value.groups) == [(0,), (1,)]


@VICTIMS
def test_another_order(victim, made):
    other = made.start(victim, "member.launched(TRAIN); member.launched(EVAL); member.failed.wait(); member.check()")
    member = made.join(1 - victim)
    member.launched(TRAIN)
    member.launched(TRAIN)
    assert member.failed.wait(LONG)
    with pytest.raises(ProgramDisagreementError) as caught:
        member.check()
    assert "ProgramDisagreementError" in other.communicate(timeout=LONG)[1]
    assert caught.value.position == 1
    assert dict(caught.value.groups) == {
        (victim,): "launch of `eval_step` at train.py:80, program 91c4e0d2",
        (1 - victim,): "launch of `train_step` at train.py:40, program 2d03aa77",
    }


def test_another_program_is_found_before_it_is_compiled(made):
    made.start(1, "member.compile(workers.Program('ffff', 'train_step', 'train.py:40'))")
    with pytest.raises(ProgramDisagreementError, match=r"worker 1: compilation of .*, program ffff"):
        made.join(0).compile(TRAIN)


def test_one_compiles_while_another_launches(made):
    """It would wait in the barrier, and the other in the program."""
    made.start(1, "member.launched(TRAIN); member.failed.wait()")
    with pytest.raises(ProgramDisagreementError, match="compilation of `eval_step`"):
        made.join(0).compile(EVAL)


def test_all_is_compared_before_a_checkpoint(made):
    """A difference that no message about launches has told yet comes with the wait."""
    made.start(1, "member.launched(TRAIN); member.meet('checkpoint'); member.failed.wait()")
    member = made.join(0)
    member.launched(EVAL)
    with pytest.raises(ProgramDisagreementError):
        member.meet("checkpoint")


def test_another_token(made):
    process = made.start(1, "", REPLICA_ENGINE_TOKEN="the secret of another job")
    assert "ClusterConfigError: The coordinator at" in process.communicate(timeout=LONG)[1]
    made.start(1, "")
    assert made.join(0).size == 2, "the job goes on"


def test_no_token():
    with job() as made, pytest.raises(ClusterConfigError, match="REPLICA_ENGINE_TOKEN is not set"):
        made.join(0, REPLICA_ENGINE_TOKEN="")


@pytest.mark.parametrize("token", ["guess me", "secret-of-a-job", " " * 20, "a short one     \n"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_token_that_could_be_guessed(worker, token):
    with job() as made, pytest.raises(ClusterConfigError, match="must have at least 16: who reaches the") as caught:
        made.join(worker, REPLICA_ENGINE_TOKEN=token)
    assert not token.strip() or token.strip() not in str(caught.value)


def test_a_token_of_sixteen_characters():
    with job() as made, pytest.raises(ClusterConfigError, match="has another REPLICA_ENGINE_TOKEN"):
        made.join(0, REPLICA_ENGINE_TOKEN="0123456789abcdef")


def test_two_with_one_index(made):
    made.start(1, "sys.stdin.readline()")
    member = made.join(0)
    with pytest.raises(ClusterConfigError, match=r"worker 1 has joined already \("):
        made.join(1)
    assert not member.failed.is_set(), "the job goes on"


def test_another_number_of_workers():
    with job() as made, pytest.raises(ClusterConfigError, match="told that the job has 3 workers, and its coordinator"):
        made.join(0, REPLICA_ENGINE_NUM_PROCESSES="3")


def test_nobody_listens(unused_port):
    with job() as made, pytest.raises(WorkersMissingError, match=r"was not reached within 0\.2 s"):
        made.join(1, address=f"127.0.0.1:{unused_port}", REPLICA_ENGINE_JOIN_TIMEOUT="0.2")


def test_the_coordinator_ends(made):
    made.start(1, "member.failed.wait()")
    member = made.join(0)
    made.coordinator.close()
    error = lost(member)
    assert error.worker is None
    assert "It runs in `replica-engine launch`, which has ended" in str(error)


CHIEF = {"REPLICA_ENGINE_LAUNCHED": ""}


def test_a_child_of_worker_0_is_the_coordinator_and_stays_when_worker_0_is_killed(unused_port, made):
    made.address = f"127.0.0.1:{unused_port}"
    program = """
from replica_engine.workers import server as serve
print(serve.started[0].pid, flush=True)
os.kill(os.getpid(), int(sys.stdin.readline()))
"""
    first = made.start(0, program, **CHIEF)
    member = made.join(1, **CHIEF)
    coordinator = Ending(int(first.stdout.readline()))
    first.stdin.write(f"{signal.SIGKILL:d}\n")
    first.stdin.flush()
    error = lost(member)
    member.close()
    coordinator.wait()
    assert (error.worker, error.pid) == (0, first.pid)


def test_a_coordinator_that_is_a_child_ends_with_its_job(unused_port, made):
    made.address = f"127.0.0.1:{unused_port}"
    program = "from replica_engine.workers import server as serve; print(serve.started[0].pid, flush=True)"
    first = made.start(0, program, **CHIEF)
    member = made.join(1, **CHIEF)
    pid = int(first.stdout.readline())
    coordinator = Ending(pid)
    assert made.token not in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    member.leave()
    assert first.communicate(timeout=LONG) == ("", "")
    coordinator.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_coordinator_that_is_a_child_does_not_end_by_a_signal(number, unused_port, made):
    """Slurm sends them to all processes of a job, and the workers have to agree on the step after which they save."""
    made.address = f"127.0.0.1:{unused_port}"
    program = """
from replica_engine.workers import server as serve
print(serve.started[0].pid, flush=True)
member.meet("save")
"""
    first = made.start(0, program, **CHIEF)
    member = made.join(1, **CHIEF)
    os.kill(int(first.stdout.readline()), number)
    member.meet("save", timeout=LONG)
    member.leave()
    assert first.communicate(timeout=LONG) == ("", "")


def test_worker_0_knows_where_the_others_come_to(unused_port, made):
    """And not only under which name, which may be 127.0.1.1 on its own machine."""
    program = """
from replica_engine.workers.cluster import held_address, own_host
address, held = held_address(member._address, member.reached)
print(own_host(member._address, member.reached), address.rpartition(":")[0], held.getsockname()[0], flush=True)
"""
    listening = {"REPLICA_ENGINE_LISTEN": f"0.0.0.0:{unused_port}"}
    first = made.start(0, program, address=f"localhost:{unused_port}", **CHIEF, **listening)
    member = made.join(1, address=f"127.0.0.2:{unused_port}", **CHIEF)
    assert first.stdout.readline().split() == ["127.0.0.2"] * 3
    member.leave()
    assert first.communicate(timeout=LONG)[1] == ""


def test_worker_0_says_that_it_listens_for_its_own_machine_only(unused_port, caplog):
    with job(join=0.5) as made, pytest.raises(WorkersMissingError) as caught:
        made.join(0, address=f"localhost:{unused_port}", **CHIEF)
    assert caplog.messages == []  # which is what was asked for
    cure = f"set REPLICA_ENGINE_LISTEN=0.0.0.0:{unused_port} for worker 0"
    assert f"The coordinator listens at 127.0.0.1:{unused_port}, where only" in str(caught.value)
    assert cure in str(caught.value)


def warned(process):
    """Waits until a worker warns that it tries again."""
    lines = iter(process.stderr.readline, "")
    return next(line for line in lines if "it tries again for" in line)


COME_BACK = "print('joined', member.worker, flush=True)"


@pytest.mark.parametrize("earlier", ["failed", "not over"])
def test_a_worker_that_comes_back_waits_for_the_earlier_run_to_end(earlier, made):
    """The coordinator of that run still listens, and refuses the worker."""
    first = made.start(0, "raise ValueError('the body')" if earlier == "failed" else "member.failed.wait()")
    second = made.join(1)
    if earlier == "failed":
        lost(second)
    process = made.start(1, COME_BACK, **CHIEF)
    assert ("ValueError: the body" if earlier == "failed" else "has joined already") in warned(process)
    first.kill()
    second.close()
    made.coordinator.close()
    with Coordinator(2, made.token, made.address, made.limits):
        member = made.join(0)
        assert process.stdout.readline() == "joined 1\n"
        member.leave()
        assert process.wait(LONG) == 0


def test_worker_0_waits_for_the_port_of_the_earlier_run(unused_port):
    with job() as made, socket.create_server(("127.0.0.1", unused_port)) as earlier:
        made.address = f"127.0.0.1:{unused_port}"
        process = made.start(0, COME_BACK, **CHIEF)
        assert f"cannot listen at {made.address}" in warned(process)
        earlier.close()
        member = made.join(1)
        assert process.stdout.readline() == "joined 0\n"
        member.leave()
        assert process.wait(LONG) == 0


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(joining, "EARLIER_RUN", 0.1)


@pytest.mark.usefixtures("_impatient")
def test_a_worker_tries_again_for_some_time_only(made):
    made.start(0, "raise ValueError('the body')")
    member = made.join(1)
    lost(member)
    member.close()
    with pytest.raises(WorkerLostError, match="ValueError: the body"):
        made.join(1, **CHIEF)


@pytest.mark.usefixtures("_impatient")
def test_a_port_that_is_taken():
    with job() as made, pytest.raises(ClusterConfigError, match=r"cannot listen at .*: .*[Aa]ddress already in use"):
        made.join(0, **CHIEF)


def test_a_failed_worker_leaves_with_its_own_status(tmp_path):
    """An error of the job that nobody catches is status 1, and the exit does not hang, nor wait for the collector."""
    program = f"""
class Log:
    def __init__(self):
        self.itself, self.file = self, open({str(tmp_path / "log")!r}, "w")
        self.file.write("the last line")
    def __del__(self, say=os.write):
        say(1, b"collected")
log = Log()
member.failed.wait()
member.check()
"""
    with job() as made:
        process = made.start(1, program, REPLICA_ENGINE_LAUNCHED="")
        member = made.join(0)
        member.launched(TRAIN)
        member.tell_exception(ValueError("here"))
        destroyed, printed = process.communicate(timeout=LONG)
    assert process.returncode == 1
    assert "has raised ValueError: here" in printed
    assert "collected" not in destroyed
    assert (tmp_path / "log").read_text() == "the last line"
    assert "\nstart all workers again from the last checkpoint; `replica-engine launch --max-" in printed


def test_a_forked_child_neither_says_goodbye_nor_keeps_the_connection(made):
    program = """
if os.fork() == 0:
    sys.exit()  # runs what is registered for the exit
os.wait()
if os.fork() == 0:
    signal.pause()
print("forked", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    process = made.start(1, program)
    member = made.join(0)
    assert process.stdout.readline() == "forked\n"
    assert member.rows()[1].pid == process.pid, "still there"
    (child,) = psutil.Process(process.pid).children()
    process.stdin.write("now\n")
    process.stdin.flush()
    assert lost(member).worker == 1
    assert child.is_running()
    child.kill()


def test_a_forked_child_is_a_process_on_its_own(tmp_path, made):
    """It has no thread that talks to the coordinator, and the fork may come while that thread holds the lock."""
    program = f"""
from replica_engine.watch import timeline, watchdog
read, write = os.pipe()
with member._changed:
    child = os.fork()
if child == 0:
    with timeline.timeline({str(tmp_path / "child.json")!r}):
        pass
    rows = watchdog.workers()
    try:
        member.get("address")
    except errors.WorkerLostError:
        os.write(write, repr(rows).encode())
    os._exit(0)
os.close(write)
print(os.read(read, 100).decode(), flush=True)
sys.stdin.readline()
"""
    process = made.start(1, program)
    made.join(0)
    assert process.stdout.readline() == "[]\n"
    assert (tmp_path / "child.json").stat().st_size > 0


def test_an_error_of_the_runtime_is_explained(made):
    process = made.start(1, "sys.stdin.readline(); raise ValueError('the cause')")
    member = made.join(0)
    process.stdin.close()
    broken = ConnectionError("connection reset by peer")
    with pytest.raises(WorkerLostError, match="raised ValueError: the cause") as caught:
        member.explain(broken, LONG)
    assert caught.value.__cause__ is broken


def test_an_error_that_is_nobodys_fault_is_not_explained(made):
    made.start(1, "member.failed.wait()")
    assert made.join(0).explain(ValueError("mine"), patience=0.0) is None


def test_what_wants_to_know_of_failures_is_called(made):
    made.start(1, "raise ValueError('x')")
    member, errors, called = made.join(0), [], threading.Event()
    member.on_failure(lambda error: (errors.append(error), called.set()))
    assert called.wait(LONG)
    assert member.failed.is_set()
    member.on_failure(errors.append)
    member.close()
    assert [type(error) for error in errors] == [WorkerLostError] * 2
    assert errors[0] is not errors[1]


def test_signals_that_end_a_worker_are_named():
    with job(statuses=True) as made:
        made.start(1, "os.kill(os.getpid(), signal.SIGSEGV)")
        assert "signal 11 (SIGSEGV): a crash in native code" in str(lost(made.join(0)))


def test_no_process_is_aborted():
    """All that is left behind in a worker when it ends: a member that waits, and threads that use it."""
    program = """
def use():
    while True:
        member.launched(TRAIN)
        member.check()
threading.Thread(target=use, daemon=True).start()
threading.Thread(target=member.meet, args=("never",), daemon=True).start()
sys.exit(5)
"""
    with job() as made:
        process = made.start(1, program)
        made.join(0).tell_exception(ValueError("the end"))
        _, printed = process.communicate(timeout=LONG)
    assert process.returncode == 5, printed
