"""Operators of control flow by names of a program, in functions that were traced, with merge calls in them."""

import pytest
import tensorflow as tf
from tensorflow import (
    GradientTape,
    cond,
    custom_gradient,
    foldl,
    function,
    gradients,
    map_fn,
    scan,
    switch_case,
    vectorized_map,
    while_loop,
)

from helpers.made_before import BOTH, MIRRORED, made_before
from helpers.on_mirrored import numbered, run

context = tf.distribute.get_replica_context
YES, TWO, ONE = tf.constant(True), tf.constant(2), tf.constant(1.0)


def total(x):
    return context().all_reduce("SUM", x)


def checks(step, alone, of_each, *args, form="graph"):
    """Calls a step alone with 1, and later on two replicas with 1 and 2."""
    assert step(ONE, *args).numpy().tolist() == alone

    def use(strategy):
        found = run(strategy, lambda x: step(x, *args), numbered(strategy), form=form)
        assert found == of_each, found

    return use


@made_before(*BOTH)
def a_condition():
    return checks(function(lambda x, yes: cond(yes, lambda: total(x), lambda: x)), 1.0, [3.0, 3.0], YES)


@made_before(*BOTH)
def a_condition_of_tensorflow_1():
    step = function(lambda x, yes: tf.compat.v1.cond(yes, lambda: total(x), lambda: x))
    return checks(step, 1.0, [3.0, 3.0], YES)


@made_before(*BOTH)
def a_choice_of_branches():
    branches = function(lambda x, index: switch_case(index, [lambda: x, lambda: x, lambda: total(x) - x]))
    return checks(branches, 0.0, [2.0, 1.0], TWO)


@made_before(*BOTH)
def a_loop():
    step = function(lambda x, n: while_loop(lambda i, _: i < n, lambda i, x: (i + 1, total(x)), (0, x))[1])
    return checks(step, 1.0, [6.0, 6.0], TWO)


@made_before(*BOTH)
def maps_and_folds():
    @function
    def step(x, steps):
        mapped = map_fn(lambda each: total(x) * each, steps)  # [3, 6]
        folded = foldl(lambda so_far, each: total(so_far) + each, steps, initializer=x)  # 2 * (3 + 1) + 2 = 10
        last = scan(lambda so_far, each: total(so_far) - each, steps, initializer=x)[-1]  # 2 * (3 - 1) - 2 = 2
        return tf.reduce_sum(mapped) + folded + last

    return checks(step, 5.0, [21.0, 21.0], tf.constant([1.0, 2.0]))


@made_before(*BOTH)
def python_that_autograph_has_converted():
    @function
    def step(x, count):
        if count > 1:
            x = total(x)
        for index in tf.range(count):
            last = total(x) + tf.cast(index, tf.float32)  # undefined before the loop
            x = last
        return x

    return checks(step, 2.0, [13.0, 13.0], TWO)


@made_before(*BOTH)
def a_while_of_python_whose_condition_merges():
    @function
    def step(x):
        while total(x) < 10.0:
            x += 1.0
        return x

    return checks(step, 10.0, [5.0, 6.0])


@made_before(*BOTH)
def a_gradient_of_its_own():
    @custom_gradient
    def doubled(x):
        return 2.0 * x, lambda upstream: 2.0 * total(upstream)

    @function
    def step(x, yes):
        with GradientTape() as tape:
            tape.watch(x)
            y = cond(yes, lambda: doubled(x), lambda: x)
        return tape.gradient(y, x)

    return checks(step, 2.0, [4.0, 4.0], YES)


@made_before(*BOTH)
def a_tape_over_a_condition():
    @function
    def step(x, yes):
        with GradientTape() as tape:
            tape.watch(x)
            y = cond(yes, lambda: total(x) * x, lambda: x)
        return tape.gradient(y, x)

    return checks(step, 2.0, [6.0, 6.0], YES)


@made_before(*BOTH)
def gradients_over_a_loop():
    @function
    def step(x, n):
        y = while_loop(lambda i, _: i < n, lambda i, y: (i + 1, total(y)), (0, x))[1]
        return gradients(y, x)[0]

    return checks(step, 1.0, [4.0, 4.0], TWO)


@made_before(MIRRORED)
def a_vectorized_map_which_cannot_merge():
    step = function(lambda x: tf.reduce_sum(vectorized_map(lambda each: total(x) * each, tf.constant([1.0, 2.0]))))
    assert step(ONE) == 3.0

    def use(strategy):
        from replica_engine.errors import MergeCallGraphError

        with pytest.raises(MergeCallGraphError, match="that TensorFlow vectorizes"):
            run(strategy, lambda x: step(x), numbered(strategy))

    return use
