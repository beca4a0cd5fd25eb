"""What a replica thread takes over from its caller: one test for each row of threads/inherited_state.py.

Each fails when its row is taken out. Every test uses replicas 0 and 1, since the caller's own thread could
stand in for neither.
"""

import contextvars
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


@pytest.fixture
def mirrored():
    return replica_engine.MirroredStrategy(["CPU:0", "CPU:1"])


def local(strategy, fn):
    """Python values that fn returned on each replica."""
    seen = []
    strategy.run(lambda: seen.append(fn()))
    return seen


def test_default_graph(mirrored):
    with tf.Graph().as_default() as graph:
        assert local(mirrored, lambda: tf.constant(1.0).graph) == [graph, graph]


def test_eager_mode(mirrored):
    assert local(mirrored, tf.executing_eagerly) == [True, True]
    with tf.Graph().as_default():
        assert local(mirrored, tf.executing_eagerly) == [False, False]


def test_eager_mode_of_an_init_scope(mirrored):
    seen = []

    @tf.function
    def traced():
        with tf.init_scope():
            seen.extend(local(mirrored, tf.executing_eagerly))

    traced()
    assert seen == [True, True]


def test_where_init_scope_leads(mirrored):
    def in_init_scope():
        with tf.init_scope():
            return tf.executing_eagerly() or tf.compat.v1.get_default_graph()

    seen = []
    tf.function(lambda: seen.extend(local(mirrored, in_init_scope)))()
    assert seen == [True, True]
    with tf.Graph().as_default() as graph:
        assert local(mirrored, in_init_scope) == [graph, graph]
        # A function traced in a graph: out of the function leads to that graph, not to eager mode.
        seen.clear()
        tf.function(lambda: seen.extend(local(mirrored, in_init_scope)))()
    assert seen == [graph, graph]


def test_variable_creators(mirrored):
    asked = []

    def creator(next_creator, **kwargs):
        asked.append(kwargs["name"])
        return next_creator(**kwargs)

    with tf.variable_creator_scope(creator):
        mirrored.run(lambda: tf.Variable(1.0, name="mine"))
    assert asked == ["mine", "mine/replica_1/"]  # the two components of one variable


def test_name_scope_in_a_graph(mirrored):
    names = []

    @tf.function
    def traced():
        with tf.name_scope("outer"):
            mirrored.run(lambda: names.append(tf.constant(1.0, name="one").name))

    traced()
    assert names == ["outer/one:0", "outer/replica_1/one:0"]


def test_name_scope_in_eager_mode(mirrored):
    with tf.name_scope("outer"):
        assert local(mirrored, tf.get_current_name_scope) == ["outer", "outer/replica_1"]


def test_variable_scope(mirrored):
    def get():
        return tf.compat.v1.get_variable("w", shape=[])

    with tf.Graph().as_default(), tf.compat.v1.variable_scope("layer"):
        variables = local(mirrored, get)
    assert variables[0].name == "layer/w:0"
    assert variables[0] is variables[1]


def test_device_policy(mirrored):
    before = tf.config.experimental.get_device_policy()
    tf.config.experimental.set_device_policy("explicit")
    try:
        assert local(mirrored, tf.config.experimental.get_device_policy) == ["explicit", "explicit"]
    finally:
        tf.config.experimental.set_device_policy(before)
    assert local(mirrored, tf.config.experimental.get_device_policy) == [before, before]


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
    assert local(mirrored, write) == [(False, None), (False, None)]


def test_summary_recording_condition(mirrored, tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=1), tf.summary.record_if(False):
        assert local(mirrored, lambda: bool(tf.summary.should_record_summaries())) == [False, False]


def test_traceback_filtering(mirrored):
    assert local(mirrored, tf.debugging.is_traceback_filtering_enabled) == [True, True]
    tf.debugging.disable_traceback_filtering()
    try:
        assert local(mirrored, tf.debugging.is_traceback_filtering_enabled) == [False, False]
    finally:
        tf.debugging.enable_traceback_filtering()
    assert local(mirrored, tf.debugging.is_traceback_filtering_enabled) == [True, True]


def test_what_cancels_calls(mirrored):
    manager = cancellation.CancellationManager()
    queue = tf.queue.FIFOQueue(1, tf.int32)
    with cancellation.CancellationManagerContext(manager):
        assert local(mirrored, cancellation.context) == [manager, manager]
        manager.start_cancel()
        with pytest.raises(tf.errors.CancelledError):
            mirrored.run(tf.function(queue.dequeue))  # nothing else would end it
    assert local(mirrored, cancellation.context) == [None, None]


def test_variable_caching_scope(mirrored):
    assert local(mirrored, caching_scope_local.in_caching_scope) == [False, False]
    with cache_variable_reads():
        assert local(mirrored, caching_scope_local.in_caching_scope) == [True, True]
    assert local(mirrored, caching_scope_local.in_caching_scope) == [False, False]


def test_the_dtype_policy_of_keras(mirrored):
    def policy():
        return keras.layers.Dense(1).dtype_policy.name

    assert local(mirrored, policy) == ["float32", "float32"]
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        assert local(mirrored, policy) == ["mixed_bfloat16", "mixed_bfloat16"]
    finally:
        keras.config.set_dtype_policy("float32")
    assert local(mirrored, policy) == ["float32", "float32"]


def test_context_variables_in_a_copy_each(mirrored):
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("caller's")

    def read_and_set():
        before = variable.get()
        variable.set(f"replica {len(seen)}")
        seen.append(before)

    seen = []
    mirrored.run(read_and_set)
    assert seen == ["caller's", "caller's"]
    assert variable.get() == "caller's"


def test_replica_context_and_device(mirrored):
    def where():
        replica_id = tf.distribute.get_replica_context().replica_id_in_sync_group
        return int(replica_id), tf.constant(1.0).device[-5:]

    assert local(mirrored, where) == [(0, "CPU:0"), (1, "CPU:1")]


def test_control_dependencies_travel_with_a_merge_call(mirrored):
    def merge_fn(strategy):
        return tf.no_op(name="merged")

    def fn():
        with tf.control_dependencies([tf.constant(1.0, name="before").op]):
            tf.distribute.get_replica_context().merge_call(merge_fn)

    with tf.Graph().as_default() as graph:
        mirrored.run(fn)
        merged = graph.get_operation_by_name("merged")
    assert {op.name for op in merged.control_inputs} == {"before", "replica_1/before"}


def test_name_scope_travels_with_a_merge_call(mirrored):
    names = []

    def merge_fn(strategy):
        names.append(tf.constant(1.0, name="merged").name)

    @tf.function
    def traced():
        def fn():
            with tf.name_scope("inner"):
                tf.distribute.get_replica_context().merge_call(merge_fn)

        mirrored.run(fn)

    traced()
    assert names == ["inner/merged:0"]


def test_nothing_entered_stays_behind_on_a_reused_thread(mirrored):
    with tf.name_scope("outer"), tf.device("CPU:3"):
        mirrored.run(lambda: None)
    assert local(mirrored, tf.get_current_name_scope) == ["", "replica_1"]
    assert local(mirrored, lambda: tf.constant(1.0).device[-5:]) == ["CPU:0", "CPU:1"]


def test_a_scope_of_the_users_own_is_around_a_run():
    entered = []

    class Noting(replica_engine.MirroredStrategy):
        def scope(self):
            entered.append(type(self))
            return super().scope()

    Noting(replica_engine.logical_devices(2)).run(lambda: None)
    assert entered == [Noting]
