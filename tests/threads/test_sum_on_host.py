"""All-reduces of small tensors on CPU devices: whichever way they go, they give what TensorFlow's own give."""

import functools
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from tensorflow.python.framework import op_callbacks

from replica_engine import MirroredStrategy
from replica_engine.threads.all_reduce import FEWEST, MOST_BYTES, CpuReduction
from replica_engine.upstream import distribute

SHAPES = (*((), (0,), (3,), (2, 5)) * (FEWEST // 4), (MOST_BYTES // 4,), (MOST_BYTES // 4 + 1,))
DTYPES = (tf.float32, tf.float64, tf.int32, tf.int64)  # TensorFlow rounds 16-bit floats after each addition
RANDOM = np.random.default_rng(0)


@pytest.fixture(params=[2, 3, 8])
def both(request):
    devices = DEVICES[: request.param]
    return MirroredStrategy(devices), tf.distribute.MirroredStrategy(devices, tf.distribute.ReductionToOneDevice())


def values(size, dtypes=DTYPES):
    """Of each replica tensors of all shapes and dtypes, in one list."""
    return [
        [tf.cast(RANDOM.normal(size=shape) * 100, dtype) for shape in SHAPES for dtype in dtypes] for _ in range(size)
    ]


def reduced(strategy, of_replicas, op, in_function):
    """The results, each as what the replicas got; one at a time by TensorFlow, which takes no int32 with others."""
    together = isinstance(strategy, MirroredStrategy)

    def fn():
        context = tf.distribute.get_replica_context()
        own = of_replicas[context._replica_id_in_sync_group]
        return context.all_reduce(op, own) if together else [context.all_reduce(op, each) for each in own]

    run = tf.function(lambda: strategy.run(fn)) if in_function else lambda: strategy.run(fn)
    return [strategy.experimental_local_results(each) for each in tf.nest.flatten(run())]


@pytest.mark.parametrize(("op", "dtypes"), [("SUM", DTYPES), ("MEAN", (tf.float32, tf.float64))])
def test_they_are_bitwise_those_of_tensorflow_in_eager_mode(both, op, dtypes):
    of_replicas = values(both[0].num_replicas_in_sync, dtypes)
    mine, peers = (reduced(strategy, of_replicas, op, in_function=False) for strategy in both)
    for one, other in zip(mine, peers, strict=True):
        assert [(each.dtype, each.shape, each.device) for each in one] == [
            (each.dtype, each.shape, each.device) for each in other
        ]
        assert [each.numpy().tobytes() for each in one] == [each.numpy().tobytes() for each in other]


@pytest.mark.parametrize("both", [2, 3], indirect=True)  # eight are traced one after the other
@pytest.mark.parametrize(("op", "dtypes"), [("SUM", DTYPES), ("MEAN", (tf.float32, tf.float64))])
def test_in_a_graph_they_are_those_of_eager_mode(both, op, dtypes):
    """But for the last bits, where TensorFlow makes a product of a quotient; its own differ in sums as well."""
    strategy, _ = both
    of_replicas = values(strategy.num_replicas_in_sync, dtypes)
    eager, graph = (reduced(strategy, of_replicas, op, in_function) for in_function in (False, True))
    for one, other in zip(eager, graph, strict=True):
        assert (other[0].dtype, other[0].shape) == (one[0].dtype, one[0].shape)
        last_bits = 4 * np.finfo(one[0].numpy().dtype).eps if one[0].dtype.is_floating else 0
        np.testing.assert_allclose(other[0], one[0], rtol=last_bits, atol=1000 * last_bits)  # of terms about 100
        assert all(each.numpy().tobytes() == other[0].numpy().tobytes() for each in other)


def test_a_result_is_not_the_memory_of_what_went_in(both):
    strategy, _ = both
    variables = [tf.Variable(float(replica)) for replica in range(strategy.num_replicas_in_sync)]

    def fn():
        context = tf.distribute.get_replica_context()
        own = variables[context._replica_id_in_sync_group]
        total = context.all_reduce("SUM", own.read_value())
        own.assign_add(1000.0)
        return total

    size = strategy.num_replicas_in_sync
    results = [float(each) for each in strategy.experimental_local_results(strategy.run(fn))]
    assert results == [size * (size - 1) / 2] * size


def test_a_watcher_of_ops_sees_the_addition(both):
    strategy, _ = both
    seen = []

    def callback(op_type, inputs, attrs, outputs, op_name=None, graph=None):
        seen.append(op_type)

    op_callbacks.add_op_callback(callback)
    try:
        strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones([3])))
    finally:
        op_callbacks.remove_op_callback(callback)
    assert b"AddN" in [tf.compat.as_bytes(each) for each in seen]


def test_replicas_find_nothing_of_the_run_before():
    """What threads stay in from one run in eager mode to the next is what each run asks for."""
    strategy = MirroredStrategy(DEVICES[:2])

    def state():
        with tf.name_scope("own"):
            name = tf.get_current_name_scope()
        return name, tf.constant(0).device, tf.executing_eagerly(), tf.compat.v1.get_variable_scope().reuse

    def entered_and_not_left():
        tf.device("CPU:5").__enter__()
        tf.name_scope("left_open").__enter__()

    before = tf.nest.map_structure(strategy.experimental_local_results, strategy.run(state))
    strategy.run(entered_and_not_left)
    with tf.name_scope("callers"):
        inside = tf.nest.map_structure(strategy.experimental_local_results, strategy.run(state))
    tf.function(lambda: strategy.run(lambda: tf.constant(0.0)))()
    after = tf.nest.map_structure(strategy.experimental_local_results, strategy.run(state))
    assert after == before
    assert before[0] == ("own", "replica_1/own")
    assert inside[0] == ("callers/own", "callers/replica_1/own")
    assert [each[-5:] for each in before[1]] == ["CPU:0", "CPU:1"]


def test_an_all_reduce_that_a_tape_watches_meets_one_that_none_does(both):
    """A replica whose share is empty has a constant for its loss."""
    strategy, _ = both
    weight = tf.constant(3.0)

    def fn():
        with tf.GradientTape() as tape:
            tape.watch(weight)
            first = tf.distribute.get_replica_context()._replica_id_in_sync_group == 0
            loss = weight * 2.0 if first else tf.constant(0.0)
        total = tf.distribute.get_replica_context().all_reduce("SUM", loss)
        return total, tape.gradient(loss, weight) if first else tf.constant(0.0)

    total, _ = strategy.run(fn)
    assert [float(each) for each in total.values] == [6.0] * strategy.num_replicas_in_sync


@pytest.mark.parametrize("operation", [tf.VariableAggregation.MEAN, tf.VariableAggregation.SUM, None])
def test_what_is_no_reduction_is_refused(both, operation):
    strategy, _ = both
    with pytest.raises(ValueError, match=r"cannot be reduced with .* one of MAX, MEAN, MIN, SUM"):
        strategy.run(lambda: tf.distribute.get_replica_context().all_reduce(operation, tf.constant(1.0)))


def test_a_sum_goes_to_the_devices_of_a_variable_of_another_strategy():
    two, three = MirroredStrategy(DEVICES[:2]), MirroredStrategy(DEVICES[:3])
    with two.scope():
        elsewhere = tf.Variable(0.0)
    with three.scope():
        larger = tf.Variable(0.0)

    def sums(strategy, destination):
        def fn():
            own = float(tf.distribute.get_replica_context()._replica_id_in_sync_group + 1)
            value = tf.constant([1.0, 2.0]) * own
            return tf.distribute.get_replica_context().merge_call(
                lambda strategy, value: tf.nest.map_structure(
                    lambda each: each.values[0],
                    strategy.extended.batch_reduce_to("SUM", [(value, destination)] * FEWEST),
                ),
                args=(value,),
            )

        return [
            each.numpy().tolist()
            for run in (strategy.run, tf.function(strategy.run))
            for result in run(fn)
            for each in strategy.experimental_local_results(result)[:1]
        ]

    assert sums(three, elsewhere) == [[6.0, 12.0]] * 2 * FEWEST
    assert sums(two, larger) == [[3.0, 6.0]] * 2 * FEWEST


def test_sums_of_many_replicas_are_bitwise_those_of_tensorflow():
    values = [tf.constant(RANDOM.normal(size=1000), tf.float32) for _ in range(26)]
    for size in (2, 7, 8, 9, 10, 16, 17, 26):
        value = distribute.PerReplica(tuple(values[:size]))
        mine = CpuReduction().reduce(tf.distribute.ReduceOp.SUM, value, value)
        assert mine.values[0].numpy().tobytes() == tf.add_n(values[:size]).numpy().tobytes()


@pytest.mark.parametrize("optimizer", ["light", "full"])
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("needed_later", [0, 2, 3])
def test_a_sum_in_a_function_has_the_order_of_the_replicas(optimizer, count, needed_later):
    """TensorFlow's `add_n` sorts by the names of ops, and begins with a value that nothing else needs any more.

    The first replica's op is "z", and comes after "replica_1/z"; so many replicas' values are needed after the sum. Nor
    does it multiply the sum by the factor that all values have.
    """
    strategy = MirroredStrategy(DEVICES[:count], graph_optimizer=optimizer)
    chance = np.random.default_rng(0)
    factors = chance.standard_normal((count, 1000), np.float32)
    x = tf.constant(chance.standard_normal(1000, np.float32))
    with strategy.scope():
        kept = tf.Variable(x, aggregation=tf.VariableAggregation.SUM)

    def fn(x):
        context = tf.distribute.get_replica_context()
        value = tf.multiply(x, factors[context._replica_id_in_sync_group], name="z")
        total = context.all_reduce("SUM", value)
        kept.assign(value)
        with tf.control_dependencies([total]):
            later = tf.cos(value) if context._replica_id_in_sync_group < needed_later else value
        return total, later, value

    @tf.function
    def step(x):
        totals, _, values = strategy.run(fn, (x,))
        return totals, strategy.reduce("SUM", values, axis=None)

    totals, reduced = step(x)
    expected = functools.reduce(np.add, factors * x.numpy())
    for each in (*strategy.experimental_local_results(totals), reduced, kept):
        assert each.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_sum_of_16_bits_keeps_its_dtype(count):
    """Also that of one replica."""
    strategy = MirroredStrategy(DEVICES[:count])
    own = distribute.PerReplica(tuple(tf.ones([2], tf.bfloat16) for _ in range(count)))

    def step(own):
        totals = strategy.run(lambda x: tf.distribute.get_replica_context().all_reduce("SUM", x), (own,))
        reduced = [strategy.reduce(how, own, axis=None) for how in ("SUM", "MEAN")]
        return *strategy.experimental_local_results(totals), *reduced

    found = [*step(own), *tf.function(step)(own)]
    assert {each.dtype for each in found} == {tf.bfloat16}
    assert [each.numpy().tolist() for each in found[count:][:2]] == [[count, count], [1, 1]]


def test_a_sum_in_a_function_broadcasts_nothing():
    """Shapes that are not known when the function is traced must be equal, as for TensorFlow's own sum."""
    strategy = MirroredStrategy(DEVICES[:3])
    step = tf.function(
        lambda x: strategy.run(lambda own: tf.distribute.get_replica_context().all_reduce("SUM", own), (x,)),
        reduce_retracing=True,
    )
    for sizes in ((2, 2, 2), (3, 3, 3)):
        step(distribute.PerReplica(tuple(tf.ones([size]) for size in sizes)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="same size and shape"):
        step(distribute.PerReplica(tuple(tf.ones([size]) for size in (4, 4, 1))))


def test_infinities_are_for_the_user_to_find(both):
    strategy, _ = both

    def fn():
        own = tf.distribute.get_replica_context()._replica_id_in_sync_group
        large = tf.constant([3e38, np.inf if own else -np.inf])
        return tf.distribute.get_replica_context().all_reduce("SUM", large)

    with np.errstate(all="raise"):
        result = strategy.experimental_local_results(strategy.run(fn))[0].numpy()
    assert np.isinf(result[0])
    assert np.isnan(result[1])


def test_denormal_numbers_are_zeros_as_in_ops(both):
    strategy, _ = both
    result = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.constant([-1e-41, 1.0])))
    first = strategy.experimental_local_results(result)[0].numpy()
    assert first.tolist() == [0.0, strategy.num_replicas_in_sync]


def test_with_one_replica_a_tape_tells_a_sum_from_what_was_added_up():
    strategy = MirroredStrategy(DEVICES[:1])

    def fn():
        x = tf.constant(3.0)
        with tf.GradientTape() as tape:
            y = tf.distribute.get_replica_context().all_reduce("SUM", x)
            tape.watch(y)
            z = x * y
        return tape.gradient(z, y)

    assert float(strategy.run(fn)) == 3.0


def test_partitioners_are_dropped_in_eager_mode(mirrored):
    def fn():
        partitioner = tf.compat.v1.fixed_size_partitioner(2)
        return isinstance(tf.compat.v1.get_variable("p", [4], partitioner=partitioner), tf.Variable)

    assert mirrored.run(fn) is True


def test_a_device_policy_that_a_body_sets_is_not_that_of_the_next_run(mirrored):
    mirrored.run(lambda: tf.config.experimental.set_device_policy("explicit"))
    policies = mirrored.run(tf.config.experimental.get_device_policy)
    assert set(mirrored.experimental_local_results(policies)) <= {"silent", ("silent", "silent")}


def test_parked_threads_keep_no_graph(mirrored):
    mirrored.run(lambda: None)
    graph = weakref.ref(tf.compat.v1.get_default_graph())
    tf.compat.v1.reset_default_graph()
    gc.collect()
    assert graph() is None


def test_what_is_reduced_in_a_graph_takes_few_ops(mirrored):
    """Tracing and optimizing a step takes time for each op; once it was 20 s of ResNet-50's 38 on four replicas."""
    vectors = 100

    def traced(reduces):
        def fn():
            own = [tf.ones([index + 1]) for index in range(vectors)]
            return tf.distribute.get_replica_context().all_reduce("SUM", own) if reduces else own

        step = tf.function(lambda: mirrored.run(fn))
        return len(step.get_concrete_function().graph.get_operations())

    assert traced(reduces=True) - traced(reduces=False) < vectors
