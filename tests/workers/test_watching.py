"""What shows workers: the table of a run that stands still, and the timeline of each."""

import json
import logging
import threading

from helpers.jobs import LONG, TRAIN, job

from replica_engine.watch import timeline
from replica_engine.watch.timeline import Track
from replica_engine.watch.watchdog import Wait

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
        with Wait(lambda seconds: self._begin, warn_after=0.02):
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
from replica_engine.watch import watchdog
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
from replica_engine.watch import timeline
from replica_engine.watch.timeline import Track
with timeline.timeline({path!r}), timeline.span(Track("Strategy", "replica 0 of 1"), "step of 1", "run"):
    member.meet("in the step")
member.meet("the end")
"""


def test_each_worker_writes_a_timeline_of_its_own(tmp_path):
    path = tmp_path / "run.json"
    with job() as made:
        made.start(1, RECORDS.format(path=str(path)))
        member = made.join(0)
        with timeline.timeline(path), timeline.span(TRACK, "step of 0", "run"):
            member.meet("in the step")
        member.meet("the end")
    for worker, file in enumerate(("run.json", "run.worker-1.json")):
        events = json.loads((tmp_path / file).read_text())["traceEvents"]
        assert [event["name"] for event in events if event["ph"] == "X"] == [f"step of {worker}"]
    assert len(list(tmp_path.iterdir())) == 2
