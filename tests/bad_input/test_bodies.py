"""Bodies, collectives and host calls that cannot be compiled, or cannot run."""

import importlib

import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.errors import CaptureError, CollectiveError, HostAccessError, LoweringError, ProgramError
from replica_engine.xla.host_calls import session

lower = importlib.import_module("replica_engine.xla.stages.lowered")  # `xla.lower` is the function


@pytest.fixture
def on_devices_alone():
    return TPUStrategy(num_cores=2, soft_placement=False)


def test_a_variable_that_may_change_its_shape(tpu):
    with tpu.scope():
        history = tf.Variable(tf.zeros([1]), shape=[None])
    with pytest.raises(CaptureError, match="Make the variable without shape=, so that it gets the shape"):
        tpu.run(lambda x: x + tf.reduce_sum(history), args=(tf.constant(1.0),))


def test_text_from_outside(on_devices_alone):
    labels, words = tf.constant(["cat", "dog"]), tf.Variable(["a", "b"], name="words")

    def count(x):
        return x + tf.cast(tf.size(tf.where(labels == "cat")), tf.float32)

    with pytest.raises(CaptureError, match="Its dtype is string, which no device can hold: convert it"):
        on_devices_alone.run(count, args=(tf.constant(1.0),))
    with pytest.raises(CaptureError, match="Its dtype is string, which no device can hold: use it on"):
        on_devices_alone.run(lambda x: x + tf.cast(tf.size(words), tf.float32), args=(tf.constant(1.0),))


def test_the_gradient_of_a_loop_without_a_bound(tpu):
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
        tpu.run(step, args=(tf.constant([1.0, 2.0]),))


def test_a_batch_of_any_size():
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def show(x):
        print(xla.lower(tf.reduce_sum, inputs=[[x], [x]]).as_text())

    with pytest.raises(LoweringError, match="but XLA compiles for fixed shapes"):
        show(tf.ones([8, 3]))


def test_text_as_a_result(on_devices_alone):
    with pytest.raises(LoweringError, match="is a string or another value that no device"):
        on_devices_alone.run(lambda x: (x, tf.strings.as_string(x)), args=(tf.constant([1.0, 2.0]),))


def _branch_of_what_was_cut_out_that_the_host_needs(x):
    large = tf.boolean_mask(x, x > 1.0)
    tf.print("large ones:", tf.cond(x[0] > 0.0, lambda: large * 2.0, lambda: large))


def _branch_that_cuts_out_what_the_host_needs(x):
    tf.print("large ones:", tf.cond(x[0] > 0.0, lambda: tf.boolean_mask(x, x > 1.0), lambda: x))


def _loop_that_gathers(x):
    for _ in tf.range(3):
        tf.autograph.experimental.set_loop_options(shape_invariants=[(x, tf.TensorShape([None]))])
        x = tf.distribute.get_replica_context().all_gather(x, axis=0)
    return x


def _list_of_nothing(x):
    return x + tf.TensorArray(tf.float32, size=0).read(0)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (_branch_of_what_was_cut_out_that_the_host_needs, "runs on the host and needs a result of"),
        (_branch_that_cuts_out_what_the_host_needs, "runs on the host and needs a result of StatelessIf at "),
        (_loop_that_gathers, "after it, and XLA compiles a loop for one shape"),
        (_list_of_nothing, "TensorList is not initialized"),
    ],
)
def test_what_xla_refuses(tpu, step, words):
    with pytest.raises(LoweringError, match=words):
        tpu.run(step, args=(tf.constant([1.0, 2.0]),))


def test_a_concrete_function_of_all_replicas(tpu):
    on_read, total = tf.VariableSynchronization.ON_READ, tf.VariableAggregation.SUM
    with tpu.scope():
        seen = tf.Variable(0.0, name="seen", synchronization=on_read, aggregation=total)
    concrete = tf.function(lambda x: x + seen).get_concrete_function(tf.TensorSpec([]))
    with pytest.raises(CaptureError, match="There it is one value of all replicas, and a compiled"):
        tpu.run(concrete, args=(tf.constant(1.0),))


def test_a_program_that_needs_more_memory_than_there_is(tpu, monkeypatch):
    """On a machine that has 8 GiB of memory."""
    monkeypatch.setattr(lower, "memory_limit", lambda devices: 8 << 30)

    def step():
        noise = tf.random.normal([1 << 22, 1 << 20])
        return tf.reduce_sum(noise @ tf.transpose(noise))

    with pytest.raises(ProgramError, match="The compiled program of `step` needs 32 TiB for"):
        tpu.run(step)


def test_groups_that_leave_a_replica_out():
    with pytest.raises(CollectiveError, match="`groups` must contain each of the 3 replicas exactly once"):
        xla.replicate(lambda x: xla.cross_replica_sum(x, groups=[[0, 1]]), [[tf.constant(float(i))] for i in range(3)])


def test_a_table_in_the_place_of_groups(tpu):
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1], [2]), 0)
    with pytest.raises(CollectiveError, match="`groups` must contain each of the 2 replicas exactly once"):
        tpu.run(lambda x: xla.cross_replica_sum(x, table), args=(tf.constant(1.0),))


def test_a_replica_that_receives_twice():
    pairs = [(0, 1), (1, 1)]
    with pytest.raises(CollectiveError, match="of replicas 0 to 1, and each replica may send and receive"):
        xla.replicate(lambda x: xla.collective_permute(x, pairs=pairs), [[tf.constant(1.0)], [tf.constant(2.0)]])


def test_a_host_function_that_calls_a_function_with_a_variable(tpu):
    with tpu.scope():
        scale = tf.Variable(2.0, name="scale")
    scaled = tf.function(lambda x: scale * x)

    def report(loss):
        if xla.replica_id() == 0:
            print("loss", float(scaled(loss)))

    scaled(tf.constant(1.0))
    with pytest.raises(HostAccessError, match="function that uses a variable of a strategy, whose values"):
        tpu.run(lambda x: xla.outside_compilation(report, x * x), args=(tf.constant(1.0),))


def test_a_host_function_that_runs_a_step(tpu):
    def report(loss):
        if xla.replica_id() == 0:
            print("loss", float(loss), "accuracy", tpu.run(lambda: tf.constant(1.0)))

    with pytest.raises(HostAccessError, match="runs on the host uses devices: it runs a"):
        tpu.run(lambda x: xla.outside_compilation(report, x * x), args=(tf.constant(1.0),))


def test_a_program_that_does_not_end_after_a_failure(tpu, monkeypatch):
    """The program is long, and it is given 0.01 s to end after the failure, not 15."""
    monkeypatch.setattr(session, "_STUCK_AFTER", 0.01)

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
        tpu.run(step, args=(tf.random.normal([500, 500]),))
    assert "Either it takes long, or its 2 replicas wait for each" in str(caught.value.__notes__)
