"""A job of workers that exist in a test only, with a clock that the test moves."""

from replica_engine.workers.job import Job, Limits
from replica_engine.workers.program_log import LAUNCH, WAIT, entry, packed

TRAIN, EVAL, SAVE = entry(LAUNCH, "train"), entry(LAUNCH, "eval"), entry(WAIT, "save")
LIMITS = Limits(join=100.0, heartbeat=10.0)


class Played:
    """A job of `size` workers that exist in this test only.

    Attributes:
        told: the messages to members, as (worker or None, message).
        now: the time; `wait` moves it.
    """

    def __init__(self, size=3, joined=None, statuses=False, limits=LIMITS):
        self.told = []
        self.now = 0.0
        self.job = Job(size, limits, 0.0, lambda worker, message: self.told.append((worker, message)), statuses)
        for worker in range(size if joined is None else joined):
            self.join(worker)

    def join(self, worker, versions=None, replicas=1):
        refusal = self.job.refusal(worker, 3)
        if refusal is None:
            about = {"host": f"node-{worker}", "pid": 100 + worker, "versions": versions or {}, "replicas": replicas}
            about["came_to"] = ("127.0.0.1", "127.0.0.1", "10.0.0.1")[worker]
            self.job.joined(worker, about, self.now)
        return refusal

    def say(self, worker, *message):
        self.job.received(worker, list(message), self.now)

    def launch(self, worker, *entries, wait=()):
        self.say(worker, "log", packed(entries), len(entries), [], *wait)

    def all_launch(self, *entries):
        for worker in range(3):
            self.launch(worker, *entries)

    def stand_still(self):
        """Moves the clock on as if the coordinator had stood still."""
        self.now += 1000.0
        self.job.tick(self.now)

    def wait(self, seconds, beats=(), in_step=(), waits=(), asks=(), calls=0):
        """Moves the clock on in steps of a second; some members give signs of life, and say what they do.

        In each second, a program of each makes `calls` calls of the user's code.
        """
        for _ in range(round(seconds)):
            self.now += 1.0
            for worker in beats:
                did = worker in (*in_step, *waits), worker in waits, worker in asks, round(calls * self.now)
                self.say(worker, "beat", [], *did)
            self.job.tick(self.now)

    def answer_stacks(self, *workers):
        """Each member that is asked where it is says so."""
        for worker in workers:
            for _ in self.told_to(worker, "stack"):
                self.say(worker, "stack", f"  MainThread:\n  in fetch, of worker {worker}\n")

    def told_to(self, worker, kind):
        return [message[1:] for to, message in self.told if to == worker and message[0] == kind]

    @property
    def error(self):
        return None if self.job.failure is None else self.job.failure.error()
