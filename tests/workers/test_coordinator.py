"""The coordinator's loop, with a clock and a selector that play the worst moments to stand still."""

import socket
import threading
import types

from helpers.jobs import LONG

from replica_engine.workers import server
from replica_engine.workers.job import Limits
from replica_engine.workers.server import Coordinator

ABOUT = {"host": "node-0", "pid": 1, "versions": {}, "replicas": 1, "came_to": "127.0.0.1"}


def test_what_came_while_its_thread_stood_still_is_read_before_it_judges_a_silence(monkeypatch):
    """Between its look at the connections, where there was nothing, and its look at the clock."""
    now, looks = 100.0, 0
    monkeypatch.setattr(server, "time", types.SimpleNamespace(monotonic=lambda: now, sleep=lambda seconds: None))
    made = Coordinator(1, "a secret", limits=Limits(60.0, 1.0))
    made._job.joined(0, ABOUT, now)

    def select(seconds):
        nonlocal now, looks
        looks += 1
        if looks == 1:
            now += 1.5  # in which the sign of life comes that it reads next
        elif looks == 2:
            made._job.received(0, ["beat", []], now)
        elif looks < 10:
            now += seconds
        else:
            made._end_serving()
        return []

    monkeypatch.setattr(made._selector, "select", select)
    made.serve()
    assert made.failure is None


def test_a_connection_is_dropped_once():
    """One that does not read and sends what is no message is dropped for the first, and then for the second."""
    made = Coordinator(1, "a secret")
    made.start()
    try:
        host, _, port = made.address.rpartition(":")
        with socket.create_connection((host, int(port)), LONG) as member:
            lines = member.makefile("rb")
            lines.readline()  # the challenge
            (connection,) = made._connections
            done = threading.Event()
            made._call(lambda: (made._drop(connection), made._drop(connection), done.set()))
            assert done.wait(LONG), "its thread goes on"
            assert lines.readline() == b""
    finally:
        made.close()
