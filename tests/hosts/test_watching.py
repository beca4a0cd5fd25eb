"""What shows all workers at once: the table of a run that stands still, and one timeline."""

import json
import logging
import threading

import pytest
from helpers.jobs import LONG, TRAIN, job

from replica_engine.errors import WorkersMissingError
from replica_engine.hosts.member.clock import ClockOffset
from replica_engine.telemetry import timeline
from replica_engine.telemetry.all_workers import SharedTimelines
from replica_engine.telemetry.timeline import Span
from replica_engine.telemetry.trace_file import Track
from replica_engine.telemetry.watchdog import Watch

TRACK = Track("Strategy", "replica 0 of 1")


class Logged(logging.Handler):
    """Keeps the first message with a beginning and a part, and sets an event then.

    A warning comes again and again, and one more may be on its way when its wait is over. Those that the coordinator
    does not answer in time have no table.
    """

    def __init__(self, begin, part=""):
        super().__init__()
        self._begin, self._part = begin, part
        self.text, self.come = "", threading.Event()

    def __enter__(self):
        logging.getLogger("replica_engine").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("replica_engine").removeHandler(self)

    def wait(self):
        """Stands still until the message has come, which the watchdog logs."""
        with Watch(lambda seconds: self._begin, warn_after=0.02):
            assert self.come.wait(LONG)

    def emit(self, record):
        text = record.getMessage()
        if text.startswith(self._begin) and self._part in text and not self.come.is_set():
            self.text = text
            self.come.set()


def test_a_warning_has_a_row_for_each_worker():
    with Logged("A run stands still.", "The workers of the job:") as logged, job() as made:
        process = made.start(
            1, "member.launched(TRAIN); member.progress(7, 'all_reduce SUM at a.py:3')\nmember.meet('a')\ninput()"
        )
        member = made.join(0)
        member.launched(TRAIN)
        member.meet("a")
        logged.wait()
        member.close()
        with Logged("Another one.") as again:
            again.wait()
    head, title, *rows = logged.text.splitlines()
    assert (head, title) == ("A run stands still.", "The workers of the job:")
    assert rows[0].startswith("  worker 0 of 2 (")
    assert (
        f"pid {process.pid}): step 7, launch 1 (`train_step` at train.py:40, program 2d03aa77), sync point all"
        in rows[1]
    )
    assert again.text == "Another one."  # the job is left


STANDS = """
from replica_engine.telemetry import watchdog
watchdog.describe_replicas(lambda: "replica 1 of 2 (CPU:1): running for 3 s; 1 merge call")
member.launched(TRAIN); member.progress(7, 'all_reduce SUM at a.py:3')
member.meet('a')
input()
"""


def test_the_row_of_a_worker_says_where_the_replicas_of_its_traced_step_are():
    with Logged("A run stands still.", "now replica") as logged, job() as made:
        made.start(1, STANDS)
        member = made.join(0)
        member.launched(TRAIN)
        member.meet("a")
        logged.wait()
        member.close()
    where = "sync point all_reduce SUM at a.py:3; now replica 1 of 2 (CPU:1): running for 3 s; 1 merge call; heard of"
    assert where in logged.text


RECORDS = """
from replica_engine.telemetry import timeline
from replica_engine.telemetry.trace_file import Track
while member.clock_offset is None:
    member.rows()  # a message and its answer
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
        while member.clock_offset is None:
            member.rows()
        with timeline.timeline(path), timeline.span(TRACK, "step of 0", "run"):
            member.meet("in the step")
        member.meet("the end")
    events = json.loads(path.read_text())["traceEvents"]
    groups = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(groups) == {"worker 0: Strategy", "worker 1: Strategy"}
    about = json.loads(path.read_text())["otherData"]
    assert list(about["lacks"]) == ["worker 2"]
    error = about["clock_errors"]["worker 1"] * 1e6  # large if the machine was busy when the clocks were compared
    steps = {event["name"]: event for event in events if event["ph"] == "X"}
    mine, other = steps["step of 0"], steps["step of 1"]
    assert mine["pid"] != other["pid"]
    for first, second in ((mine, other), (other, mine)):  # both were in the step when they met
        assert first["ts"] < second["ts"] + second["dur"] + error


class FakeMember:
    """A worker whose clock differs from the coordinator's."""

    def __init__(self, worker, values, ahead=0.0):
        self.worker, self.size, self.clock_offset = worker, 2, ClockOffset(ahead, 0.25)
        self._values = values

    def put(self, key, value):
        self._values[key] = value

    def drop(self, *prefixes):
        for key in [key for key in self._values if key.startswith(prefixes)]:
            del self._values[key]

    def get(self, key, timeout=None):
        if key not in self._values:
            raise WorkersMissingError.no_value(key, timeout)
        return self._values[key]


def both(values):
    return [SharedTimelines(FakeMember(worker, values)) for worker in range(2)]


def test_clocks_are_aligned():
    values = {}
    chief, other = SharedTimelines(FakeMember(0, values, 5.0)), SharedTimelines(FakeMember(1, values, -1000.0))
    for each in (chief, other):
        each.begin("a.json")
    assert other.end("a.json", [Span(TRACK, "step", "run", 1011.0, 1012.0, {"size": 3})], waits=True).path is None
    path, (span,), lacks, clock_errors = chief.end("a.json", [], waits=True)
    assert (path, lacks, clock_errors) == ("a.json", {}, {1: 0.5})
    assert (span.begin, span.end) == (pytest.approx(6.0), pytest.approx(7.0))
    assert (span.track.group, span.details) == ("worker 1: Strategy", {"size": 3})


def test_many_spans_travel_in_parts():
    values = {}
    chief, other = both(values)
    chief.begin("a.json"), other.begin("a.json")
    spans = [
        Span(TRACK, f"{number * 7919 % 1000003}", "run", number / 7, number / 7 + 1, None) for number in range(60_000)
    ]
    other.end("a.json", spans, waits=True)
    assert sum("part" in key for key in values) > 1
    assert [span.name for span in chief.end("a.json", [], waits=True).spans] == [span.name for span in spans]
    assert values == {}


@pytest.mark.parametrize("waits", [True, False])
def test_timelines_leave_nothing_at_the_coordinator(waits):
    values = {}
    chief, other = both(values)
    for number in range(5):
        path = f"{number % 2}.json"
        chief.begin(path), other.begin(path)
        assert other.end(path, [span(number)], waits).path is None
        ended = chief.end(path, [], waits)
        assert [each.name for each in ended.spans] == [f"step {number}"] * waits
        assert set(ended.lacks) == (set() if waits else {1})
        assert values == {}


def test_a_worker_that_records_alone_writes_its_own_file_and_later_ones_are_paired(caplog):
    values = {}
    chief, other = both(values)
    other.begin("a.json")
    assert other.end("a.json", [span(0)], waits=True) == ("a.worker-1.json", [span(0)], {}, {})
    assert "Worker 1 records a timeline of 'a.json' alone, and writes it to 'a.worker-1.json'" in caplog.text
    for _ in range(2):
        chief.begin("a.json")
        path, spans, lacks, _ = chief.end("a.json", [], waits=True)
        assert (path, spans, set(lacks)) == ("a.json", [], {1})
    assert "The timeline 'a.json' lacks worker 1: it records no timeline of this path now" in caplog.text
    chief.begin("a.json"), other.begin("b.json")
    assert other.end("b.json", [span(1)], waits=True).path == "b.worker-1.json"
    other.begin("a.json")
    assert other.end("a.json", [span(2)], waits=True).path is None
    assert [each.name for each in chief.end("a.json", [], waits=True).spans] == ["step 2"]
    assert values == {}


def test_a_worker_that_is_ahead_is_not_taken_for_the_timeline_before():
    values = {}
    chief, other = both(values)
    chief.begin("a.json"), other.begin("a.json")
    other.end("a.json", [span(0)], waits=True)
    other.begin("a.json")
    assert [each.name for each in chief.end("a.json", [], waits=True).spans] == ["step 0"]
    chief.begin("a.json")
    other.end("a.json", [span(1)], waits=True)
    assert [each.name for each in chief.end("a.json", [], waits=True).spans] == ["step 1"]
    assert values == {}


def span(number):
    return Span(TRACK, f"step {number}", "run", 1.0, 2.0, None)
