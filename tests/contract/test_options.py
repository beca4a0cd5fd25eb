"""The options of MirroredStrategy: devices, how replicas take turns, reductions, time limits."""

import threading

import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index
from helpers.time_limits import LEFT, PATIENT, time_is_nearly_up

from replica_engine import MirroredStrategy
from replica_engine.errors import DeviceError, ReplicaTimeoutError
from replica_engine.testing import Sequencer


def names(n):
    return [f"CPU:{i}" for i in range(n)]


# Taking turns.


@pytest.mark.parametrize("n", [1, 2, 4])
def test_replicas_run_one_after_another_by_default(n):
    """Replica 0 to its next pause, then replica 1, and so on."""
    order = []

    def fn():
        order.append(("before", index()))
        context().merge_call(lambda strategy: order.append("merge"))
        order.append(("after", index()))

    MirroredStrategy(names(n)).run(fn)
    assert order == [("before", i) for i in range(n)] + ["merge"] + [("after", i) for i in range(n)]


def test_concurrent_replicas_run_at_once():
    """Every replica waits for all others; one after another they would wait for ever."""
    n = 4
    together = threading.Barrier(n, timeout=300)

    def fn():
        together.wait()
        context().merge_call(lambda strategy: None)
        together.wait()
        return index()

    strategy = MirroredStrategy(names(n), concurrent=True)
    assert strategy.experimental_local_results(strategy.run(fn)) == tuple(range(n))


def test_concurrent_results_are_in_order_whichever_replica_is_first():
    sequencer = Sequencer([2, 0, 1])
    strategy = MirroredStrategy(names(3), concurrent=True)
    result = strategy.run(lambda: (sequencer.pass_(index()), index())[1])
    assert strategy.experimental_local_results(result) == (0, 1, 2)


def test_a_concurrent_strategy_builds_graphs_in_order():
    order = []
    strategy = MirroredStrategy(names(4), concurrent=True)
    strategy.run(tf.function(lambda: order.append(index())))
    assert order == [0, 1, 2, 3]


class Lazy:
    def __init__(self):
        self.v = None

    def __call__(self):
        if self.v is None:
            self.v = tf.Variable(2.0, name="v")
        return self.v * 3.0


def test_concurrent_replicas_share_a_variable_that_is_made_once():
    strategy = MirroredStrategy(names(4), concurrent=True)
    for _ in range(10):
        lazy = Lazy()
        assert [float(x) for x in strategy.experimental_local_results(strategy.run(lazy))] == [6.0] * 4
        assert lazy.v.distribute_strategy is strategy


def test_concurrent_replicas_share_a_variable_that_is_made_after_a_merge_call():
    """Replica 0, which makes it, may be the last to wake up; the others have to wait for it."""
    strategy = MirroredStrategy(names(4), concurrent=True)
    for _ in range(25):
        lazy = Lazy()

        def fn(lazy=lazy):
            context().merge_call(lambda strategy: None)
            return lazy()

        assert [float(x) for x in strategy.experimental_local_results(strategy.run(fn))] == [6.0] * 4


def trained(strategy):
    """Some of everything: variables made in the run, reductions, merge calls, a second run."""
    lazy = Lazy()
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0], aggregation=tf.VariableAggregation.MEAN)

    def fn(k):
        i = tf.cast(context().replica_id_in_sync_group, tf.float32)
        total = context().all_reduce("sum", weight * (i + 1.0) / 7.0)
        weight.assign_add(total * lazy() + k)
        gathered = context().all_gather(tf.expand_dims(i, 0), axis=0)
        return context().merge_call(lambda strategy, x: x, args=(tf.reduce_sum(weight) + tf.reduce_sum(gathered),))

    results = []
    for k in range(4):
        results += [x.numpy() for x in strategy.experimental_local_results(strategy.run(fn, args=(float(k),)))]
    return results + [component.numpy().tobytes() for component in strategy.experimental_local_results(weight)]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_concurrent_and_sequential_results_are_bitwise_equal(n):
    assert trained(MirroredStrategy(names(n), concurrent=True)) == trained(MirroredStrategy(names(n)))


# Reductions.


@pytest.mark.parametrize(
    "make", [tf.distribute.ReductionToOneDevice, tf.distribute.HierarchicalCopyAllReduce], ids=["one-device", "copy"]
)
@pytest.mark.parametrize("where", ["eager", "in-function"])
def test_the_users_cross_device_ops_are_used(make, where):
    used = []

    class Counting(make):
        def batch_reduce_implementation(self, *args):
            used.append(1)
            return super().batch_reduce_implementation(*args)

    strategy = MirroredStrategy(names(4), Counting())

    def fn():
        i = tf.cast(context().replica_id_in_sync_group, tf.float32)
        return context().all_reduce("sum", [i, tf.stack([i, 1.0])])

    result = strategy.run(fn if where == "eager" else tf.function(fn))
    for first, second in strategy.experimental_local_results(result):
        assert (float(first), second.numpy().tolist()) == (6.0, [6.0, 4.0])
    assert used == [1]


MIXED = (tf.float32, tf.float16, tf.float64, tf.int32, tf.bfloat16, tf.int64, tf.float32)


def sums_of(dtypes):
    i = context().replica_id_in_sync_group
    return context().all_reduce("sum", [tf.fill([3], tf.cast(i, dtype)) for dtype in dtypes])


def test_values_of_many_dtypes_are_summed_by_operations_that_pack_values():
    """As NCCL's do, which GPUs have. TensorFlow packs the values of a batch into one tensor."""
    strategy = MirroredStrategy(names(4), tf.distribute.HierarchicalCopyAllReduce())
    result = strategy.run(tf.function(sums_of), args=(MIXED,))
    for replica in strategy.experimental_local_results(result):
        assert [(value.dtype, value.numpy().tolist()) for value in replica] == [(dtype, [6] * 3) for dtype in MIXED]


def test_on_gpus_nccl_sums_what_it_can_in_one_pack_for_each_dtype():
    """The graph alone: the op has no kernel for CPUs. What NCCL does not sum, such as bfloat16, one device adds."""
    strategy = MirroredStrategy(names(2), tf.distribute.NcclAllReduce())
    graph = tf.function(lambda: strategy.run(sums_of, args=(MIXED,))).get_concrete_function().graph
    summed = [op for op in graph.get_operations() if op.type == "NcclAllReduce"]
    packs = {(op.inputs[0].dtype, op.inputs[0].shape[0]) for op in summed}
    assert packs == {(tf.float32, 6), (tf.float16, 3), (tf.float64, 3), (tf.int64, 3)}
    assert len(summed) == 2 * len(packs)
    assert {op.inputs[0].dtype for op in graph.get_operations() if op.type == "AddN"} == {tf.int32, tf.float32}


# Devices.


def test_without_devices_all_are_used():
    strategy = MirroredStrategy()
    assert [name[-5:] for name in strategy.extended.worker_devices] == names(8)
    assert MirroredStrategy([]).num_replicas_in_sync == strategy.num_replicas_in_sync == 8


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(["CPU:1", "CPU:3"], id="short"),
        pytest.param(["/cpu:1", "/device:CPU:3"], id="slashes"),
        pytest.param(["/job:localhost/replica:0/task:0/device:CPU:1", "cpu:3"], id="full"),
        pytest.param([tf.config.LogicalDevice("/device:CPU:1", "CPU"), "CPU:3"], id="logical-device"),
    ],
)
def test_devices_are_named_in_every_way(given):
    strategy = MirroredStrategy(given)
    assert list(strategy.extended.worker_devices) == [f"/job:localhost/replica:0/task:0/device:CPU:{i}" for i in (1, 3)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(["CPU:0", "cpu:0"], "No duplicates allowed", id="twice"),
        pytest.param(["CPU:0", "/device:CPU:0"], "No duplicates allowed", id="in two ways"),
        pytest.param(["CPU:0", "CPU:99"], "No such device: CPU:99", id="missing"),
        pytest.param(["CPU:0", "GPU:0"], "mixes kinds", id="mixed"),
        pytest.param(["nonsense"], "Not a device", id="unreadable"),
        pytest.param([3], "Not a device", id="number"),
        pytest.param(3, "Not a device", id="no list"),
    ],
)
def test_bad_devices_are_refused(given, message):
    with pytest.raises(DeviceError, match=message):
        MirroredStrategy(given)


# Time limits.


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_replica_that_does_not_come_back_in_time_is_an_error(concurrent):
    strategy = MirroredStrategy(names(2), concurrent=concurrent, timeout=PATIENT)
    release = threading.Event()

    def fn():
        if index() == 1:
            while True:
                time_is_nearly_up()
                if release.wait(2 * LEFT):  # longer if the other replica, which ends, gives a sign of life meanwhile
                    break

    try:
        with pytest.raises(ReplicaTimeoutError) as caught:
            strategy.run(fn)
    finally:
        release.set()
    assert [row.replica for row in caught.value.rows] == [0, 1]
    assert strategy.experimental_local_results(strategy.run(index)) == (0, 1)


def test_a_run_that_is_in_time_is_left_alone():
    strategy = MirroredStrategy(names(2), timeout=20.0)
    assert strategy.experimental_local_results(strategy.run(index)) == (0, 1)
