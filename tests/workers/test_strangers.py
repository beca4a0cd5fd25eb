"""Others than the members of a job connect to its coordinator: many, again and again, with whatever they like."""

import contextlib
import json
import os
import random
import selectors
import socket
import threading

import pytest
from helpers.jobs import LONG, TRAIN, job, until

from replica_engine.errors import WorkersMissingError
from replica_engine.workers import messages

MANY = int(os.environ.get("STRANGERS", "1500"))
"""Connections in all; each test run has few, and `STRANGERS=10000` more."""

AT_ONCE = 400
WRONG = ["", "x", -1, 2, 10**30, None, [], {}, float("inf"), float("nan"), "\ud800", [[[]]], True]


class Flood:
    """Connections that come again as soon as they are closed, and send what `said` returns.

    Args:
        address: where they come to.
        said: takes a generator of random numbers.
    """

    def __init__(self, address, said):
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._said = said
        self._draw = random.Random(0)
        self._over = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join(LONG)

    def _run(self):
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
            open_ones = set()
            stack.callback(lambda: [each.close() for each in open_ones])
            while not self._over.is_set():
                for _ in range(AT_ONCE - len(open_ones)):
                    sock = socket.socket()
                    sock.setblocking(False)
                    sock.connect_ex(self._address)
                    open_ones.add(sock)
                    selector.register(sock, selectors.EVENT_WRITE)
                    self.count += 1
                for key, mask in selector.select(0.1):
                    try:
                        if mask & selectors.EVENT_WRITE:
                            key.fileobj.send(self._said(self._draw))
                            selector.modify(key.fileobj, selectors.EVENT_READ)
                        elif (self._draw.random() < 0.5 and key.fileobj.recv(1 << 16)) or (
                            mask & selectors.EVENT_READ and key.fileobj.recv(1, socket.MSG_PEEK)
                        ):  # others read slowly
                            continue
                    except BlockingIOError:
                        continue
                    except OSError:
                        pass
                    else:
                        if mask & selectors.EVENT_WRITE:
                            continue
                    selector.unregister(key.fileobj)
                    open_ones.discard(key.fileobj)
                    key.fileobj.close()


def nothing(draw):
    return b""


def anything(draw):
    """Bytes at random, lines of any length, messages that are none, and greetings without the token."""
    kind = draw.randrange(5)
    if kind == 0:
        return draw.randbytes(draw.randrange(1, 200))
    if kind == 1:
        return b"[" * draw.randrange(1, 40_000) + b"\n" * draw.randrange(2)
    parts = [draw.choice(WRONG) for _ in range(draw.randrange(7))]
    if kind == 2:
        return json.dumps(parts).encode() + b"\n"
    greeting = ["hello", "nonce", "no proof", draw.choice(WRONG), draw.choice(WRONG), draw.choice([{}, *WRONG])]
    if kind == 3:
        greeting[2] = messages.proof("another secret", messages.MEMBER, "a", "nonce")
    return json.dumps(greeting).encode() + b"\n"


@pytest.mark.parametrize("said", [nothing, anything])
def test_members_get_in_and_nothing_is_lost(said, caplog):
    with job(size=3) as made, Flood(made.address, said) as flood:
        until(lambda: flood.count >= AT_ONCE)
        for worker in (1, 2):
            made.start(worker, "member.launched(TRAIN); member.meet('save'); member.meet('end')")
        member = made.join(0)
        member.launched(TRAIN)
        member.meet("save", LONG)
        if said is anything:
            until(lambda: flood.count >= MANY)
            until(lambda: "came from others than this job's workers" in caplog.text)
        member.meet("end", LONG)
        member.leave()
        assert made.coordinator.failure is None


def test_the_error_that_members_are_missing_tells_of_strangers():
    with job(join=1.0) as made:
        with socket.create_connection(made.address.rsplit(":", 1)) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            sock.makefile("rb").read()
        with pytest.raises(
            WorkersMissingError, match=r"1 connection to the coordinator at .* was closed, the last from"
        ):
            made.join(0)
