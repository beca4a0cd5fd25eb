"""A worker's side: waits, values, how much it sends, and the end."""

import contextlib
import socket
import sys
import threading
import time

import pytest
from helpers.jobs import EVAL, LONG, TRAIN, job, until

from replica_engine.errors import ClusterConfigError, ProgramDisagreementError, WorkerLostError, WorkersMissingError
from replica_engine.workers import messages
from replica_engine.workers.connection import Silence
from replica_engine.workers.member import BATCH

FOLLOWS = """
for line in sys.stdin:
    exec(line)
"""
"""A worker that does what it is told, line by line."""


@pytest.fixture
def process(made):
    """Worker 1, which does what `tell` tells it."""
    return made.start(1, FOLLOWS)


@pytest.fixture
def member(made, process):
    """Worker 0, in this process."""
    return made.join(0)


def tell(process, line):
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def test_all_compile_launch_and_end_together(made):
    process = made.start(1, "member.compile(TRAIN); member.launched(TRAIN); member.meet('save'); print('met')")
    member = made.join(0)
    member.compile(TRAIN)
    member.launched(TRAIN)
    member.meet("save")
    member.leave()
    assert process.communicate(timeout=LONG) == ("met\n", "")
    assert process.returncode == 0
    assert made.coordinator.failure is None


@pytest.mark.parametrize("is_sent", [False, True])
def test_an_announced_launch_that_is_not_made_is_taken_back(is_sent, process, member):
    assert member.announce(TRAIN) == 1
    if is_sent:
        member.rows()
    member.withdraw()
    member.withdraw()  # it has been
    assert member.announce(EVAL) == 1
    member.launched(EVAL)
    member.withdraw()  # it was made
    member.rows()  # waits until the coordinator knows all this: else the other's launch might meet the first one
    tell(process, "member.launched(EVAL); member.meet('save')")
    member.meet("save", timeout=LONG)
    assert [row.launches for row in member.rows()] == [1, 1]


def test_workers_may_be_far_apart(process, member):
    """One is at its tenth launch when the other begins."""
    for _ in range(10):
        member.launched(TRAIN)
    tell(process, "for _ in range(10): member.launched(TRAIN)")
    tell(process, "member.meet('x')")
    member.meet("x", timeout=LONG)
    member.check()


def test_a_timeout_names_who_is_missing(member):
    with pytest.raises(WorkersMissingError, match=r"worker 1 did not come to save within 0.2 s") as caught:
        member.meet("save", timeout=0.2)
    assert caught.value.workers == (1,)
    member.check()


def test_values(process, member):
    with pytest.raises(WorkersMissingError, match="'address'"):
        member.get("address", timeout=0.1)
    tell(process, "member.put('address', ['node-b', 4000])")
    assert member.get("address") == ["node-b", 4000]


def test_a_value_that_is_too_large(member):
    with pytest.raises(ValueError, match="larger than a megabyte"):
        member.put("weights", "x" * (1 << 20))
    with pytest.raises(TypeError):
        member.put("weights", object())
    member.put("address", "x" * ((1 << 20) - 100))
    assert len(member.get("address")) == (1 << 20) - 100


def test_a_wait_that_the_end_of_its_own_member_ends_does_not_speak_of_the_coordinator(member):
    said = []

    def wait():
        with pytest.raises(WorkerLostError) as failure:
            member.get("what nobody tells")
        said.append(str(failure.value))

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: 0 in member._answers)
    member.close()
    thread.join()
    assert "worker 0 of 2" in said[0]
    assert "it has left the job" in said[0]
    assert "coordinator" not in said[0]


def test_a_burst_of_launches_that_differ_is_several_messages(process, member):
    tell(process, "for _ in range(100_000): member.launched(TRAIN); member.launched(EVAL)")
    tell(process, "member.meet('x')")
    for _ in range(100_000):
        member.launched(TRAIN)
        member.launched(EVAL)
    member.meet("x")
    assert [row.launches for row in member.rows()] == [200_000] * 2


def test_how_far_all_are(process, member):
    tell(process, "member.progress(7, 'all_reduce at train.py:12'); member.launched(TRAIN); member.put('done', 1)")
    tell(process, "member.meet('now')")
    member.launched(TRAIN)
    member.meet("now")
    ours, theirs = member.rows()
    assert (theirs.pid, theirs.step, theirs.sync_point) == (process.pid, 7, "all_reduce at train.py:12")
    assert theirs.launches == ours.launches == 1
    assert str(theirs).startswith(f"worker 1 of 2 ({theirs.host}, pid {process.pid}): step 7, launch 1 (`train_step`")


def test_an_exchange_is_one_message_each_way(made):
    process = made.start(1, "print(*(member.exchange('addresses', each) for each in 'bd'), flush=True)")
    member = made.join(0)
    told, tell = [], made.coordinator._job._tell
    made.coordinator._job._tell = lambda worker, message: (told.append(message), tell(worker, message))
    assert member.exchange("addresses", "a") == ["a", "b"]
    assert member.exchange("addresses", "c") == ["c", "d"], "again, with other values"
    assert process.stdout.readline() == "['a', 'b'] ['c', 'd']\n"
    exchanged = [message[1:] for message in told if message[0] == "exchanged"]
    assert [values for name, values in exchanged if name != "links"] == [["a", "b"], ["c", "d"]]


def test_values_that_are_too_large_together_are_an_error_on_all_workers(made):
    text = """
for each in ("a" * 500_000, "a" * 600_000, "a" * (1 << 20)):
    try: print(len(member.exchange("texts", each)[0]), flush=True)
    except ValueError as error: print(error, flush=True)
"""
    process = made.start(1, text)
    member = made.join(0)
    assert len(member.exchange("texts", "b" * 500_000)[1]) == 500_000
    with pytest.raises(ValueError, match=r"larger than a megabyte; worker 0 has 500,.* bytes"):
        member.exchange("texts", "b" * 500_000)
    assert process.stdout.readline() == "500000\n"
    assert "worker 1 has 600,0" in process.stdout.readline()
    assert "worker 1 has 1,048,6" in process.stdout.readline()


def test_a_value_given_before_an_interrupt_is_not_taken_for_a_later_one(made):
    process = made.start(1, "print(member.exchange('signals', 1), member.exchange('signals', 2), flush=True)")
    member = made.join(0)
    tell, told = made.coordinator._job._tell, threading.Event()
    made.coordinator._job._tell = lambda worker, message: (tell(worker, message), told.set())

    wait, thread = member._wait_for, threading.current_thread()

    def interrupt(answer, patience):
        if threading.current_thread() is not thread:
            return wait(answer, patience)
        assert told.wait(LONG)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(member, "_wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt):
            member.exchange("signals", "before")
    assert member.exchange("signals", "after") == ["after", 2]
    assert process.stdout.readline() == "['before', 1] ['after', 2]\n"


@pytest.mark.parametrize(
    ("does", "error", "words"),
    [
        (
            "",
            WorkerLostError,
            "has come to the end of its program.*, and worker 0 goes on with the wait at the answers",
        ),
        ("member.launched(TRAIN)", ProgramDisagreementError, "wait at the answers"),
    ],
)
def test_an_exchange_is_not_waited_for_where_another_worker_does_something_else(does, error, words, made):
    made.start(1, does)
    with pytest.raises(error, match=words):
        made.join(0).exchange("the answers", 0)


def test_launches_are_few_messages(made, member):
    """At most ten messages a second, however many launches: counted against the time that has really passed."""
    launches, come = 20_000, []
    received = made.coordinator._job.received
    made.coordinator._job.received = lambda worker, message, now: (
        come.append(message[0]),
        received(worker, message, now),
    )
    began = time.monotonic()
    for _ in range(launches):
        member.launched(TRAIN)
    member.rows()
    seconds = time.monotonic() - began
    # Besides: one at once, one that was due before the first launch, and the rest with the question. Signs of life
    # do not count: the other worker may have sent some long ago.
    assert come.count("log") <= seconds / BATCH + 3
    assert set(come) <= {"log", "program", "beat", "rows", "exchange"}
    assert (come.count("program"), come.count("rows")) == (1, 1)
    assert member.rows()[0].launches == launches


def test_the_time_in_which_a_process_stood_still_is_not_the_silence_of_others():
    """However long it was, and if it had waited for less than a round before."""
    for stood_still in (1.0, 2.0, 2.5, 3.0, 1000.0):
        silence, now = Silence(100.0), 100.0
        for _ in range(7):  # rounds of a tenth of a second, since it launches something all the time
            now += 0.1
            silence.seconds(now, planned=0.1)
        now += 0.1 + stood_still
        assert silence.seconds(now, planned=0.1) < 1.1
        silence.end(now)
        now += 2.0
        assert silence.seconds(now, planned=2.0) == pytest.approx(2.0)


def test_a_wait_ends_when_another_thread_closes(member):
    raised = []

    def wait():
        try:
            member.meet("never")
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    member.close()
    thread.join(LONG)
    assert len(raised) == 1


def test_two_threads_wait_at_a_time(process, member):
    thread = threading.Thread(target=member.get, args=("later",))
    thread.start()
    tell(process, "member.meet('a')")
    member.meet("a")
    member.put("later", 1)
    thread.join(LONG)
    assert not thread.is_alive()


def test_a_block_says_goodbye_or_why_not():
    with job() as made:
        process = made.start(1, "member.failed.wait(); member.check()", REPLICA_ENGINE_LAUNCHED="")

        def use():
            with made.join(0) as member:
                member.launched(TRAIN)
                raise LookupError("in the block")

        with pytest.raises(LookupError):
            use()
        assert "has raised LookupError: in the block" in process.communicate(timeout=LONG)[1]
    with job() as made:
        process = made.start(1, "member.launched(EVAL)")
        with made.join(0) as member:
            member.launched(EVAL)
        assert process.communicate(timeout=LONG) == ("", "")


def test_the_hook_for_exceptions_is_taken_away():
    before = sys.excepthook
    with job() as made:
        made.start(1, FOLLOWS)
        member = made.join(0)
        assert sys.excepthook is not before
        member.close()
    assert sys.excepthook is before


def test_no_thread_stays():
    with job() as made:
        made.start(1, FOLLOWS)
        made.join(0)
    for thread in threading.enumerate():
        if thread.name.startswith(("worker ", "replica_engine ")):
            thread.join(LONG)  # it ends by itself; `close` waits only for a while
            assert not thread.is_alive(), thread.name


def stranger(address):
    sock = socket.create_connection(address.rsplit(":", 1), timeout=LONG)
    return sock, sock.makefile("rwb")


def test_who_cannot_prove_anything_is_told_nothing(caplog, made):
    """No token, a proof of another connection, no message, or a very long line."""
    for line in (
        messages.encode(["hello", "b", "no proof", 0, 2, {}]),
        messages.encode(["hello", "b", messages.proof(made.token, messages.MEMBER, "another", "b"), 0, 2, {}]),
        messages.encode(["beat", []]),
        b"GET / HTTP/1.1\r\n",
        b"x" * (1 << 15),
    ):
        answer = b""
        sock, file = stranger(made.address)
        # It may end the connection before it has read all of a line.
        with contextlib.suppress(ConnectionError), sock, file:
            kind, _ = messages.MessageReader().feed(file.readline())[0]
            assert kind == "challenge"
            file.write(line)
            file.flush()
            answer = sock.makefile("rb").readline()
        assert answer in (b"", b'["stranger"]\n')
    made.start(1, FOLLOWS)
    assert made.join(0).worker == 0, "the job goes on"
    until(lambda: "came from others than this job's workers" in caplog.text)


def test_a_coordinator_that_does_not_know_the_token_is_not_trusted():
    """A worker proves that it knows the token without sending it, and believes nobody who does not."""
    with socket.create_server(("127.0.0.1", 0)) as server, job() as made:

        def pretend():
            sock, _ = server.accept()
            with sock, sock.makefile("rwb") as file:
                file.write(messages.encode(["challenge", "a"]))
                file.flush()
                heard.append(file.readline())
                file.write(messages.encode(["welcome", "no proof", 10.0]))

        heard = []
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ClusterConfigError, match="has another REPLICA_ENGINE_TOKEN"):
            made.join(0, address=f"127.0.0.1:{server.getsockname()[1]}")
        thread.join(LONG)
    assert made.token.encode() not in heard[0]


def test_another_program_at_the_end(made):
    process = made.start(1, "")
    member = made.join(0)
    member.launched(EVAL)
    assert member.failed.wait(LONG)
    assert "has come to its end, but its job has failed" in process.communicate(timeout=LONG)[1]
    assert process.returncode == 0
