"""Bodies, collectives and host calls that cannot be compiled, or cannot run."""

import importlib

import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.errors import (
    CaptureError,
    CollectiveError,
    HostAccessError,
    LoweringError,
    ProgramError,
)
from replica_engine.xla.host_calls import session

lower = importlib.import_module("replica_engine.xla.stages.lowered")  # `xla.lower` is the function


@pytest.fixture
def _small_machine(monkeypatch):
    monkeypatch.setattr(lower, "memory_limit", lambda devices: 8 << 30)


@pytest.fixture
def _little_patience(monkeypatch):
    monkeypatch.setattr(session, "_STUCK_AFTER", 0.01)


def test_a_variable_that_may_change_its_shape():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        history = tf.Variable(tf.zeros([1]), shape=[None])

    def step(x):
        return x + tf.reduce_sum(history)

    with pytest.raises(CaptureError, match="Make the variable without shape=, so that it gets the shape"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_text_from_outside():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)
    labels = tf.constant(["cat", "dog"])

    def step(x):
        return x + tf.cast(tf.size(tf.where(labels == "cat")), tf.float32)

    with pytest.raises(CaptureError, match="Its dtype is string, which no device can hold: convert it"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_the_gradient_of_a_loop_without_a_bound():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            while tf.reduce_sum(y) < 100.0:
                y = y * y
        return tape.gradient(y, x)

    line = step.__code__.co_firstlineno + 4
    words = rf"In `step`, a loop at .*test_bodies.py:{line} in step keeps a value of each iteration, for its"
    with pytest.raises(LoweringError, match=words):
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


def test_a_batch_of_any_size():
    def step(x):
        return tf.reduce_sum(x)

    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def show(x):
        print(xla.lower(step, inputs=[[x], [x]]).as_text())

    with pytest.raises(LoweringError, match="but XLA compiles for fixed shapes"):
        show(tf.ones([8, 3]))


def test_text_as_a_result():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)

    def step(x):
        return x, tf.strings.as_string(x)

    with pytest.raises(LoweringError, match="is a string or another value that no device"):
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


def test_a_branch_of_what_was_cut_out_that_the_host_needs():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        large = tf.boolean_mask(x, x > 1.0)
        shown = tf.cond(x[0] > 0.0, lambda: large * 2.0, lambda: large)
        tf.print("large ones:", shown)

    with pytest.raises(LoweringError, match="runs on the host and needs a result of"):
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


def test_a_branch_that_cuts_out_what_the_host_needs():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        shown = tf.cond(x[0] > 0.0, lambda: tf.boolean_mask(x, x > 1.0), lambda: x)
        tf.print("large ones:", shown)

    with pytest.raises(LoweringError, match="runs on the host and needs a result of StatelessIf at "):
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


def test_a_loop_that_gathers():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        for _ in tf.range(3):
            tf.autograph.experimental.set_loop_options(shape_invariants=[(x, tf.TensorShape([None]))])
            x = tf.distribute.get_replica_context().all_gather(x, axis=0)
        return x

    with pytest.raises(LoweringError, match="after it, and XLA compiles a loop for one shape"):
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


def test_whatever_else_xla_refuses():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        array = tf.TensorArray(tf.float32, size=0)
        return x + array.read(0)

    with pytest.raises(LoweringError, match="TensorList is not initialized"):
        strategy.run(step, args=(tf.constant([1.0, 2.0]),))


def test_a_variable_of_text():
    strategy = TPUStrategy(num_cores=2, soft_placement=False)
    words = tf.Variable(["a", "b"], name="words")

    def step(x):
        return x + tf.cast(tf.size(words), tf.float32)

    with pytest.raises(CaptureError, match="Its dtype is string, which no device can hold: use it on"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_a_concrete_function_of_all_replicas():
    strategy = TPUStrategy(num_cores=2)
    on_read, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    with strategy.scope():
        seen = tf.Variable(0.0, name="seen", synchronization=on_read, aggregation=total)

    @tf.function
    def so_far(x):
        return x + seen

    concrete = so_far.get_concrete_function(tf.TensorSpec([]))
    with pytest.raises(CaptureError, match="There it is one value of all replicas, and a compiled"):
        strategy.run(concrete, args=(tf.constant(1.0),))


@pytest.mark.usefixtures("_small_machine")
def test_a_program_that_needs_more_memory_than_there_is():
    """On a machine that has 8 GiB of memory."""
    strategy = TPUStrategy(num_cores=2)

    def step():
        noise = tf.random.normal([1 << 22, 1 << 20])
        return tf.reduce_sum(noise @ tf.transpose(noise))

    with pytest.raises(ProgramError, match="The compiled program of `step` needs 32 TiB for"):
        strategy.run(step)


def test_a_gathering_of_losses():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    losses = strategy.run(tf.square, args=(tf.constant(2.0),))
    with pytest.raises(CollectiveError, match="It joins the rows of all replicas, and a scalar has none"):
        strategy.gather(losses, axis=0)


def test_groups_that_leave_a_replica_out():
    def step(x):
        return xla.cross_replica_sum(x, groups=[[0, 1]])

    with pytest.raises(CollectiveError, match="`groups` must contain each of the 3 replicas exactly once"):
        xla.replicate(step, inputs=[[tf.constant(float(i))] for i in range(3)])


def test_a_table_in_the_place_of_groups():
    strategy = TPUStrategy(num_cores=2)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)

    def step(x):
        return xla.cross_replica_sum(x, table)

    with pytest.raises(CollectiveError, match="`groups` must contain each of the 2 replicas exactly once"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_a_replica_that_receives_twice():
    def step(x):
        return xla.collective_permute(x, pairs=[(0, 1), (1, 1)])

    with pytest.raises(CollectiveError, match="of replicas 0 to 1, and each replica may send and receive"):
        xla.replicate(step, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])


def test_a_host_function_that_calls_a_function_with_a_variable():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        scale = tf.Variable(2.0, name="scale")

    @tf.function
    def scaled(x):
        return scale * x

    def report(loss):
        if xla.replica_id() == 0:
            print("loss", float(scaled(loss)))

    def step(x):
        xla.outside_compilation(report, x * x)

    scaled(tf.constant(1.0))
    with pytest.raises(HostAccessError, match="function that uses a variable of a strategy, whose values"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_a_host_function_that_runs_a_step():
    strategy = TPUStrategy(num_cores=2)

    def evaluate():
        return tf.constant(1.0)

    def report(loss):
        if xla.replica_id() == 0:
            print("loss", float(loss), "accuracy", strategy.run(evaluate))

    def step(x):
        xla.outside_compilation(report, x * x)

    with pytest.raises(HostAccessError, match="runs on the host uses devices: it runs a"):
        strategy.run(step, args=(tf.constant(1.0),))


@pytest.mark.usefixtures("_little_patience")
def test_a_program_that_does_not_end_after_a_failure():
    """The program is long, and it is given 0.01 s to end after the failure, not 15."""
    strategy = TPUStrategy(num_cores=2)

    @xla.returns(tf.TensorSpec([500, 500]))
    def check(x):
        if xla.replica_id() == 1:
            raise ValueError("no more room on the disk")
        return x

    def step(x):
        x = xla.outside_compilation(check, x)
        for _ in tf.range(20):
            x = tf.tanh(x @ x)
        return xla.cross_replica_sum(x)

    with pytest.raises(ValueError, match="no more room") as caught:
        strategy.run(step, args=(tf.random.normal([500, 500]),))
    assert "Either it takes long, or its 2 replicas wait for each" in str(caught.value.__notes__)
