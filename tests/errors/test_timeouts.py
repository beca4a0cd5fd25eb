"""Replicas and programs that do not come back: warnings, timeouts, and what they leave behind."""

import threading

import pytest
import tensorflow as tf
from helpers.golden import eager_only, shows

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.errors import CoordinatorRow, ReplicaTimeoutError, StuckProgramError
from replica_engine.errors.timeouts import slow_function, slow_program, slow_replicas
from replica_engine.pjrt import executable
from replica_engine.pjrt.stablehlo import markers


@shows(ReplicaTimeoutError.after)
def test_a_replica_that_does_not_come_back():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], timeout=2.0)

    def step(x):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", x)
        is_last = tf.get_static_value(context.replica_id_in_sync_group) == 1
        while is_last:
            threading.Event().wait(0.01)
        return context.all_reduce("SUM", total)

    strategy.run(step, args=(tf.constant(1.0),))


@pytest.fixture
def _little_patience(monkeypatch):
    monkeypatch.setattr(StuckProgramError, "PATIENCE", 0.05)


@pytest.mark.usefixtures("_little_patience")
@shows(StuckProgramError)
@eager_only("a function ends only when the host calls of its program have")
def test_a_step_after_one_that_has_not_ended():
    """The second step waits for 0.05 s here, and not for 10."""
    strategy = TPUStrategy(num_cores=2, timeout=1.0)

    def save(x):
        if xla.replica_id() == 1:
            threading.Event().wait(5.0)
        return x

    def step(x):
        x = xla.outside_compilation(save, x)
        return xla.cross_replica_sum(x)

    for _ in range(2):
        try:
            strategy.run(step, args=(tf.constant(1.0),))
        except TimeoutError:
            print("Once more.")


@shows(slow_replicas)
def test_a_replica_that_takes_long():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], warn_after=1.0)

    def step(x):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", x)
        if tf.get_static_value(context.replica_id_in_sync_group) == 1:
            threading.Event().wait(1.5)
        return context.all_reduce("SUM", total)

    strategy.run(step, args=(tf.constant(1.0),))


def test_a_warning_says_when_the_limit_ends_the_wait():
    text = slow_replicas(1.0, [], CoordinatorRow("MainThread", "waiting for the replicas"), limit=3.0)
    assert text.endswith("Ctrl-C ends it; after 3 s (timeout=) the wait raises an error.")


@shows(slow_program)
def test_a_program_that_takes_long():
    strategy = TPUStrategy(num_cores=2, warn_after=1.0)

    def save(x):
        if xla.replica_id() == 1:
            threading.Event().wait(1.5)
        return x

    def step(x):
        x = xla.outside_compilation(save, x)
        return xla.cross_replica_sum(x)

    strategy.run(step, args=(tf.constant(1.0),))


@pytest.fixture
def _kept_in_a_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("REPLICA_ENGINE_DUMP_DIR", str(tmp_path))


@pytest.mark.usefixtures("_kept_in_a_folder")
@shows("note_sync_points")
@eager_only("the step reads values")
def test_a_run_that_fails_after_some_sync_points():
    """With REPLICA_ENGINE_DUMP_DIR=/tmp/runs in the environment."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        loss = context.all_reduce("MEAN", x)
        parts = context.all_gather(tf.reshape(x, [1]), axis=0)
        raise ValueError(f"{float(loss)} is not the mean of {parts.numpy()}")

    strategy.run(step, args=(tf.constant(1.0),))


@pytest.fixture
def _slow_to_compile(monkeypatch):
    def slow(program, platform, **options):
        threading.Event().wait(1.5)
        return markers.expand_markers(program, platform, **options)

    monkeypatch.setattr(executable, "expand_markers", slow)


@pytest.mark.usefixtures("_slow_to_compile")
@shows("slow_compile")
def test_a_program_that_takes_long_to_compile():
    strategy = TPUStrategy(num_cores=2, warn_after=1.0)

    def step(x):
        return 2.0 * x

    strategy.run(step, args=(tf.constant(1.0),))


@shows("slow_trace")
def test_a_body_that_takes_long_to_trace():
    strategy = TPUStrategy(num_cores=2, warn_after=1.0)

    def step(x):
        threading.Event().wait(1.5)
        return 2.0 * x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(slow_function)
def test_a_function_that_takes_long():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], warn_after=1.0)

    def wait():
        threading.Event().wait(1.5)

    @tf.function
    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 1:
            tf.py_function(wait, [], [])
        return 2.0 * x

    strategy.run(step, args=(tf.constant(1.0),))
