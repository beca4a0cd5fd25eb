"""Gradients in one order on all replicas, variables that are created inside, and arguments that differ."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_mirrored import FORMS, index, locally, numbered, run, total

from replica_engine.errors import MergeCallGraphError, NotInReplicaError, StructureMismatchError


def numbers(structure):
    return np.asarray(structure, np.float64).tolist()


@pytest.mark.parametrize("wrapped", [True, False])
def test_gradients_of_many_operators_are_those_of_each(mirrored, wrapped):
    """A tape may visit independent operators in any order, and another one on each replica."""

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            losses = []
            for number in range(9):

                def branch(number=number):
                    z = x
                    for _ in range(number % 4):
                        z = z + 0.0
                    return total(z) * z * (number + 1.0)

                losses.append(tf.cond(total(x) > 0.0, branch, lambda: x) if wrapped else branch())
        return tape.gradient(losses, x, output_gradients=[tf.constant(k + 1.0) for k in range(9)])

    assert run(mirrored, body, numbered(mirrored)) == [1710.0, 1710.0]


def test_losses_that_are_added_in_another_order_on_each_replica(mirrored):
    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            first = tf.cond(total(x) > 0.0, lambda: total(x) * x, lambda: x) * 3.0
            second = tf.cond(total(x) > 0.0, lambda: total(x * x) * x, lambda: x) * 5.0
            loss = first + second if index() == 0 else second + first
        return tape.gradient(loss, x)

    assert run(mirrored, body, numbered(mirrored)) == [73.0, 103.0]


def test_an_optimizer_that_is_built_in_a_branch(mirrored):
    with mirrored.scope():
        weight = tf.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)

    def body(x):
        def update():
            optimizer.apply_gradients([(x, weight)])
            return weight + 0.0

        return tf.cond(tf.constant(2) > 1, update, lambda: weight + 0.0)

    np.testing.assert_allclose(run(mirrored, body, numbered(mirrored)), [0.7, 0.7], 1e-6)
    np.testing.assert_allclose(run(mirrored, body, numbered(mirrored)), [0.13, 0.13], 1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_variable_with_a_value_that_the_attempt_has_computed(mirrored, form):
    kept = {}

    @tf.function
    def inner(x):
        if "variable" not in kept:
            kept["variable"] = tf.Variable(x * 0.0 + 2.0)
        return total(x) * kept["variable"]

    for _ in range(2):
        assert run(mirrored, inner.__call__, numbered(mirrored), form=form) == [6.0, 6.0]


def test_loop_variables_and_limits_that_each_replica_reads_for_itself(mirrored):
    with mirrored.scope():
        own = tf.Variable(
            1.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=tf.VariableAggregation.SUM
        )

    def body(x):
        own.assign(x)
        return tf.while_loop(lambda value, i: i < 3, lambda value, i: (value + total(1.0), i + 1), [own, 0])[0]

    assert run(mirrored, body, numbered(mirrored)) == [7.0, 8.0]


def test_a_nested_function_returns_the_value_of_a_variable(mirrored):
    with mirrored.scope():
        variable = tf.Variable(1.0)

    @tf.function
    def inner(x):
        total(x)
        return variable

    def body(x):
        before = inner(x)
        variable.assign(5.0)
        return before + 0.0

    assert run(mirrored, body, numbered(mirrored)) == [1.0, 1.0]


def test_replicas_may_differ_where_an_earlier_trace_had_merge_calls(mirrored):
    """An operator that had merge calls in the last trace and has none now: the replicas may differ."""

    def body(x, training):
        condition = total(x) > 0.0 if training else x > 1.5
        return tf.cond(condition, lambda: total(x) if training else x * 5.0, lambda: x * 3.0)

    step = tf.function(lambda x, training: mirrored.run(body, args=(x, training)))
    for training, expected in ((True, [3.0, 3.0]), (False, [3.0, 10.0])):
        assert numbers(locally(mirrored, step(numbered(mirrored), training))) == expected


def test_numbers_of_branches_that_differ(mirrored):
    def body(x):
        branches = [lambda: total(x)] * 2 + [lambda: total(x) * 100.0] * index()
        return tf.switch_case(tf.constant(1), branches)

    with pytest.raises(StructureMismatchError, match=r"tf\.switch_case.*replica 0 has 2 branches, replica 1 has 3"):
        run(mirrored, body, numbered(mirrored))


def test_a_limit_that_one_replica_leaves_out(mirrored):
    def body(x):
        most = 2 if index() else None
        return tf.while_loop(lambda v: v < 9.0, lambda v: (v + total(1.0),), (x,), maximum_iterations=most)[0]

    with pytest.raises(StructureMismatchError, match="maximum_iterations"):
        run(mirrored, body, numbered(mirrored))


def test_a_function_that_swallowed_is_refused_each_time(mirrored):
    @tf.function
    def inner(x):
        try:
            return total(x)
        except:  # noqa: E722
            return x

    for _ in range(3):
        with pytest.raises(MergeCallGraphError, match="bare `except:`"):
            mirrored.run(lambda x: inner(x), args=(numbered(mirrored),))


def test_a_plain_variable_that_only_one_replica_reads(mirrored):
    plain = tf.Variable(2.0)

    functions = [tf.function(lambda x: total(x)), tf.function(lambda x: total(x * plain))]

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch([plain, x])
            y = functions[index()](x)
        slope, of_plain = tape.gradient(y, [x, plain])
        return slope, tf.constant(-1.0) if of_plain is None else of_plain

    assert run(mirrored, body, numbered(mirrored), form="eager") == [(2.0, -1.0), (4.0, 4.0)]


def test_a_tape_that_is_asked_after_the_run(mirrored):
    inner = tf.function(lambda x: total(x) * x)
    tapes = {}

    def body(x):
        with tf.GradientTape() as tapes[index()]:
            tapes[index()].watch(x)
            y = inner(x)
        return x, y

    x, y = mirrored.run(body, args=(numbered(mirrored),))
    with pytest.raises(NotInReplicaError, match=r"after strategy\.run had returned"):
        tapes[0].gradient(y.values[0], x.values[0])
