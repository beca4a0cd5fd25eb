"""MultiWorkerMirroredStrategy in real processes: equal numbers, Keras, and what the others get when a worker is lost.

Processes that start TensorFlow are expensive. So a job checks many things, and prints what it found as JSON.
"""

import json
import signal

import pytest
import tensorflow as tf
from helpers.jobs import LONG, Job, job

from replica_engine.errors import WorkerVersionError

HEAD = """
import json, os, signal, sys, threading
import numpy as np
import tensorflow as tf
import replica_engine

me, local = int(os.environ.get("REPLICA_ENGINE_PROCESS_ID", 0)), int(os.environ["LOCAL"])
one = [tf.config.LogicalDeviceConfiguration()] * local
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], one)
KIND = replica_engine.MirroredStrategy if os.environ.get("ALONE") else replica_engine.MultiWorkerMirroredStrategy
context = tf.distribute.get_replica_context
found = {}
"""
TAIL = "print(json.dumps(found), flush=True)"

LOOP = """
strategy = KIND()
rng = np.random.RandomState(0)
x = rng.rand(64, 8).astype("float32")
y = x.sum(1, keepdims=True)
weight = rng.rand(8, 1).astype("float32")
tf.random.set_seed(me)
with strategy.scope():
    w = tf.Variable(weight + me)  # the chief's counts
    b = tf.Variable(tf.random.normal([]) * 0.0)
    seen = tf.Variable(
        0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM, trainable=False
    )
found["replicas"] = strategy.num_replicas_in_sync
found["hosts"] = getattr(strategy, "num_hosts", None)
found["first"] = w.numpy().tolist()


def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((x @ w + b - y) ** 2) / 16
    gradients = context().all_reduce("SUM", tape.gradient(loss, [w, b]))
    w.assign_sub(0.1 * gradients[0])
    b.assign_sub(0.1 * gradients[1])
    seen.assign_add(tf.cast(tf.shape(x)[0], tf.float32))
    return loss


@tf.function
def train(x, y):
    return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)


batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((x, y)).batch(16))
found["losses"] = [float(train(*batch)) for _ in range(2) for batch in batches]
found["eager"] = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in batches]
found["bare"] = strategy.experimental_local_results(
    strategy.run(tf.function(lambda v: context().all_reduce("SUM", v)), args=(tf.ones([3]),))
)[0].numpy().tolist()
ids = strategy.run(lambda: context().all_gather(tf.reshape(context().replica_id_in_sync_group, [1]), axis=0))
found["ids"] = strategy.experimental_local_results(ids)[0].numpy().tolist()
found["seen"] = float(seen)
found["sums"] = [float(value) for value in tf.nest.flatten(strategy.reduce("SUM", strategy.run(
    lambda: {"a": tf.constant(1.0), "b": [tf.constant(2.0)]}), axis=None))]
found["second"] = float(KIND().reduce("SUM", KIND().run(lambda: context().all_reduce("MEAN", 1.0)), axis=None))
found["weights"] = [w.numpy().tolist(), float(b)]
"""


def outputs(programs, made: Job, program: str, local: int = 1, **environment: str) -> list[dict]:
    """Runs a program in all workers of a job; returns what each has found."""
    text = HEAD + program + TAIL
    started = [
        programs.start(text, env=made.environment(worker, LOCAL=str(local), **environment))
        for worker in range(made.size)
    ]
    return [read(each) for each in started]


def alone(programs, program: str, replicas: int) -> dict:
    """Runs a program in one process, with MirroredStrategy."""
    return read(programs.start(HEAD + program + TAIL, env={"LOCAL": str(replicas), "ALONE": "1"}))


def read(process) -> dict:
    try:
        out, err = process.communicate(LONG)
    finally:
        process.kill()
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def test_two_workers_of_two_replicas_equal_one_of_four(programs):
    with job() as made:
        first, second = outputs(programs, made, LOOP, local=2)
    reference = alone(programs, LOOP, 4)
    assert (first.pop("hosts"), second.pop("hosts"), reference.pop("hosts")) == (2, 2, None)
    assert first == second
    assert first["ids"] == [0, 1, 2, 3]
    assert (first["replicas"], first["seen"]) == (4, 192.0)
    assert first.keys() == reference.keys()
    for name, value in reference.items():
        for ours, theirs in zip(flat(first[name]), flat(value), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6), name


def flat(value) -> list:
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, list) else [value]


def test_cluster_of_tf_config(programs, unused_ports):
    """The coordinator is a child of worker 0 then, and TensorFlow has the addresses of the cluster."""
    ports = unused_ports(3)
    workers = [f"127.0.0.1:{port}" for port in ports[:2]]
    started = []
    for index in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        environment = {
            "TF_CONFIG": json.dumps(config),
            "REPLICA_ENGINE_TOKEN": "a secret",
            "REPLICA_ENGINE_COORDINATOR": f"127.0.0.1:{ports[2]}",
            "LOCAL": "1",
        }
        started.append(programs.start(HEAD + SMALL + TAIL, env=environment))
    expected = {"sum": 2.0, "server": workers, "task": "worker"}
    assert [read(each) for each in started] == [{**expected, "id": 0}, {**expected, "id": 1}]


FAULTS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "raised": "raise ValueError('the body')",
    "left": "sys.exit(0)",
    "left past Python": "os._exit(0)",
}
STATUSES = {"killed": -signal.SIGKILL, "raised": 1, "left": 0, "left past Python": 0}
WORDS = {
    "killed": "has closed its connection without a word",
    "stopped": "has not been heard of for 3 s",
    "raised": "has raised ValueError: the body",
    "left": "has come to the end of its program or to sys.exit",
    "left past Python": "has closed its connection without a word",
}

STEPS = """
strategy = KIND()


def sums():
    return context().all_reduce("SUM", 1.0)


train = tf.function(lambda: strategy.run(sums)) if int(os.environ["VICTIM"]) else lambda: strategy.run(sums)
try:
    while True:
        for _ in range(20):
            train()
        if me == int(os.environ["VICTIM"]):
            {fault}
except replica_engine.errors.WorkerLostError as error:
    found.update(worker=error.worker, pid=error.pid, step=error.step, point=error.sync_point, text=str(error))
    print(json.dumps(found), flush=True)
    raise
"""


@pytest.mark.parametrize("victim", [0, 1])  # in a loop of eager steps and of traced ones
@pytest.mark.parametrize("fault", FAULTS)
def test_the_others_are_told_who_is_lost(programs, fault, victim):
    with job(heartbeat=3.0 if fault == "stopped" else LONG) as made:
        text = HEAD + STEPS.replace("{fault}", FAULTS[fault])
        lost, other = (
            programs.start(text, env=made.environment(worker, LOCAL="1", VICTIM=str(victim)))
            for worker in (victim, 1 - victim)
        )
        try:
            out, err = other.communicate(LONG)
        finally:
            lost.kill() if fault == "stopped" else lost.communicate(LONG)
            other.kill()
    assert out, err[-4000:]
    found = json.loads(out)
    assert (found["worker"], found["pid"], other.returncode) == (victim, lost.pid, 1), err[-4000:]
    assert lost.returncode == STATUSES.get(fault, -signal.SIGKILL)
    assert f"worker {victim} of 2" in found["text"]
    assert WORDS[fault] in found["text"]
    assert found["point"].startswith("all_reduce at ")
    assert found["point"].endswith("in sums")
    assert 1 <= found["step"] <= 20
    assert "WorkerLostError" in err


def failing(process) -> str:
    """What a worker writes that fails before it has found anything."""
    try:
        out, err = process.communicate(LONG)
    finally:
        process.kill()
    assert (out, process.returncode) == ("", 1), err[-4000:]
    return err


def test_another_worker_never_starts(programs):
    with job(join=0.1) as made:
        error = failing(programs.start(HEAD + SMALL + TAIL, env=made.environment(1, LOCAL="1")))
    assert "WorkersMissingError: " in error
    assert "did not join within 0.1 s: worker" in error


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"versions": {"tensorflow": "2.0.0"}}, "The workers have different versions of tensorflow:"),
        (
            {"versions": {"tensorflow": tf.__version__}, "replicas": 2},
            "The workers have different numbers of replicas:",
        ),
    ],
)
def test_another_worker_is_different(programs, other, text):
    with job() as made:
        process = programs.start(HEAD + SMALL + TAIL, env=made.environment(1, LOCAL="1"))
        with pytest.raises(WorkerVersionError):
            made.join(0, **other)
        assert f"WorkerVersionError: {text}" in failing(process)


ORDER = """
strategy = KIND()


def sums(x):
    return context().all_reduce("SUM", x)


def means(x):
    return context().all_reduce("MEAN", x)


if os.environ["TRACED"] == "1":
    sums, means = tf.function(sums), tf.function(means)
both = [sums, means]
if os.environ["LATER"] == "1":
    for step in both:
        strategy.run(step, args=(tf.ones([4]),))
while True:
    for step in reversed(both) if me else both:
        value = strategy.run(step, args=(tf.ones([4]),))
        if os.environ["LATER"] == "0":
            print(value.numpy(), flush=True)
"""


@pytest.mark.parametrize(("traced", "later"), [(0, 0), (1, 0), (1, 1)])
def test_another_order_is_found(programs, traced, later):
    """At the first launch before there is a number; later, soon after it."""
    with job() as made:
        environment = {"LOCAL": "1", "TRACED": str(traced), "LATER": str(later)}
        started = [programs.start(HEAD + ORDER, env=made.environment(worker, **environment)) for worker in range(2)]
        for process in started:
            error = failing(process)
            assert "ProgramDisagreementError: After" in error
            assert "`all_reduce SUM, float32[4]` at program.py:" in error
            assert "`all_reduce MEAN, float32[4]` at program.py:" in error
            assert "in means, program" in error


SMALL = """
strategy = KIND()
found["sum"] = float(strategy.run(lambda: context().all_reduce("SUM", 1.0)))
found["server"] = strategy.cluster_resolver.cluster_spec().as_dict()["worker"]
found["task"], found["id"] = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
"""
