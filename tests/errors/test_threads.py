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
    ReplicaMismatchError,
    ReplicaUnwound,
    StructureMismatchError,
    VariableMismatchError,
    note_abandoned,
    note_failed_alike,
    note_failure,
    note_merge_failure,
    warn_different_lines,
)


@shows(MergeCallMismatchError.different_counts)
def test_a_merge_call_in_a_branch():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", x)
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            total = context.all_reduce("SUM", total)
        return total

    strategy.run(step, args=(tf.constant(1.0),))


@shows(MergeCallMismatchError.different_functions)
def test_a_merge_function_for_each_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def largest(strategy, x):
        return tf.reduce_max(strategy.experimental_local_results(x))

    def smallest(strategy, x):
        return tf.reduce_min(strategy.experimental_local_results(x))

    def step(x):
        context = tf.distribute.get_replica_context()
        first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        return context.merge_call(largest if first else smallest, args=(x,))

    strategy.run(step, args=(tf.constant(1.0),))


@shows(MergeCallMismatchError.different_operations)
def test_a_sum_on_one_replica_and_a_mean_on_the_other():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        return context.all_reduce("SUM" if first else "MEAN", x)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(MergeCallMismatchError.different_order)
def test_a_sum_and_a_gather_in_another_order_on_one_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            total, each = context.all_reduce("SUM", x), context.all_gather(x, axis=0)
        else:
            each, total = context.all_gather(x, axis=0), context.all_reduce("SUM", x)
        return total, each

    strategy.run(step, args=(tf.constant([1.0]),))


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


@shows(StructureMismatchError.between)
def test_results_of_another_structure():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            return {"loss": x, "logits": [x, x]}
        return {"loss": x, "logits": [x]}

    strategy.run(step, args=(tf.constant(1.0),))


@shows(StructureMismatchError.between, "of_arguments")
def test_arguments_of_another_structure():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def log(strategy, values):
        tf.print(values)

    def step(x):
        context = tf.distribute.get_replica_context()
        first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        context.merge_call(log, args=({"loss": x} if first else {"error": x},))

    strategy.run(step, args=(tf.constant(1.0),))


@shows(MergeCallGraphError.inside)
def test_a_merge_call_in_a_concrete_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def mean(x):
        return tf.distribute.get_replica_context().all_reduce("MEAN", x)

    def train(x):
        return mean.get_concrete_function(x)(x)

    strategy.run(train, args=(tf.constant(2.0),))


@shows(MergeCallGraphError.in_dataset)
def test_a_merge_call_in_a_for_over_a_dataset():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = tf.data.Dataset.range(4)

    @tf.function
    def train():
        return strategy.run(epoch)

    def epoch():
        total = tf.constant(0, tf.int64)
        for x in dataset:
            total += tf.distribute.get_replica_context().all_reduce("SUM", x)
        return total

    train()


@shows(MergeCallGraphError.vectorized)
def test_a_merge_call_in_a_jacobian():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def train(x):
        return strategy.run(slopes, args=(x,))

    def slopes(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * tf.distribute.get_replica_context().all_reduce("SUM", x)
        return tape.jacobian(y, x)

    train(tf.constant([1.0, 2.0]))


@shows(MergeCallGraphError.shared_variable)
def test_a_plain_variable_in_a_branch_with_a_merge_call():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    weight = tf.Variable(2.0)

    @tf.function
    def train(x):
        return strategy.run(slope, args=(x,))

    def slope(x):
        with tf.GradientTape() as tape:
            y = weight * x
            if y > 0.0:
                y = tf.distribute.get_replica_context().all_reduce("MEAN", weight * y)
        return tape.gradient(y, weight)

    train(tf.constant(3.0))


@shows(MergeCallGraphError.compiled)
def test_a_merge_call_in_a_nested_compiled_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function(jit_compile=True)
    def mean(x):
        return tf.distribute.get_replica_context().all_reduce("MEAN", x)

    @tf.function
    def train(x):
        return strategy.run(lambda x: mean(x * x), args=(x,))

    train(tf.constant(2.0))


@shows(MergeCallGraphError.swallowed)
def test_a_bare_except_around_a_merge_call():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def mean(x):
        try:
            return tf.distribute.get_replica_context().all_reduce("MEAN", x)
        except BaseException:
            return x

    strategy.run(lambda x: mean(x), args=(tf.constant(2.0),))


@shows(ReplicaMismatchError.of_conditions)
def test_a_condition_on_the_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def train(x):
        return strategy.run(mean_of_first, args=(x,))

    def mean_of_first(x):
        context = tf.distribute.get_replica_context()
        first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        return tf.cond(tf.constant(first), lambda: context.all_reduce("MEAN", x), lambda: x)

    train(tf.constant(2.0))


@shows(NotInReplicaError.other_thread)
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


@shows(VariableMismatchError.not_created)
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
    strategy = MirroredStrategy([f"CPU:{replica}" for replica in range(4)], concurrent=True)
    first = threading.Event()

    def step(x):
        if tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group) > 0:
            first.wait()
        first.set()
        raise ValueError("not a number")

    strategy.run(step, args=(tf.constant(1.0),))


@shows(note_merge_failure)
def test_an_exception_of_a_merge_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def check(strategy, x):
        raise ValueError("the replicas are not equal")

    def step(x):
        tf.distribute.get_replica_context().merge_call(check, args=(x,))

    strategy.run(step, args=(tf.constant(1.0),))


@pytest.mark.filterwarnings("ignore:.*fork")
@shows(ForkedError.of_process)
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
    monkeypatch.setattr(run, "UNWIND_GRACE", 0.1)


@pytest.mark.usefixtures("_little_patience")
@shows(note_abandoned)
def test_a_replica_that_cannot_be_taken_down():
    """It is given 0.1 s to come down here, and not 30."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 1:
            raise ValueError("no more memory")
        try:
            context.all_reduce("SUM", x)
        finally:
            threading.Event().wait(0.5)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(NotInReplicaError.run_has_ended)
def test_a_tape_that_is_asked_after_the_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    scaled = tf.function(lambda x: x * tf.distribute.get_replica_context().all_reduce("SUM", x))
    tapes = []

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = scaled(x)
        tapes.append(tape)
        return x, y

    x, y = strategy.run(step, args=(tf.constant(1.0),))
    tapes[0].gradient(strategy.experimental_local_results(y)[0], strategy.experimental_local_results(x)[0])
