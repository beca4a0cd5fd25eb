"""What shows all workers at once: the table of a run that stands still, and one timeline."""

import json
import logging
import threading

import pytest
from helpers.jobs import LONG, TRAIN, job

from replica_engine.hosts.clock import ClockOffset
from replica_engine.telemetry import timeline
from replica_engine.telemetry.all_workers import SharedTimelines
from replica_engine.telemetry.timeline import Span
from replica_engine.telemetry.trace_file import Track
from replica_engine.telemetry.watchdog import Watch

TRACK = Track("Strategy", "replica 0 of 1")


class Logged(logging.Handler):
    """Sets an event with the first message."""

    def __init__(self):
        super().__init__()
        self.text, self.come = "", threading.Event()

    def emit(self, record):
        self.text = record.getMessage()
        self.come.set()


def test_a_warning_has_a_row_for_each_worker():
    logged, logger = Logged(), logging.getLogger("replica_engine")
    logger.addHandler(logged)
    try:
        with job() as made:
            process = made.start(
                1, "member.launched(TRAIN); member.progress(7, 'all_reduce SUM at a.py:3')\nmember.meet('a')\ninput()"
            )
            member = made.join(0)
            member.launched(TRAIN)
            member.meet("a")
            with Watch(lambda seconds: "A run stands still.", warn_after=0.02):
                assert logged.come.wait(LONG)
            member.close()
            again = Logged()
            logger.removeHandler(logged)
            logger.addHandler(again)
            with Watch(lambda seconds: "Another one.", warn_after=0.02):
                assert again.come.wait(LONG)
            logger.removeHandler(again)
    finally:
        logger.removeHandler(logged)
    head, title, *rows = logged.text.splitlines()
    assert (head, title) == ("A run stands still.", "The workers of the job:")
    assert rows[0].startswith("  worker 0 of 2 (")
    assert (
        f"pid {process.pid}): step 7, launch 1 (`train_step` at train.py:40, program 2d03aa77), sync point all"
        in rows[1]
    )
    assert again.text == "Another one."  # the job is left


RECORDS = """
from replica_engine.telemetry import timeline
from replica_engine.telemetry.trace_file import Track
with timeline.timeline({path!r}):
    with timeline.span(Track("Strategy", "replica 0 of 1"), "step of 1", "run"):
        member.meet("in the step")
member.meet("the end")
"""


def test_one_timeline_has_the_tracks_of_all_workers(tmp_path):
    path = tmp_path / "run.json"
    with job(size=3) as made:
        made.start(1, RECORDS.format(path=str(path)))
        made.start(2, "member.meet('in the step'); member.meet('the end')")  # which records none
        member = made.join(0)
        with timeline.timeline(path), timeline.span(TRACK, "step of 0", "run"):
            member.meet("in the step")
        member.meet("the end")
    events = json.loads(path.read_text())["traceEvents"]
    groups = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(groups) == {"worker 0: Strategy", "worker 1: Strategy"}
    steps = {event["name"]: event for event in events if event["ph"] == "X"}
    mine, other = steps["step of 0"], steps["step of 1"]
    assert mine["pid"] != other["pid"]
    for first, second in ((mine, other), (other, mine)):  # both were in the step when they met
        assert first["ts"] < second["ts"] + second["dur"]


class FakeMember:
    """A worker whose clock differs from the coordinator's."""

    def __init__(self, worker, values, ahead):
        self.worker, self.size, self.clock_offset = worker, 2, ClockOffset(ahead, 0.0)
        self._values = values

    def put(self, key, value):
        self._values[key] = value

    def get(self, key, timeout=None):
        if key not in self._values:
            raise TimeoutError(key)
        return self._values[key]


def test_clocks_are_aligned():
    values = {}
    chief, other = (SharedTimelines(FakeMember(worker, values, ahead)) for worker, ahead in ((0, 5.0), (1, -1000.0)))
    assert chief.begin() == other.begin() == 0
    assert other.end(0, [Span(TRACK, "step", "run", 1011.0, 1012.0, {"size": 3})], waits=True) is None
    (span,) = chief.end(0, [], waits=True)
    assert (span.begin, span.end) == (pytest.approx(6.0), pytest.approx(7.0))
    assert (span.track.group, span.details) == ("worker 1: Strategy", {"size": 3})
    assert all(not value for key, value in values.items() if "part" in key)  # the coordinator need not keep them


def test_many_spans_travel_in_parts():
    values = {}
    chief, other = (SharedTimelines(FakeMember(worker, values, 0.0)) for worker in (0, 1))
    chief.begin(), other.begin()
    spans = [
        Span(TRACK, f"{number * 7919 % 1000003}", "run", number / 7, number / 7 + 1, None) for number in range(60_000)
    ]
    other.end(0, spans, waits=True)
    assert sum("part" in key for key in values) > 1
    assert [span.name for span in chief.end(0, [], waits=True)] == [span.name for span in spans]
