"""A tf.function goes around the run: copied, let go of, called by the engine; more in contract/test_tf_function.py."""

import copy
import gc
import weakref

import tensorflow as tf

import replica_engine


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


def test_a_lifted_function_can_still_be_copied(mirrored):
    fn = tf.function(lambda x: x + 1.0)
    mirrored.run(fn, args=(1.0,))
    again = copy.deepcopy(fn)
    assert float(mirrored.experimental_local_results(mirrored.run(again, args=(1.0,)))[0]) == 2.0


def test_autograph_converts_a_function_that_the_engine_calls(mirrored):
    def fn(x):
        total = tf.constant(0.0)
        for i in tf.range(3):
            if x > 0.0:
                total += tf.cast(i, tf.float32)
        return total

    step = tf.function(lambda x: replica_engine.call_for_each_replica(mirrored, fn, args=(x,)))
    assert float(mirrored.experimental_local_results(step(tf.constant(1.0)))[1]) == 3.0
