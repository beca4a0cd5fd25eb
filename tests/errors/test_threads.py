"""Replicas on threads: what goes wrong between them, and what is added to a user's exception."""

import multiprocessing
import pathlib
import threading

import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy
from replica_engine.engine import run
from replica_engine.errors import (
    ForkedError,
    MergeCallGraphError,
    MergeCallMismatchError,
    NotInReplicaError,
    ReplicaUnwound,
    StructureMismatchError,
    VariableMismatchError,
)
from replica_engine.errors.run_errors import note_abandoned, note_failed_alike, note_failure, warn_different_lines


@shows(MergeCallMismatchError)
def test_a_merge_call_in_a_branch():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", x)
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            total = context.all_reduce("SUM", total)
        return total

    strategy.run(step, args=(tf.constant(1.0),))


@shows(warn_different_lines)
def test_two_sums_in_another_order_on_one_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def sum_of_ones():
        context = tf.distribute.get_replica_context()
        ones, tens = tf.constant(1.0), tf.constant(10.0)
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            ones = context.all_reduce("SUM", ones)
            tens = context.all_reduce("SUM", tens)
        else:
            tens = context.all_reduce("SUM", tens)
            ones = context.all_reduce("SUM", ones)
        return ones

    print([sum.numpy() for sum in strategy.experimental_local_results(strategy.run(sum_of_ones))])


@shows(StructureMismatchError)
def test_results_of_another_structure():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            return {"loss": x, "logits": [x, x]}
        return {"loss": x, "logits": [x]}

    strategy.run(step, args=(tf.constant(1.0),))


@shows(MergeCallGraphError)
def test_a_merge_call_in_a_concrete_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def mean(x):
        return tf.distribute.get_replica_context().all_reduce("MEAN", x)

    def train(x):
        return mean.get_concrete_function(x)(x)

    strategy.run(train, args=(tf.constant(2.0),))


@shows(NotInReplicaError)
def test_a_merge_call_on_a_thread_of_ones_own():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        failures = []

        def in_background():
            try:
                with context:
                    context.all_reduce("SUM", x)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=in_background, name="background")
        thread.start()
        thread.join()
        raise failures.pop()

    strategy.run(step, args=(tf.constant(1.0),))


@shows(VariableMismatchError, "not_created")
def test_a_variable_that_replica_0_does_not_create():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        weight = tf.Variable(1.0, name="weight")
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 1:
            weight = tf.Variable(x, name="bias")
        return weight * x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(ReplicaUnwound)
def test_how_a_waiting_replica_is_taken_down():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 1:
            raise ValueError("no more memory")
        try:
            return context.all_reduce("SUM", x)
        except BaseException as error:
            print(f"replica 0 is taken down with {type(error).__name__}: {error}")
            raise

    strategy.run(step, args=(tf.constant(1.0),))


@shows(note_failure)
def test_an_exception_of_a_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", x)
        if tf.get_static_value(context.replica_id_in_sync_group) == 1:
            raise ValueError(f"{float(total)} is not a loss")
        try:
            return context.all_reduce("SUM", total)
        finally:
            pathlib.Path("/no/such/file").read_text()

    strategy.run(step, args=(tf.constant(1.0),))


@shows(note_failed_alike)
def test_an_exception_of_all_replicas():
    strategy = MirroredStrategy([f"CPU:{replica}" for replica in range(4)])

    def step(x):
        context = tf.distribute.get_replica_context()
        try:
            if tf.get_static_value(context.replica_id_in_sync_group) < 3:
                context.all_reduce("SUM", x)
        finally:
            pathlib.Path("/no/such/file").read_text()

    strategy.run(step, args=(tf.constant(1.0),))


@pytest.mark.filterwarnings("ignore:.*fork")
@shows(ForkedError)
def test_a_run_in_a_fork():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    processes = multiprocessing.get_context("fork")
    found = processes.SimpleQueue()

    def train():
        try:
            found.put(strategy.run(tf.square, args=(tf.constant(2.0),)))
        except Exception as error:
            found.put(error)

    process = processes.Process(target=train)
    process.start()
    error = found.get()
    process.join()
    raise error


@pytest.fixture
def _little_patience(monkeypatch):
    monkeypatch.setattr(run, "UNWIND_GRACE", 2.0)


@pytest.mark.usefixtures("_little_patience")
@shows(note_abandoned)
def test_a_replica_that_cannot_be_taken_down():
    """It is given 2 s to come down here, and not 30."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 1:
            raise ValueError("no more memory")
        try:
            context.all_reduce("SUM", x)
        finally:
            while True:
                threading.Event().wait(0.01)

    strategy.run(step, args=(tf.constant(1.0),))
