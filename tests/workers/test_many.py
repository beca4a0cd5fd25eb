"""The coordinator with many members, which one process plays; what is counted are messages, not seconds."""

import contextlib

from benchmarks.many_members import LAUNCHES, Crowd
from replica_engine.workers import messages

SIZE = 60


def test_each_member_is_told_once_and_what_is_sent_does_not_grow_with_launches():
    with contextlib.closing(Crowd(SIZE, heartbeat=60.0)) as crowd:
        crowd.play(1.0)
        assert crowd.sent == SIZE * 11, "ten messages about launches, and a sign of life"
        assert LAUNCHES * 10 > 500, "however many launches"
        crowd.sockets[7].setblocking(True)
        crowd.sockets[7].sendall(messages.encode(["failed", "ValueError: x", []]))
        while len(crowd.told) < SIZE:
            crowd.play(0.1)
        assert set(crowd.told) == set(range(SIZE)), "the one that failed too"
