"""An eager loop changes no weak set and no weak dictionary, step by step.

Python calls their callbacks when an object goes. If a signal comes then, its handler runs inside the callback, and
Python swallows what the handler raises: a program that shall end goes on.
"""

import _weakrefset
import sys
import weakref

import pytest
import tensorflow as tf

FILES = {weakref.__file__, _weakrefset.__file__}
CHANGES = {"__setitem__", "__delitem__", "add", "discard", "remove", "pop", "setdefault", "update", "_remove"}
CHANGES |= {"__init__", "_commit_removals"}  # of a finalizer or a new container; removals that were put off


def tensors(strategy):
    x = tf.ones([2])
    return lambda: strategy.run(lambda x: tf.reduce_sum(x), args=(x,))


def distributed(strategy):
    data = tf.data.Dataset.range(512).repeat().batch(8, drop_remainder=True)
    batches = iter(strategy.experimental_distribute_dataset(data))
    return lambda: strategy.run(lambda x: tf.reduce_sum(x), args=(next(batches),))


def plain(strategy):
    batches = iter(tf.data.Dataset.range(512).repeat().batch(8, drop_remainder=True))
    return lambda: strategy.run(lambda x: tf.reduce_sum(x["x"]), args=({"x": next(batches)},))


def variables(strategy):
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)

    def body():
        total.assign_add(1.0)
        return tf.distribute.get_replica_context().all_reduce("SUM", total * 2.0)

    def step():
        strategy.reduce("MEAN", strategy.run(body), axis=None)
        return total.numpy()

    return step


def in_a_tape(strategy):
    scale = tf.Variable(2.0)

    def step():
        with tf.GradientTape() as tape:
            loss = strategy.run(lambda x: x * x, args=(scale * 2.0,))
        del tape
        return loss

    return step


@pytest.mark.parametrize("loop", [tensors, distributed, plain, variables, in_a_tape])
def test_no_weak_container_changes_in_a_step(strategy, loop):
    step = loop(strategy)
    for _ in range(3):
        step()
    changed = []

    def look(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename in FILES and code.co_name in CHANGES:
            places = []
            while frame is not None and len(places) < 4:
                places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                frame = frame.f_back
            changed.append(" < ".join(places))

    before = sys.getprofile()
    sys.setprofile(look)  # of this thread: the main one, on which handlers of signals run
    try:
        for _ in range(3):
            step()
    finally:
        sys.setprofile(before)
    assert not changed
