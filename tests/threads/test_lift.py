"""A tf.function goes around the run: traced once, kept, let go of."""

import copy
import gc
import weakref

import pytest
import tensorflow as tf

import replica_engine


@pytest.fixture
def mirrored():
    return replica_engine.MirroredStrategy(["CPU:0", "CPU:1"])


def test_one_trace_a_signature_and_replica(mirrored):
    traces = []

    @tf.function
    def fn(x):
        traces.append(x.shape)
        return x + 1.0

    for _ in range(3):
        mirrored.run(fn, args=(tf.constant(1.0),))
    assert len(traces) == 2  # once for each of two replicas, in one graph
    mirrored.run(fn, args=(tf.constant([1.0]),))
    assert len(traces) == 4


def test_each_strategy_has_its_own(mirrored):
    other = replica_engine.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    fn = tf.function(lambda: tf.distribute.get_strategy().num_replicas_in_sync)
    assert int(mirrored.experimental_local_results(mirrored.run(fn))[0]) == 2
    assert int(other.experimental_local_results(other.run(fn))[0]) == 3


def test_options_are_kept(mirrored):
    @tf.function(autograph=False, reduce_retracing=True)
    def fn(x):
        seen.append(x.shape.rank and x.shape[0])
        return x

    seen = []
    for size in (1, 2, 3):
        mirrored.run(fn, args=(tf.zeros([size]),))
    assert seen[-1] is None  # relaxed to an unknown size


def test_methods_are_lifted_too(mirrored):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.scale = tf.Variable(3.0)

        @tf.function
        def call(self, x):
            return self.scale * x

    with mirrored.scope():
        model = Model()
    assert float(mirrored.experimental_local_results(mirrored.run(model.call, args=(2.0,)))[1]) == 6.0


def test_the_strategy_is_not_kept_by_the_function(mirrored):
    fn = tf.function(lambda: 1)
    strategy = replica_engine.MirroredStrategy(["CPU:0"])
    strategy.run(fn)
    gone = weakref.ref(strategy)
    del strategy
    gc.collect()
    assert gone() is None


def test_the_function_is_not_kept_by_the_strategy(mirrored):
    fn = tf.function(lambda: 1)
    mirrored.run(fn)
    gone = weakref.ref(fn)
    del fn
    gc.collect()
    assert gone() is None


def plain(x):
    return x + 1.0


def test_a_lifted_function_can_still_be_copied(mirrored):
    fn = tf.function(plain)
    mirrored.run(fn, args=(1.0,))
    again = copy.deepcopy(fn)
    assert float(mirrored.experimental_local_results(mirrored.run(again, args=(1.0,)))[0]) == 2.0


def test_autograph_converts_the_function_in_every_form(mirrored):
    def fn(x):
        total = tf.constant(0.0)
        for i in tf.range(3):
            if x > 0.0:
                total += tf.cast(i, tf.float32)
        return total

    @tf.function
    def around(x):
        return mirrored.run(fn, args=(x,))

    @tf.function
    def by_the_engine(x):
        return replica_engine.call_for_each_replica(mirrored, fn, args=(x,))

    for value in (mirrored.run(tf.function(fn), args=(tf.constant(1.0),)), around(tf.constant(1.0))):
        assert float(mirrored.experimental_local_results(value)[1]) == 3.0
    assert float(mirrored.experimental_local_results(by_the_engine(tf.constant(1.0)))[1]) == 3.0
