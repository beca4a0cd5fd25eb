"""Jobs on hosts with addresses of their own: what each survivor shows, and after how long.

Each row of the table is a disturbance. Some jobs go on after it, and the others end with an error on each worker that
names the worker, or the two, between which nothing gets through.
"""

import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time

import pytest

from network.net import Network, ip6
from replica_engine.errors.worker_errors import workers

pytestmark = [
    pytest.mark.skipif(bool(os.geteuid()) or not shutil.which("ip"), reason="needs root and `ip`"),
    pytest.mark.parametrize("kind", ["mirrored", "tpu"]),
    pytest.mark.parametrize("size", [2, 4]),
]

LIMIT = 8.0  # the heartbeat limit of jobs that end, in seconds
PATIENT = 20.0  # the same where many jobs start in a row, and the time of the error is not asked for
LONG = 60.0  # and of jobs that go on
SLACK = 20.0  # seconds for a process to end, on a machine that is busy
GOING_ON = 2.0  # and for one that was stopped, once it goes on
STARTING = 300.0

SCRIPT = """
import os, sys, time
now, ahead = time.time, float(os.environ.get("AHEAD", 0))
time.time = lambda: now() + ahead  # the clock on the wall
import tensorflow as tf
import replica_engine

size, steps = int(sys.argv[2]), int(sys.argv[3])
if sys.argv[1] == "tpu":
    strategy = replica_engine.TPUStrategy(replica_engine.xla.PjrtClusterResolver("cpu"), num_cores=size)
else:
    strategy = replica_engine.MultiWorkerMirroredStrategy()
with strategy.scope():
    total = tf.Variable(tf.zeros([1000]))


@tf.function
def step():
    def body():
        total.assign(tf.distribute.get_replica_context().all_reduce("SUM", total * 0.0 + 1.0))
    strategy.run(body)


for number in range(steps):
    step()
    print("DID", number, now(), flush=True)
    time.sleep(0.05)
assert float(total[0]) == size
"""


class Job:
    """A job with a worker on each host of a network."""

    def __init__(
        self, network, folder, strategy, limit, steps=10**9, addresses=None, port=2222, ahead=0.0, text=SCRIPT, **more
    ):
        self.network, self.size = network, network.size
        script = folder / "train.py"
        script.write_text(text)
        addresses = addresses or [f"node-{host}" for host in range(self.size)]
        self._logs = [folder / f"{port}-{host}.log" for host in range(self.size)]
        self.ended = {}
        self.shown = {}  # when each worker showed its error
        self._workers = []
        for host in range(self.size):
            config = {"cluster": {"worker": [f"{each}:{port}" for each in addresses]}}
            environment = {
                "TF_CONFIG": json.dumps({**config, "task": {"type": "worker", "index": host}}),
                "REPLICA_ENGINE_TOKEN": f"the secret of job {port}",
                "REPLICA_ENGINE_HEARTBEAT_TIMEOUT": str(limit),
                "AHEAD": str(host * ahead),
                **more,
            }
            command = [sys.executable, str(script), strategy, str(self.size), str(steps)]
            self._workers.append(network.start(host, command, environment, self._logs[host], int(host * ahead)))

    def text(self, host):
        """What a worker has printed so far."""
        return self._logs[host].read_text(errors="replace")

    def times(self, host=0):
        """The times of the steps of a worker."""
        return [float(each) for each in re.findall(r"^DID \d+ (\S+)$", self.text(host), re.M)]

    def go_on(self, steps, seconds):
        """Waits until worker 0 has made more steps."""
        wanted = len(self.times()) + steps
        self._until(lambda: len(self.times()) >= wanted, seconds)

    def end(self, hosts, seconds):
        """Waits until the workers of some hosts have ended, and returns their statuses."""
        self._until(lambda: all(self._workers[host].poll() is not None for host in hosts), seconds, hosts)
        return [self._workers[host].returncode for host in hosts]

    def _until(self, holds, seconds, hosts=()):
        deadline = time.monotonic() + seconds
        while not holds():
            for host, worker in enumerate(self._workers):
                if host not in self.shown and "WorkerLostError: " in self.text(host):
                    self.shown[host] = time.monotonic()
                if worker.poll() is not None and host not in self.ended:
                    self.ended[host] = time.monotonic()
                    assert host in hosts or worker.returncode == -signal.SIGKILL, self.text(host)[-3000:]
            assert time.monotonic() < deadline, "\n".join(self.text(host)[-1500:] for host in range(self.size))
            threading.Event().wait(0.02)
        for host in hosts:
            self.ended.setdefault(host, time.monotonic())


@contextlib.contextmanager
def job(size, *args, own_name=None, **kwargs):
    """A job whose workers have made some steps."""
    with Network(size, own_name) as network:
        made = Job(network, *args, **kwargs)
        made.go_on(5, STARTING)
        yield made


HARMLESS = {
    "a cable is out for 3 s": (lambda net, host: net.cable(host, False), 3.0),
    "a cable is out for 20 s": (lambda net, host: net.cable(host, False), 20.0),
    "1% of the packets of a host get lost": (lambda net, host: net.wire(host, loss=0.01), 5.0),
    "10% of the packets of a host get lost": (lambda net, host: net.wire(host, loss=0.1), 5.0),
    "a host is 50 ms away": (lambda net, host: net.wire(host, delay=0.05), 5.0),
    "a host has 10 Mbit/s": (lambda net, host: net.wire(host, rate=1e7), 5.0),
    "a worker is stopped for 10 s": (lambda net, host: net.signal(host, signal.SIGSTOP), 10.0),
}


def restore(net, host):
    """Undoes what a row of `HARMLESS` has done."""
    net.cable(host, True)
    net.wire(host)
    net.signal(host, signal.SIGCONT)


@pytest.mark.timeout(900)
def test_what_does_no_harm(kind, size, tmp_path, seen):
    with job(size, tmp_path, kind, LONG) as made:
        for what, (disturb, seconds) in HARMLESS.items():
            before = len(made.times())
            disturb(made.network, size - 1)
            threading.Event().wait(seconds)
            restore(made.network, size - 1)
            made.go_on(20, LONG)
            times = made.times()[before - 1 :]
            pause = max(after - at for at, after in itertools.pairwise(times))
            seen(what, size, kind, f"goes on; the longest step takes {pause:.2g} s")


FATAL = {
    "a cable is pulled out": lambda net, host: net.cable(host, False),
    "worker 0 and the last one hear nothing of each other": lambda net, host: net.part(0, host),
    "the last two hear nothing of each other": lambda net, host: net.part(host - 1, host),
    "a worker is stopped": lambda net, host: net.signal(host, signal.SIGSTOP),
    "a worker is killed": lambda net, host: net.signal(host, signal.SIGKILL),
}


@pytest.mark.parametrize("what", FATAL)
@pytest.mark.timeout(600)
def test_what_ends_a_job(kind, size, what, tmp_path, seen):
    last = size - 1
    if size == 2 and "the last two" in what:  # they are worker 0 and the last one
        return
    with job(size, tmp_path, kind, LIMIT) as made:
        began = time.monotonic()
        FATAL[what](made.network, last)
        there = ending(what, size, last)
        statuses = list(made.end(there, LIMIT + SLACK))
        after = [made.shown[host] - began for host in there]
        shown = in_words([error_of(made.text(host)) for host in there])
        shown += f"; after {' to '.join(sorted({f'{min(after):.1f}', f'{max(after):.1f}'}, key=float))} s"
        if "stopped" in what:
            made.network.signal(last, signal.SIGCONT)
            began = time.monotonic()
            statuses += made.end([last], SLACK)
            shown += f", and the stopped one ends {made.ended[last] - began:.1f} s after it goes on"
            assert made.ended[last] - began < GOING_ON
            there.append(last)
    assert set(statuses) == {1}
    for host in there:
        named = set(map(int, re.findall(rf"worker (\d+) of {size}", error_of(made.text(host)))))
        assert last in named or named == {host}, shown
        if "each other" in what:
            assert named in ({host}, {last}, {last, 0 if "worker 0" in what else last - 1}), shown
    seen(what, size, kind, shown)


def ending(what, size, host):
    """The workers that end by themselves after a fault of one of them."""
    return [each for each in range(size) if each != host or not ("stopped" in what or "killed" in what)]


def error_of(text):
    """The error that ended a worker, without hosts and without advice."""
    found = re.findall(r"WorkerLostError: (.*)", text)
    assert found, text[-3000:]
    return re.split(r": |\. |\.$", re.sub(r" \([^)]*\)", "", found[-1]))[0]


def in_words(texts):
    """What the workers show, those with the same text together."""
    groups = {}
    for host, text in enumerate(texts):
        groups.setdefault(text, []).append(host)
    words = [f"{workers(hosts)}: {text}" for text, hosts in groups.items()]
    return "; ".join(words) if len(groups) > 1 else texts[0]


STARTS = {
    "clocks are an hour apart": {"ahead": 3600.0},
    "the name of each host is 127.0.1.1 on the host itself": {
        "own_name": "127.0.1.1",
        "REPLICA_ENGINE_LISTEN": "0.0.0.0:2223",
    },
    "IPv6": {"addresses": [f"[{ip6(host)}]" for host in range(4)]},
    "names of hosts that have IPv6 only": {"addresses": [f"node6-{host}" for host in range(4)]},
    "two jobs in one network": {},
}


@pytest.mark.parametrize("what", STARTS)
@pytest.mark.timeout(600)
def test_what_a_network_may_be_like(kind, size, what, tmp_path, seen):
    options = dict(STARTS[what])
    if "addresses" in options:
        options["addresses"] = options["addresses"][:size]
    with Network(size, options.pop("own_name", None)) as network:
        ports = (2222, 3222) if "two jobs" in what else (2222,)
        jobs = [Job(network, tmp_path, kind, LONG, steps=20, port=port, **options) for port in ports]
        for each in jobs:
            statuses = each.end(range(size), STARTING)
            assert set(statuses) == {0}, each.text(0)[-3000:]
            assert len(each.times()) == 20
    seen(what, size, kind, "works")


TRAINING = """
import os, sys, time
import tensorflow as tf
import replica_engine

size = int(sys.argv[2])
if sys.argv[1] == "tpu":
    strategy = replica_engine.TPUStrategy(replica_engine.xla.PjrtClusterResolver("cpu"), num_cores=size)
else:
    strategy = replica_engine.MultiWorkerMirroredStrategy()
with strategy.scope():
    weight = tf.Variable(tf.range(1.0, 4.0))
manager = tf.train.CheckpointManager(tf.train.Checkpoint(weight=weight), os.environ["SAVED"], max_to_keep=2)
manager.restore_or_initialize()


def step(x):
    gradient = tf.distribute.get_replica_context().all_reduce("MEAN", tf.sin(weight * x))
    weight.assign_sub(0.1 * gradient)


for number in range(int((manager.latest_checkpoint or "-0").rpartition("-")[2]), int(sys.argv[3])):
    strategy.run(step, args=(strategy.experimental_distribute_values_from_function(
        lambda of: tf.constant(0.3 + number + of.replica_id_in_sync_group)),))
    print("DID", number, time.time(), flush=True)
    if number % 3 == 2:
        manager.save(checkpoint_number=number + 1)
    time.sleep(0.05)
print("WEIGHTS", weight.numpy().tobytes().hex(), flush=True)
"""

FAULTS, SEED = int(os.environ.get("NETWORK_FAULTS", "8")), os.environ.get("NETWORK_SEED", "0")
"""Random faults in a row, for each strategy and size, and what they are drawn from."""


@pytest.mark.timeout(1800 + 120 * FAULTS)
def test_a_training_goes_on_from_its_checkpoint_after_each_of_many_faults(kind, size, tmp_path, seen):
    """All workers are started again when all have ended, and come to the weights of an undisturbed training."""
    draw = random.Random(f"{SEED} {kind} {size}")

    def training(network, saved):
        return Job(network, tmp_path, kind, PATIENT, steps=8 * FAULTS + 4, text=TRAINING, SAVED=str(tmp_path / saved))

    def weights(made):
        assert set(made.end(range(size), STARTING)) == {0}
        return [re.findall(r"^WEIGHTS (\w+)$", made.text(host), re.M) for host in range(size)]

    with Network(size) as network:
        expected = weights(training(network, "undisturbed"))
        drawn = []
        for _ in range(FAULTS):
            what, steps, victim = draw.choice([*FATAL]), draw.randrange(2, 6), draw.randrange(1, size)
            drawn.append((what, steps, victim))
            made = training(network, "disturbed")
            made.go_on(steps, STARTING)
            FATAL[what](network, victim)
            assert 0 not in made.end(ending(what, size, victim), PATIENT + SLACK), drawn
            network.signal(victim, signal.SIGKILL)
            made.end([victim], SLACK)
            network.cable(victim, True)
            for other in (0, victim - 1):
                network.heal(other, victim)
        made = training(network, "disturbed")
        assert weights(made) == expected, drawn
    assert not re.search("^DID 0 ", made.text(0), re.M), "begun from nothing"
    seen("random faults in a row; all start again after each", size, kind, f"the same bits after {FAULTS} faults")
