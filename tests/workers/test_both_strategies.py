"""What is the same for both strategies of several workers: how a start fails, a network that is cut, and a restart."""

import json
import signal
import socket
import subprocess
import sys

import jax
import jaxlib
import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers import fork_server
from helpers.jobs import LONGER, Proxy, job

from replica_engine.errors import WorkerVersionError
from replica_engine.workers.job import DEVICES, STRATEGY

KINDS = ("threads", "compiled")
CLASSES = {"threads": "MultiWorkerMirroredStrategy", "compiled": "TPUStrategy"}

HEAD = """
import json, os, signal, socket, sys
import tensorflow as tf
import replica_engine
from replica_engine import errors, workers
from replica_engine.workers import member

me = int(os.environ["REPLICA_ENGINE_PROCESS_ID"])


def make(kind):
    if kind == "compiled":
        return replica_engine.TPUStrategy(replica_engine.xla.PjrtClusterResolver("cpu"), num_cores=2)
    return replica_engine.MultiWorkerMirroredStrategy()


def sums():
    return tf.distribute.get_replica_context().all_reduce("SUM", 1.0)
"""

STARTS = """
# A second job, of this process and the test, says which strategy to make next, and in which job.
control = workers.join(environ={**os.environ, "REPLICA_ENGINE_COORDINATOR": os.environ["CONTROL"]})
number = 0
while kind_and_address := control.get(f"try {number}"):
    kind, os.environ["REPLICA_ENGINE_COORDINATOR"] = kind_and_address
    try:
        make(kind)
    except errors.ReplicaEngineError as error:
        control.put(f"error {number}", [type(error).__name__, str(error)])
    number += 1
"""


def versions_of_a_worker() -> dict[str, str]:
    """What a worker of this test's process has, as the strategy says it to the job."""
    own = {"tensorflow": tf.__version__, "keras": keras.__version__, "numpy": np.__version__}
    return {**own, "jax": jax.__version__, "jaxlib": jaxlib.__version__}


def test_a_start_that_fails(programs):
    """Worker 1 of each job makes the strategy. Worker 0 is different, or never starts."""
    tries = []
    for kind in KINDS:
        own = versions_of_a_worker()
        for package in ("replica_engine", "python", *own):
            tries.append(
                (kind, {"versions": {**own, package: "0.0.1"}}, f"versions of {package}:\n  worker 0: 0.0.1\n")
            )
        if kind == "threads":
            gpus = {"versions": {"tensorflow": tf.__version__, DEVICES: "GPU"}}
            tries.append((kind, gpus, "kinds of devices:\n  worker 0: GPU\n  worker 1: CPU\n"))
        other = {"versions": {**own, STRATEGY: "Own"}}
        tries.append((kind, other, f"strategies:\n  worker 0: Own\n  worker 1: {CLASSES[kind]}\n"))
        tries.append((kind, {"versions": own, "replicas": 2}, "numbers of replicas:\n  worker 0: 2\n  worker 1: 1\n"))
        tries.append((kind, None, "did not join within 2 s: worker"))
    with job(join=LONGER) as control:
        process = programs.start(HEAD + STARTS, env=control.environment(1, CONTROL=control.address))
        test = control.join(0)
        for number, (kind, other, expected) in enumerate(tries):
            with job(join=LONGER if other else 2.0) as made:
                test.put(f"try {number}", [kind, made.address])
                if other:
                    with pytest.raises(WorkerVersionError):
                        made.join(0, **other)
                name, text = test.get(f"error {number}", LONGER)
            assert name == ("WorkerVersionError" if other else "WorkersMissingError")
            assert expected in text
            if other is None:  # worker 1 is in the list too if the machine is so busy that it came late
                assert text.partition("2 s: ")[2].startswith(("worker 0.", "workers 0-1."))
        test.put(f"try {len(tries)}", None)
        test.leave()
        _, err = process.communicate(LONGER)
    assert process.returncode == 0, err[-4000:]


STEPS = """
strategy = make(os.environ["KIND"])
try:
    for number in range(10**9):
        strategy.run(sums)
        if number == 20 and me == int(os.environ["VICTIM"]):
            (connection,) = member._members
            connection.heartbeat = 8.0
            socket.create_connection(("127.0.0.1", int(os.environ["CUT"]))).close()
except errors.WorkerLostError as error:
    print(json.dumps({"error": [error.worker, str(error)]}), flush=True)
    raise
"""


@pytest.mark.parametrize(
    ("kind", "victim"),
    [("threads", 0), *(pytest.param(kind, 1, marks=pytest.mark.full("the same connection")) for kind in KINDS[1:])],
)
def test_the_network_is_cut(programs, kind, victim):
    """The way of one worker to the coordinator: it hears no coordinator, and the other is told that it is silent."""
    with job(join=LONGER) as made, socket.create_server(("127.0.0.1", 0)) as steps_run:
        proxy = Proxy(made.address)
        asked = {"KIND": kind, "VICTIM": str(victim), "CUT": str(steps_run.getsockname()[1])}
        addresses = {victim: proxy.address}
        started = [
            programs.start(HEAD + STEPS, env=made.environment(worker, addresses.get(worker), **asked))
            for worker in range(2)
        ]
        try:
            steps_run.settimeout(LONGER)
            steps_run.accept()[0].close()
            proxy.cut()
            made.limit(heartbeat=8.0)
            found = []
            for process in started:
                out, err = process.communicate(LONGER)
                assert process.returncode == 1, err[-4000:]  # its own exception: no abort
                found += [json.loads(line)["error"] for line in out.splitlines() if line.startswith("{")]
        finally:
            for process in started:
                process.kill()
            proxy.close()
        silent = made.coordinator.failure.arguments[0].silent
    assert found[victim][0] is None
    assert (
        f"The coordinator of the job at {proxy.address} has not been heard of for 8 s by worker {victim} of 2"
        in found[victim][1]
    )
    assert found[1 - victim][0] == victim
    assert f"worker {victim} of 2" in found[1 - victim][1]
    assert "has not been heard of for 8 s" in found[1 - victim][1]
    assert silent >= 8.0  # not before the limit, by the clock of the coordinator


RESTARTED = """
def step(x):
    gradient = tf.distribute.get_replica_context().all_reduce("MEAN", tf.sin(weight * x))
    weight.assign_sub(0.1 * gradient)


def trained(name):
    global weight
    with strategy.scope():
        weight = tf.Variable(tf.range(1.0, 4.0))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(weight=weight), f"{sys.argv[1]}/{name}", max_to_keep=2)
    manager.restore_or_initialize()
    began = int((manager.latest_checkpoint or "-0").rpartition("-")[2])
    for number in range(began, 8):
        values = strategy.experimental_distribute_values_from_function(
            lambda of: tf.constant(0.3 + number + of.replica_id_in_sync_group))
        strategy.run(step, args=(values,))
        if number == 4 and me == 1 and os.environ["REPLICA_ENGINE_RESTART"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if number % 2:
            manager.save(checkpoint_number=number + 1)
    return began, weight.numpy().tobytes().hex()


strategy = make("compiled")
print(json.dumps({name: trained(name) for name in ("resumed", "undisturbed")}), flush=True)
"""


def test_the_launcher_starts_a_killed_worker_of_a_tpu_strategy_again(tmp_path):
    """All go on from the last checkpoint, to the very weights of a training that nothing disturbs."""
    script = tmp_path / "train.py"
    script.write_text(HEAD + RESTARTED)
    command = [sys.executable, "-m", "replica_engine", "launch", "--workers", "2", "--max-restarts", "1"]
    worker = [fork_server.__file__, str(script), str(tmp_path)]
    ended = subprocess.run([*command, *worker], capture_output=True, text=True, timeout=LONGER, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert f"worker 1 of 2 ({socket.gethostname()}, pid " in ended.stderr
    assert f"was ended by signal {signal.SIGKILL:d}" in ended.stderr
    assert "restart 1 of 1: all workers start again" in ended.stderr
    lines = [line.partition("] ")[2] for line in ended.stdout.splitlines()]
    first, second = (json.loads(line) for line in lines if line.startswith("{"))
    assert first == second
    weights = first["undisturbed"][1]
    assert first == {"resumed": [4, weights], "undisturbed": [0, weights]}


LENGTHS = """
import keras

strategy = make(os.environ["KIND"])
batches = 4 if me else 2
rows = 16 * batches
x = tf.range(100.0 * me, 100.0 * me + rows)[:, tf.newaxis]
data = tf.data.Dataset.from_tensor_slices((x, tf.zeros([rows, 1]))).batch(16)
seen = []
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mae")
count = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(int(model.optimizer.iterations.numpy())))
found = [model.fit(data, epochs=2, verbose=0, callbacks=[count], validation_data=data).history, seen]
found += [model.evaluate(data, verbose=0), model.fit(data, steps_per_epoch=2, epochs=2, verbose=0).history]
of_unknown_length = data.filter(lambda *_: True)
found += [model.fit(of_unknown_length if me else data, verbose=0).history, len(model.predict(data, verbose=0))]
print(json.dumps(found), flush=True)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_of_keras_ends_on_all_workers_after_the_same_batch(programs, kind):
    """Each knows how many batches its own data has. On threads, one that has no more takes part with empty batches."""
    with job(join=LONGER) as made:
        started = [programs.start(HEAD + LENGTHS, env=made.environment(at, KIND=kind)) for at in range(2)]
        found = []
        for process in started:
            out, err = process.communicate(LONGER)
            assert process.returncode == 0, err[-4000:]
            found.append(json.loads(out.splitlines()[-1]))
    assert found[0] == found[1]
    (history, steps, evaluated, begun, unknown, predicted) = found[0]
    most = 4 if kind == "threads" else 2
    assert steps == [most, 2 * most]
    # Of each batch of 16 the first worker has the first half, and the second one the other.
    own = [100.0 * me + np.arange(64).reshape(4, 2, 8)[:batches, me] for me, batches in enumerate((2, most))]
    loss = float(np.concatenate(list(map(np.ravel, own))).mean())
    losses = [*history["loss"], *history["val_loss"], evaluated, *unknown["loss"]]
    assert losses == pytest.approx([loss] * 6, rel=1e-6)
    assert predicted == 8 * (2 + most)
    # Of `steps_per_epoch` each takes its own next batches: the first worker begins again, the second one goes on.
    shares = [100.0 * me + np.arange(64).reshape(4, 2, 8)[:, me] for me in (0, 1)]
    taken = [np.concatenate([shares[0][:2], shares[1][at : at + 2]]).mean() for at in (0, 2)]
    assert begun["loss"] == pytest.approx(taken, rel=1e-6)
