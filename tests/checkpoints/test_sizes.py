"""A checkpoint of any number of replicas, parts and workers goes on under any other: weights and the next steps.

Each source has trained, and has saved. Each target reads the files of all sources, compares, and trains on.
"""

import itertools
import json
import pathlib

import numpy as np
import pytest
from helpers import trained
from helpers.jobs import LONGER, job
from helpers.trained import Training
from helpers.workers import TPU_HEAD, TPU_TAIL, read

import replica_engine

MAKE = {
    "plain": lambda: None,
    "two threads": lambda: replica_engine.MirroredStrategy(["CPU:0", "CPU:1"]),
    "four replicas": lambda: replica_engine.TPUStrategy(num_cores=4),
    "zero1": lambda: replica_engine.TPUStrategy(num_cores=2, distribution="zero1"),
    "three parts": lambda: replica_engine.TPUStrategy(num_cores=3, distribution="fsdp"),
    "two of two parts": lambda: replica_engine.TPUStrategy(num_cores=4, cores_per_replica=2, distribution="fsdp"),
}
WORKERS = {
    "two workers, four parts": {"num_cores": 4, "distribution": "fsdp"},  # each worker has half of the parts
    "two workers, two replicas": {"num_cores": 4, "cores_per_replica": 2, "distribution": "fsdp"},
}

JOB = (
    TPU_HEAD
    + pathlib.Path(trained.__file__).read_text()
    + """
from replica_engine.pjrt import worker_exchange as exchange

folder, own = os.environ["FOLDER"], {}
whole, gathers = exchange.whole, []
exchange.whole = lambda *args: gathers.append(args) or whole(*args)
for name, how in json.loads(os.environ["HOW"]).items():
    training = Training(replica_engine.TPUStrategy(**how))
    found[name] = {source: training.resume(f"{folder}/{source}") for source in json.loads(os.environ["SOURCES"])}
    training.values = lambda: None
    gathers.clear()
    training.save(f"{folder}/{name}", asynchronous=True)
    parts[name] = len(gathers)
    del training.values
    values, losses = training.save(f"{folder}/{name}", asynchronous=False)  # over the other
    found[f"saved {name}"] = values, losses
    training.checkpoint.read(f"{folder}/{name}").assert_consumed()
    training.checkpoint.write(f"{folder}/{name} of worker {me}")  # each its own: all values are put together
"""
    + TPU_TAIL
)


@pytest.fixture(scope="module")
def trainings():
    return {name: Training(make()) for name, make in MAKE.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(trainings, folder):
    """What each source had when it saved, and the losses of its next steps."""
    return {
        name: training.save(f"{folder}/{name}", asynchronous=name != "plain") for name, training in trainings.items()
    }


@pytest.fixture(scope="module")
def jobs(saved, programs, folder):
    """What the workers of a job found."""
    how = {"HOW": json.dumps(WORKERS), "SOURCES": json.dumps(["plain", "three parts"]), "FOLDER": str(folder)}
    with job(join=LONGER) as made:
        started = made.start_all(programs, JOB, **how)
        return [read(one) for one in started]


def assert_goes_on(resumed, expected):
    (values, losses), (saved_values, following) = resumed, expected
    for value, saved_value in zip(values, saved_values, strict=True):
        np.testing.assert_array_equal(value, saved_value)
    np.testing.assert_allclose(losses, following, rtol=1e-6)


@pytest.mark.parametrize(("source", "target"), list(itertools.product(MAKE, MAKE)))
def test_it_goes_on_at_another_size(source, target, saved, trainings, folder):
    assert_goes_on(trainings[target].resume(f"{folder}/{source}"), saved[source])


@pytest.mark.parametrize("target", WORKERS)
def test_workers_go_on_where_one_process_was(target, saved, jobs):
    for found, _ in jobs:
        for source, resumed in found[target].items():
            assert_goes_on(resumed, saved[source])


@pytest.mark.parametrize("source", WORKERS)
def test_one_process_goes_on_where_workers_were(source, jobs, trainings, folder):
    for found, parts in jobs:
        assert found[f"saved {source}"] == jobs[0][0][f"saved {source}"]
        assert parts[source] == 0, "values were put together on the host"
    for target in ("plain", "two threads", "three parts"):
        for path in (source, f"{source} of worker 0", f"{source} of worker 1"):
            assert_goes_on(trainings[target].resume(f"{folder}/{path}"), jobs[0][0][f"saved {source}"])
