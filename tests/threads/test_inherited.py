"""What a replica thread takes over from its caller: the rows of threads/inherited_state.py.

Each test fails when its row is taken out. It uses replicas 0 and 1, since the caller's own thread could stand in for
neither. Graphs, creators of variables, scopes of names and of variables, context variables and control dependencies
are in tests/contract.
"""

import contextlib
import threading

import keras
import pytest
import tensorflow as tf

# Op callbacks, the scope that caches reads of variables, and cancellation have no public name.
from tensorflow.python.distribute.distribute_utils import cache_variable_reads, caching_scope_local
from tensorflow.python.eager import cancellation
from tensorflow.python.framework import op_callbacks

import replica_engine
from replica_engine import xla


def local(strategy, fn):
    """Python values that fn returned on each replica."""
    seen = []
    strategy.run(lambda: seen.append(fn()))
    return seen


@contextlib.contextmanager
def changed(change, value, before):
    """Changes a setting of this thread in the block."""
    change(value)
    try:
        yield
    finally:
        change(before)


INHERITED = {
    "eager mode": (lambda: tf.Graph().as_default(), tf.executing_eagerly, [True, True], [False, False]),
    "name scope": (
        lambda: tf.name_scope("outer"),
        tf.get_current_name_scope,
        ["", "replica_1"],
        ["outer", "outer/replica_1"],
    ),
    "device policy": (
        lambda: changed(tf.config.experimental.set_device_policy, "explicit", "silent"),
        tf.config.experimental.get_device_policy,
        ["silent", "silent"],
        ["explicit", "explicit"],
    ),
    "traceback filtering": (
        lambda: changed(
            lambda off: (
                tf.debugging.disable_traceback_filtering if off else tf.debugging.enable_traceback_filtering
            )(),
            True,
            False,
        ),
        tf.debugging.is_traceback_filtering_enabled,
        [True, True],
        [False, False],
    ),
    "caching of reads": (cache_variable_reads, caching_scope_local.in_caching_scope, [False, False], [True, True]),
    "dtype policy of Keras": (
        lambda: changed(keras.config.set_dtype_policy, "mixed_bfloat16", "float32"),
        lambda: keras.layers.Dense(1).dtype_policy.name,
        ["float32", "float32"],
        ["mixed_bfloat16", "mixed_bfloat16"],
    ),
}


@pytest.mark.parametrize(("enter", "read", "outside", "inside"), INHERITED.values(), ids=INHERITED)
def test_what_the_caller_has_entered(mirrored, enter, read, outside, inside):
    assert local(mirrored, read) == outside
    with enter():
        assert local(mirrored, read) == inside
    assert local(mirrored, read) == outside


def test_where_init_scope_leads(mirrored):
    def in_init_scope():
        with tf.init_scope():
            return tf.executing_eagerly() or tf.compat.v1.get_default_graph()

    seen = []

    @tf.function
    def entered_by_the_caller():
        with tf.init_scope():
            seen.extend(local(mirrored, tf.executing_eagerly))

    entered_by_the_caller()
    tf.function(lambda: seen.extend(local(mirrored, in_init_scope)))()
    assert seen == [True] * 4
    with tf.Graph().as_default() as graph:
        assert local(mirrored, in_init_scope) == [graph, graph]
        # A function traced in a graph: out of the function leads to that graph, not to eager mode.
        seen.clear()
        tf.function(lambda: seen.extend(local(mirrored, in_init_scope)))()
    assert seen == [graph, graph]


def test_op_callbacks(mirrored):
    devices = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if op_type == b"AddV2" or op_type == "AddV2":
            devices.append(outputs[0].device[-5:])

    op_callbacks.add_op_callback(callback)
    try:
        mirrored.run(lambda: tf.constant(1.0) + 1.0)
    finally:
        op_callbacks.remove_op_callback(callback)
    assert devices == ["CPU:0", "CPU:1"]
    mirrored.run(lambda: tf.constant(1.0) + 1.0)
    assert len(devices) == 2


def test_what_replicas_trace_at_the_same_time_is_each_ones_own(tmp_path):
    strategy = replica_engine.MirroredStrategy(["CPU:0", "CPU:1"], concurrent=True)
    meet = threading.Barrier(2)

    def body(x):
        meet.wait(120)
        drawn = tf.random.uniform([])  # compiled replicas draw it another way: an op is made in place of it
        meet.wait(120)
        return x + drawn

    def fn():  # on another number of devices: programs of the same ones are traced one after another
        devices = 1 + int(tf.distribute.get_replica_context().replica_id_in_sync_group)
        return xla.replicate(body, [[tf.ones([])]] * devices)[0]

    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=1):  # so that the replicas' state is the caller's
        drawn = strategy.run(fn)
    assert all(1.0 <= value < 2.0 for value in drawn.values)
    assert 0.0 <= xla.replicate(lambda: tf.random.uniform([]), num_replicas=1)[0] < 1.0  # nothing stays on this thread


def test_summary_writer_and_step(mirrored, tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))

    def write():
        written = tf.summary.scalar("loss", 0.5)
        return bool(written), tf.summary.experimental.get_step()

    with writer.as_default(step=7):
        assert local(mirrored, write) == [(True, 7), (False, 7)]  # replica 0 writes for all, as in TensorFlow
        with tf.summary.record_if(False):
            assert local(mirrored, lambda: bool(tf.summary.should_record_summaries())) == [False, False]
    assert local(mirrored, write) == [(False, None), (False, None)]


def test_what_cancels_calls(mirrored):
    manager = cancellation.CancellationManager()
    queue = tf.queue.FIFOQueue(1, tf.int32)
    with cancellation.CancellationManagerContext(manager):
        assert local(mirrored, cancellation.context) == [manager, manager]
        manager.start_cancel()
        with pytest.raises(tf.errors.CancelledError):
            mirrored.run(tf.function(queue.dequeue))  # nothing else would end it
    assert local(mirrored, cancellation.context) == [None, None]


def test_a_scope_of_the_users_own_is_around_a_run():
    entered = []

    class Noting(replica_engine.MirroredStrategy):
        def scope(self):
            entered.append(type(self))
            return super().scope()

    Noting(replica_engine.logical_devices(2)).run(lambda: None)
    assert entered == [Noting]


def test_a_run_that_fails_leaves_the_creators_around_it_as_they_were(mirrored):
    """TensorFlow checks by identity, at the end of a scope, that its list is still there."""
    made = []
    with tf.variable_creator_scope(lambda make, **given: made.append(given["name"]) or make(**given)):
        with pytest.raises(ZeroDivisionError):
            mirrored.run(lambda: 1 / 0)
        tf.Variable(1.0, name="after")
    tf.Variable(1.0, name="outside")
    assert made == ["after"]
