"""`replica-engine launch`, as users call it: what it prints, how it ends, and that nothing stays behind."""

import errno
import os
import shlex
import signal
import subprocess
import sys

import pytest
from helpers import fork_server
from helpers.jobs import LONG, Ending

from replica_engine.workers import launcher

JOINS = """
import os, signal, subprocess, sys
from replica_engine import workers
member = workers.join()
TRAIN = workers.Program("2d03aa77bb", "train_step", "train.py:40")
"""


@pytest.fixture
def script(tmp_path):
    """Writes a script; its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


def command(*arguments, grace=None, change=""):
    program = [sys.executable, "-m", "replica_engine"]
    if grace is not None:  # seconds instead of ten, and instead of five
        change = f"launcher.GRACE, launcher.KILL_AFTER = {grace}, {grace}"
    if change:
        main = "import sys; from replica_engine.workers import launcher; from replica_engine.__main__ import main"
        program = [sys.executable, "-c", f"{main}\n{change}\nsys.exit(main())"]
    return [*program, "launch", *arguments]


def launch(*arguments, environ=None, **options):
    own = {name: value for name, value in os.environ.items() if not name.startswith("REPLICA_ENGINE_")}
    env = {**own, **(environ or {})}
    return subprocess.run(
        command(*arguments, **options), capture_output=True, text=True, timeout=LONG, check=False, env=env
    )


def test_each_line_has_its_worker_before_it(script):
    path = script("import os, sys; print('out', sys.argv[1:]); print('err\\nends here', file=sys.stderr, end='')")
    result = launch("--workers", "2", path, "--workers", "9")
    assert result.returncode == 0
    assert sorted(result.stdout.splitlines()) == [f"[worker {at}] out ['--workers', '9']" for at in (0, 1)]
    assert sorted(result.stderr.splitlines()) == sorted(
        f"[worker {at}] {x}" for at in (0, 1) for x in ("err", "ends here")
    )


def test_of_a_progress_bar_the_last_state_is_printed(script):
    path = script("print('10 %\\r20 %\\r100 %'); print('a\\r')")
    assert launch("--workers", "1", path).stdout == "[worker 0] 100 %\n[worker 0] a\n"


def test_what_the_workers_are_told(script):
    path = script(
        "import os\nfor name in sorted(os.environ):\n    if name[:7] == 'REPLICA': print(name, os.environ[name])"
    )
    lines = launch("--workers", "2", "--join-timeout", "7", path).stdout.splitlines()
    told = dict(line.removeprefix("[worker 1] ").split(" ", 1) for line in lines if line.startswith("[worker 1]"))
    assert told.pop("REPLICA_ENGINE_COORDINATOR").startswith("127.0.0.1:")
    assert len(told.pop("REPLICA_ENGINE_TOKEN")) == 32
    assert told == {
        "REPLICA_ENGINE_PROCESS_ID": "1",
        "REPLICA_ENGINE_NUM_PROCESSES": "2",
        "REPLICA_ENGINE_LAUNCHED": "1",
        "REPLICA_ENGINE_RESTART": "0",
        "REPLICA_ENGINE_JOIN_TIMEOUT": "7",
        "REPLICA_ENGINE_HEARTBEAT_TIMEOUT": "60",
    }


def test_dry_run(script):
    result = launch("--workers", "2", "--dry-run", script("raise SystemExit(1)"), "a b")
    assert result.returncode == 0
    assert result.stdout.count("  REPLICA_ENGINE_NUM_PROCESSES=2\n") == 2
    assert "worker 1:\n  REPLICA_ENGINE_PROCESS_ID=1\n" in result.stdout
    assert result.stdout.endswith("script.py 'a b'\n")


def test_all_end_well(script):
    path = script(f"{JOINS}member.compile(TRAIN); member.launched(TRAIN); print(member.worker, member.size)")
    result = launch("--workers", "3", path)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == [f"[worker {at}] {at} 3" for at in range(3)]


WAITS = "\nmember.failed.wait(); member.check()"
# How a process ended is known soon after its connection has, but how soon depends on the machine.
HOW_IT_ENDED_IS_WAITED_FOR = "from replica_engine.workers import job; job.STATUS_PATIENCE = 60"

FAILURES = {
    "kill -9": ("os.kill(os.getpid(), 9)", 137, "was ended by signal 9 (SIGKILL)"),
    "raise": ("raise ValueError('the body')", 1, "has raised ValueError: the body"),
    "status": ("os._exit(7)", 7, "has exited with status 7 before the others came to their end"),
    "status 0": ("os._exit(0)", 1, "has exited with status 0 before the others came to their end"),
}


@pytest.mark.parametrize(("fails", "status", "text"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("victim", [0, 2])
def test_the_first_failure_is_the_exit_status_and_printed_last(script, fails, status, text, victim):
    path = script(f"{JOINS}member.launched(TRAIN)\nif member.worker == {victim}: {fails}{WAITS}")
    result = launch("--workers", "3", path, change=HOW_IT_ENDED_IS_WAITED_FOR)
    assert result.returncode == status, result.stderr
    before, last = result.stderr.splitlines()[-2:]
    assert before.startswith(f"replica-engine launch: worker {victim} of 3 (")
    assert text in before
    assert before.endswith("Start all workers again from the last checkpoint; `--max-restarts 1` does so by itself.")
    assert result.stderr.count("does so by itself") == 1
    assert last == f"replica-engine launch: exit status {status}"
    assert result.stderr.count(text) == 1, "the cause, once"
    for other in {0, 1, 2} - {victim}:
        assert f"[worker {other}] replica_engine.errors.WorkerLostError: worker {victim} (" in result.stderr
        assert f"[worker {other}]   File " in result.stderr


def test_the_last_lines_of_the_first_failure_are_printed_again(script):
    result = launch("--workers", "2", script(f"{JOINS}if member.worker == 1: raise ValueError('the body.'){WAITS}"))
    assert "has raised ValueError: the body. The others" in result.stderr
    assert "Start all workers again" not in result.stderr, "it would raise again before its first launch"
    assert result.stderr.count("[worker 1] ValueError: the body.\n") == 2
    again = result.stderr.index("replica-engine launch: worker 1 failed first; its last lines:\n")
    assert result.stderr.rindex("[worker 1] ValueError: the body.\n") > again
    assert result.stderr.rindex("[worker 0]") < again


PRINTS_LATE = """
import sys, time

def print_late(*error):
    try:
        while True: os.kill(pids[0], 0); time.sleep(0.01)
    except ProcessLookupError:
        time.sleep(0.5)  # the launcher knows by then that only this worker is left
    sys.__excepthook__(*error)

sys.excepthook = print_late
"""


def test_what_a_worker_has_raised_is_printed_also_when_the_others_have_ended_before(script):
    body = """
pids = member.exchange("pids", os.getpid())
if member.worker == 1: raise ValueError("the body.")
sys.excepthook = sys.__excepthook__
"""
    result = launch("--workers", "2", script(f"{PRINTS_LATE}{JOINS}{body}{WAITS}"))
    assert result.stderr.count("[worker 1] ValueError: the body.\n") == 2
    assert result.stderr.splitlines()[-1] == "replica-engine launch: exit status 1"


READS_LATE = """
class Late(launcher.Coordinator):
    failure = property(lambda self: None if self._thread.is_alive() else self._job.failure)

launcher.Coordinator = Late
"""


def test_what_the_coordinator_reads_last_is_printed_too(script):
    """All workers have ended before its thread comes to what one of them said."""
    path = script(f"{JOINS}if member.worker == 1: raise ValueError('the body'){WAITS}")
    result = launch("--workers", "2", path, change=READS_LATE)
    assert result.returncode == 1
    assert "has raised ValueError: the body" in result.stderr.splitlines()[-2]


def test_what_an_early_end_is_called_and_that_a_restart_does_not_help(script):
    """The chief saves alone; and a worker fails before it has joined."""
    alone = launch(
        "--workers", "2", script(f"{JOINS}print('hi')\nif member.worker == 0: member.meet('the saving of a model')")
    )
    assert "replica-engine launch: worker 1 ended first; its last lines:\n[worker 1] hi\n" in alone.stderr
    assert "All workers must call what saves" in alone.stderr
    before = launch(
        "--workers", "2", script(f"import os\nif os.environ['REPLICA_ENGINE_PROCESS_ID'] == '1': 1 / 0\n{JOINS}")
    )
    assert "has exited with status 1" in before.stderr
    for each in (alone, before):
        assert each.returncode == 1
        assert "Start all workers again" not in each.stderr


def test_a_failure_that_is_nobodys_own(script):
    path = script(f"{JOINS}member.compile(workers.Program(str(member.worker) * 8, 'f'))")
    result = launch("--workers", "2", path)
    assert result.returncode == 1
    assert "failed first" not in result.stderr
    assert "  worker 0: compilation of `f`, program 00000000\n" in result.stderr


def test_a_script_that_joins_nothing(script):
    result = launch("--workers", "2", script("import os; os._exit(5 * int(os.environ['REPLICA_ENGINE_PROCESS_ID']))"))
    assert result.returncode == 5
    assert "worker 1 of 2" in result.stderr.splitlines()[-2]


def test_one_that_does_not_raise_by_itself_is_ended(script):
    """SIGTERM first, and SIGKILL for one that ignores it."""
    body = """
if member.worker == 0: os._exit(3)
if member.worker == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True: signal.pause()
"""
    result = launch("--workers", "3", script(JOINS + body), grace=0.3)
    assert result.returncode == 3


def test_a_stopped_worker_is_ended_when_the_others_have_ended(script):
    """Ten and five seconds would be too long for the test's own limit, if they were waited for more than once."""
    body = f"if member.worker == 1: os.kill(os.getpid(), signal.SIGSTOP){WAITS}"
    result = launch("--workers", "2", "--heartbeat-timeout", "2", script(JOINS + body))
    assert result.returncode == 1, "it had no status of its own"
    assert "worker 1 of 2" in result.stderr.splitlines()[-2]
    assert "has not been heard of for 2 s" in result.stderr.splitlines()[-2]


def test_a_lost_worker_is_not_said_to_have_used_up_the_grace(script):
    """The others have saved after the signal, and it is killed at once."""
    body = """
signal.signal(signal.SIGTERM, lambda *_: None)
member.exchange("all listen", True)
if member.worker == 1: os.kill(os.getpid(), signal.SIGSTOP)
os.kill(os.getppid(), signal.SIGTERM)
member.failed.wait()
"""
    result = launch("--workers", "2", "--grace", "200", "--heartbeat-timeout", "2", script(JOINS + body))
    assert result.returncode == 143
    assert "killed after" not in result.stderr


RESTARTS = """
restart = os.environ["REPLICA_ENGINE_RESTART"]
print("start", restart, flush=True)
if member.worker == 1 and int(restart) < 2: os.kill(os.getpid(), 9)
if int(restart) < 2: member.failed.wait(); member.check()
"""


def test_all_start_again(script):
    result = launch("--workers", "2", "--max-restarts", "2", script(JOINS + RESTARTS))
    assert result.returncode == 0
    starts = [f"[worker {at}] start {restart}" for at in (0, 1) for restart in range(3)]
    assert sorted(result.stdout.splitlines()) == starts
    assert "replica-engine launch: restart 2 of 2: all workers start again\n" in result.stderr


def test_a_stuck_worker_ends_the_start_and_the_next_one_goes_on(script):
    text = f"""{JOINS}
member.launched(TRAIN)
if os.environ["REPLICA_ENGINE_RESTART"] == "0" and member.worker:
    import threading

    threading.Event().wait()
member.meet("the checkpoint")
print("went on")
"""
    result = launch("--workers", "2", "--stall-timeout", "1", "--max-restarts", "1", script(text))
    assert result.returncode == 0, result.stderr
    assert "is alive, but did not go on for " in result.stderr
    assert "restart 1 of 1: all workers start again" in result.stderr
    assert result.stdout.count("went on") == 2


def test_not_more_often_than_allowed(script):
    result = launch("--workers", "2", "--max-restarts", "1", script(JOINS + RESTARTS))
    assert result.returncode == 137
    assert result.stdout.count("start") == 4
    assert "--max-restarts" not in result.stderr  # it is there already
    assert result.stderr.count("Start all workers again from the last checkpoint.") == 1  # after the last failure


STAYS = """
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
try:
    print("child", child.pid, "of", os.getpid(), flush=True)
    while True: time.sleep(0.1)  # a signal that comes just before `signal.pause` would not end that
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=lambda each: str(each),
)
def test_a_signal_ends_all_and_what_they_started(script, number, status):
    process = subprocess.Popen(
        command("--workers", "2", "--max-restarts", "3", script("import os, signal, subprocess, sys, time" + STAYS)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    words = [process.stdout.readline().split() for _ in range(2)]
    ended = [Ending(int(each)) for line in words for each in (line[3], line[5])]
    process.send_signal(number)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == status, err
    assert f"ended by {signal.Signals(number).name}; all workers have ended" in err
    assert out.count("interrupted") == (2 if number == signal.SIGINT else 0)
    for each in ended:  # each was killed, at the latest just before the launcher ended
        each.wait()


SAVES_LATE = """
import os, signal, sys, time
def save(*_):
    if os.environ["REPLICA_ENGINE_PROCESS_ID"] == "0":
        time.sleep(0.5)
        print("saved", flush=True)
        os._exit(143)
signal.signal(signal.SIGTERM, save)
print("listens", flush=True)
while True: time.sleep(0.1)
"""


def test_workers_have_the_grace_of_a_signal_to_save(script):
    """The time after a failure, which is shorter, does not count."""
    process = subprocess.Popen(
        command("--workers", "2", "--grace", "3", script(SAVES_LATE), grace=0.1),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(2):
        assert process.stdout.readline().endswith("listens\n")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=LONG)
    assert process.returncode == 143
    assert out == "[worker 0] saved\n"
    assert "killed after 3 seconds, which --grace changes: worker 1\n" in err


def test_the_launcher_is_killed(script):
    """Its workers notice, and leave by themselves."""
    process = subprocess.Popen(
        command("--workers", "2", script(f"{JOINS}print(os.getpid(), flush=True){WAITS}")),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    workers = [Ending(int(process.stdout.readline().split()[-1])) for _ in range(2)]
    process.kill()
    process.communicate(timeout=LONG)
    for worker in workers:
        worker.wait()


def test_nobody_reads_what_is_printed(script):
    """As with `| head -1`: the workers do not go on for nobody."""
    process = subprocess.Popen(
        command("--workers", "2", script("while True: print('x' * 1000)")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().endswith("x\n")
    process.stdout.close()
    assert process.stderr.read() == "replica-engine launch: ended by SIGPIPE; all workers have ended\n"
    assert process.wait(LONG) == 128 + signal.SIGPIPE
    process.stderr.close()


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize(
    ("change", "shown", "told"),
    [
        (">&-", "err", "standard output cannot be written: it is closed. The workers go on."),
        (">/dev/full", "err", "standard output cannot be written: No space left on device. The workers go on."),
        ("2>&-", "out", "standard error cannot be written: it is closed. The workers go on."),
        ("2>/dev/full", "out", "standard error cannot be written: No space left on device. The workers go on."),
        ("<&- >&- 2>/dev/full", "", ""),
        (">/dev/full 2>&-", "", ""),
    ],
)
def test_an_output_that_cannot_be_written_ends_no_job(script, tmp_path, change, shown, told, status):
    """The workers come to their end, the status is the job's, and the other output tells what was lost."""
    path = script(
        "import os, sys\n"
        "for text in ('first', 'second'):\n"
        "    print(text, 'out', flush=True)\n"
        "    print(text, 'err', file=sys.stderr, flush=True)\n"
        f"open({str(tmp_path)!r} + '/ended', 'a').write('ended ')\n"
        f"sys.exit({status})"
    )
    program = f"exec {shlex.join(command('--workers', '1', path))} {change}"
    ended = subprocess.run(["sh", "-c", program], capture_output=True, text=True, timeout=LONG, check=False)
    assert ended.returncode == status
    assert (tmp_path / "ended").read_text() == "ended "
    text = ended.stdout + ended.stderr
    if told:
        assert f"[worker 0] first {shown}\n" in text
        assert f"[worker 0] second {shown}\n" in text
        assert text.count(told) == 1
        assert "could not be written to standard" in text
    else:
        assert text == ""


def write_in(room, data):
    """As on a disk of `room[0]` more bytes."""
    if not room[0]:
        raise OSError(errno.ENOSPC, "No space left on device")
    taken = min(len(data), room[0])
    room[0] -= taken
    return taken


def test_a_disk_that_has_room_again_gets_whole_lines(monkeypatch):
    """A line that was cut ends, and none is written twice."""
    seen, room = [], [3, 100]

    def write(descriptor, data):
        seen.append(bytes(data[: room[0]]))
        return write_in(room, data)

    monkeypatch.setattr(launcher.os, "write", write)
    out = launcher.Output(1, "standard output", "launch")
    out.write(b"abcdef\n")
    out.write(b"lost\n")
    room[0] = room.pop()
    out.write(b"whole\n")
    assert b"".join(seen) == b"abc\nwhole\n"


def test_each_line_that_is_lost_counts_once(monkeypatch, tmp_path):
    """Also behind a line of which a part was written: that one is counted when it is cut."""
    room = [3]

    def write(descriptor, data):
        return real(file.fileno(), data) if descriptor == 2 else write_in(room, data)

    real = os.write
    monkeypatch.setattr(launcher.os, "write", write)
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with open(tmp_path / "err", "wb") as file:
        out, _ = launcher.outputs("launch")
        for line in (b"abcdef\n", b"", b"two\n", b"three\nfour\n"):
            out.write(line)
        out.end()
    assert "4 lines could not be written to standard output" in (tmp_path / "err").read_text()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train.py"], "the following arguments are required: --workers"),
        (["--workers", "0", "train.py"], "must be at least 1, got 0"),
        (["--workers", "two", "train.py"], "'two' is not a whole number"),
        (["--workers", "a:b", "train.py"], "'a' is not a whole number"),
        (["--workers", "0:2", "train.py"], "must be at least 1, got 0"),
        (["--workers", "4:2", "train.py"], "MIN:MAX needs a MIN that is not above MAX, got 4:2"),
        (["--workers", "2", "--join-timeout", "-1", "train.py"], "must be at least 0.001, got -1"),
        (["--workers", "2", "no_such.py"], "there is no file no_such.py"),
        (["--workers", "2"], "the following arguments are required: script ("),
        (["train.py", "--workers", "2"], "required: --workers; flags stand before the script"),
        (["--worker", "2", "train.py"], "required: --workers; did you mean --workers, and not --worker?"),
        (["--workers", "2", "--maxrestarts=1", "train.py"], "did you mean --max-restarts, and not --maxrestarts?"),
    ],
)
def test_wrong_flags(arguments, text):
    result = launch(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert text in result.stderr
    assert result.stderr.count("\n") == 1


SAVES = """
member.progress(step=int(sys.argv[1]))
print("start", os.environ["REPLICA_ENGINE_RESTART"], flush=True)
if int(os.environ["REPLICA_ENGINE_RESTART"]) < 3:
    sys.exit(143)  # as BackupAndRestore does when it has saved
"""


def test_a_preemption_is_no_failure_and_uses_up_no_restart(script):
    result = launch("--workers", "2", "--max-restarts", "1", script(JOINS + SAVES), "5")
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("the job was preempted: all workers have ended with the status of SIGTERM") == 3
    assert "failed" not in result.stderr
    at_once = launch("--workers", "2", "--max-restarts", "1", script(JOINS + SAVES), "0")
    assert at_once.returncode == 143  # a program that always ends so must not be started forever
    assert at_once.stdout.count("start") == 4


LOST = """
import os, signal
import tensorflow as tf, replica_engine

strategy = replica_engine.MultiWorkerMirroredStrategy()
with strategy.scope():
    seen = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM)


def ends():
    if os.environ["REPLICA_ENGINE_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


value = strategy.run(lambda: tf.ones([1]))
ends()
"""


@pytest.mark.parametrize(
    "call",
    [
        "strategy.reduce('SUM', value, axis=None)",
        pytest.param("print(seen.numpy())", marks=pytest.mark.full("as the first")),
    ],
)
def test_of_the_loss_of_a_worker_only_the_users_frames_are_printed(script, call):
    """Calls outside of a run and of a function, whose frames TensorFlow leaves in."""
    programs = {fork_server.ADDRESS: os.environ[fork_server.ADDRESS]}
    ended = launch("--workers", "2", fork_server.__file__, script(LOST + call), environ=programs)
    assert ended.returncode == 128 + signal.SIGKILL
    lines = [line.removeprefix("[worker 0] ") for line in ended.stderr.splitlines() if line.startswith("[worker 0] ")]
    begin = lines.index("Traceback (most recent call last):")
    (end,) = (number for number, line in enumerate(lines) if line.startswith("replica_engine.errors.WorkerLostError"))
    frames = [line for line in lines[begin:end] if line.startswith("  File ") and "fork_server_main.py" not in line]
    assert len(frames) == 1, "\n".join(lines[begin:end])
    assert "script.py" in frames[0]
    assert lines[lines.index(frames[0]) + 1].strip() == call
