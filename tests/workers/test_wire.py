"""Messages on the wire, and the proof of the token."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica_engine.errors import WorkerLostError, WorkerRow, WorkerVersionError
from replica_engine.workers import messages as wire
from replica_engine.workers.messages import BadMessageError, Failure, MessageReader

MESSAGES = st.lists(st.lists(st.text() | st.integers() | st.none(), max_size=3).map(lambda rest: ["kind", *rest]))


@settings(deadline=None)
@given(MESSAGES, st.data())
def test_messages_arrive_however_they_are_cut(messages, data):
    stream, lines, arrived = b"".join(map(wire.encode, messages)), MessageReader(), []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        arrived += lines.feed(stream[:size])
        stream = stream[size:]
    assert arrived == messages


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_anything_is_messages_or_an_error(data):
    messages = []
    with contextlib.suppress(BadMessageError):
        messages = MessageReader().feed(data)
    assert all(isinstance(message[0], str) for message in messages)


@pytest.mark.parametrize("line", [b"{}\n", b"[]\n", b"[1]\n", b"x\n", b"\xff\n", b"[" * 100_000 + b"\n", b"\n"])
def test_what_is_no_message(line):
    with pytest.raises(BadMessageError):
        MessageReader().feed(line)


def test_a_line_without_an_end_is_not_kept_for_ever():
    lines = MessageReader(longest=100)
    assert lines.feed(b"x" * 100) == []
    with pytest.raises(BadMessageError, match="more than 100 bytes"):
        lines.feed(b"x")


def test_only_the_token_proves():
    proof = wire.proof("secret", wire.MEMBER, "a", "b")
    assert wire.is_proof(proof, "secret", wire.MEMBER, "a", "b")
    for other in (("other", wire.MEMBER, "a", "b"), ("secret", wire.COORDINATOR, "a", "b")):
        assert not wire.is_proof(proof, *other), "a member cannot be sent its own proof back"
    assert not wire.is_proof(proof, "secret", wire.MEMBER, "c", "b"), "nor can a proof be used twice"
    for nothing in (None, 1, "", "ä", proof[:-1]):
        assert not wire.is_proof(nothing, "secret", wire.MEMBER, "a", "b")
    assert "secret" not in proof


def test_a_failure_is_the_same_error_everywhere():
    row = WorkerRow(1, 4, "node-b", 4711, 151, "`train_step`", 150, "all_reduce", 0.5)
    failure = Failure.from_wording(WorkerLostError.killed, row, 9)
    arrived = Failure.from_json(failure.as_json())
    assert str(arrived.error()) == str(WorkerLostError.killed(row, 9))
    assert (arrived.worker, arrived.error().signal) == (1, 9)


def test_another_version_of_this_library_is_told_in_the_words_of_0_3_0():
    message = ["WorkerVersionError.of_package", ["replica_engine", [[[0], "0.4.0"], [[1, 2], "0.3.0"]]]]
    text = "different versions of replica_engine:\n  worker 0: 0.4.0\n  workers 1-2: 0.3.0\n"
    assert text in str(Failure.from_json(message).error())
    groups = (((0,), "0.4.0"), ((1, 2), "0.3.0"))
    assert Failure.from_wording(WorkerVersionError.of_package, "replica_engine", groups).as_json() == message


@pytest.mark.parametrize(
    "value", [None, [], ["x", []], ["WorkerLostError.with_traceback", []], ["WorkerLostError._of", []]]
)
def test_no_other_function_is_called_because_a_message_says_so(value):
    with pytest.raises((TypeError, ValueError)):
        Failure.from_json(value)
