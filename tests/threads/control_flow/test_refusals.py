"""Where replicas still cannot meet: each place has an error with its own wording, and the next run works."""

import re

import pytest
import tensorflow as tf
from helpers.on_mirrored import locally, numbered, run, total

from replica_engine.errors import MergeCallGraphError


@pytest.fixture
def refused(mirrored, form):
    """`refused(body, text)`: the run raises a MergeCallGraphError with the text and a line; then it works."""

    def refused(body, text):
        with pytest.raises(MergeCallGraphError, match=re.escape(text)) as caught:
            run(mirrored, body, numbered(mirrored), form=form)
        assert re.search(r"by replica 0 of 2 \(CPU:0\),\s+at \S+/tests/\S+\.py:\d+ in ", str(caught.value))
        assert run(mirrored, lambda x: tf.cond(x > 0.0, lambda: total(x), lambda: x), numbered(mirrored)) == [3.0, 3.0]

    return refused


IN_XLA = "in a nested tf.function with jit_compile=True"
IN_DATA = "in a function of tf.data"
VECTORIZED = "that TensorFlow vectorizes"
ELSEWHERE = "while defining a new graph or a tf.function"


def _compiled(x):
    return tf.function(total, jit_compile=True)(x)


def _function_in_a_compiled_one(x):
    return tf.function(lambda x: tf.function(total)(x) + 1.0, jit_compile=True)(x)


def _mapped(x):
    dataset = tf.data.Dataset.range(2).map(lambda i: total(tf.cast(i, tf.float32)))
    return dataset.reduce(0.0, lambda a, b: a + b) + x


def _mapped_in_a_branch(x):
    dataset = tf.data.Dataset.range(2).map(lambda i: tf.cond(i > 0, lambda: total(1.0), lambda: 0.0))
    return dataset.reduce(0.0, lambda a, b: a + b) + x


def _vectorized(x):
    return tf.reduce_sum(tf.vectorized_map(lambda v: total(v) + x, tf.constant([1.0, 2.0])))


def _concrete(x):
    return tf.function(total).get_concrete_function(x)(x)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (_compiled, IN_XLA),
        (_function_in_a_compiled_one, IN_XLA),
        (_mapped, IN_DATA),
        (_mapped_in_a_branch, IN_DATA),
        (_vectorized, VECTORIZED),
        (_concrete, ELSEWHERE),
    ],
)
def test_where_replicas_cannot_meet(refused, body, text):
    refused(body, text)


def test_a_batch_jacobian(refused):
    def body(x):
        x = tf.reshape(x, [1, 1])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * total(x)
        return tf.reduce_sum(tape.batch_jacobian(y, x))

    refused(body, VECTORIZED)


def test_a_for_over_a_dataset(mirrored):
    def body(x):
        for i in tf.data.Dataset.range(2):
            x += total(tf.cast(i, tf.float32))
        return x

    with pytest.raises(MergeCallGraphError, match=r"in a function of tf\.data"):
        run(mirrored, body, numbered(mirrored))
    assert run(mirrored, body, numbered(mirrored), form="eager") == [3.0, 4.0]  # a loop of Python


def test_a_for_over_an_iterator_works(mirrored):
    iterator = iter(tf.data.Dataset.range(10))

    def body(x):
        for _ in tf.range(2):
            x += total(tf.cast(next(iterator), tf.float32))
        return x

    first, second = run(mirrored, body, numbered(mirrored))
    assert (first, second) == (7.0, 8.0)


@pytest.mark.parametrize("inside", ["nothing", "cond", "while"])
def test_a_jacobian_with_pfor(refused, inside):
    """It was wrong without a word: the merges of other replicas were those of the first element."""

    def body(x):
        x = tf.stack([x, 2.0 * x])
        with tf.GradientTape() as tape:
            tape.watch(x)
            if inside == "nothing":
                y = x * total(x)
            elif inside == "cond":
                y = tf.cond(total(1.0) > 0.0, lambda: x * total(x), lambda: x)
            else:
                y = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y * total(x)), (0, x))[1]
        return tf.reduce_sum(tape.jacobian(y, x))

    refused(body, VECTORIZED)


def test_a_jacobian_that_merges_nothing_works(mirrored, form):
    def body(x):
        x = tf.stack([x, 2.0 * x])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return total(tape.jacobian(y, x))

    assert run(mirrored, body, numbered(mirrored), form=form) == [[[6.0, 0.0], [0.0, 12.0]]] * 2


def test_a_concrete_function_that_makes_a_variable_in_a_branch(refused):
    """Its first trace is given up when the replicas enter the branch together, and the second one is a first one."""
    kept = []

    @tf.function
    def inner(x):
        if not kept:
            kept.append(tf.Variable(2.0))
        return total(x * kept[0])

    refused(lambda x: tf.cond(x > 0.0, lambda: inner.get_concrete_function(tf.TensorSpec([]))(x), lambda: x), ELSEWHERE)


def test_tf_gradients_of_an_operator_that_only_merges_in_its_gradient(mirrored):
    """No tape said that the gradient would be asked for, so that each replica had entered the operator alone."""

    @tf.custom_gradient
    def merging(x):
        return tf.identity(x), lambda upstream: total(upstream)

    with pytest.raises(MergeCallGraphError, match=r"or the gradient of a tf\.cond or tf\.while_loop that has no merge"):
        run(mirrored, lambda x: tf.gradients(tf.cond(x > 0.0, lambda: merging(x), lambda: x), x)[0], numbered(mirrored))
    assert run(mirrored, lambda x: total(x), numbered(mirrored)) == [3.0, 3.0]


@pytest.mark.parametrize("operator", ["cond", "while", "function"])
def test_the_gradient_of_a_variable_that_several_replicas_read(mirrored, operator):
    """Of one plain variable; without an operator, each replica has its own gradient."""
    weight = tf.Variable(3.0)

    def body(x):
        with tf.GradientTape() as tape:
            if operator == "cond":
                y = tf.cond(x > 0.0, lambda: total(weight * x), lambda: x)
            elif operator == "while":
                y = tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, y + total(weight * x)), (0, x))[1]
            else:
                y = tf.function(lambda: total(weight * x))()
        return tape.gradient(y, weight)

    with pytest.raises(MergeCallGraphError, match=r"several replicas\s+read this one variable") as caught:
        run(mirrored, body, numbered(mirrored), form="eager" if operator == "function" else "graph")
    assert "strategy.scope()" in str(caught.value)

    def plain(x):
        with tf.GradientTape() as tape:
            y = total(weight * x)
        return tape.gradient(y, weight)

    assert run(mirrored, plain, numbered(mirrored)) == [2.0, 4.0]


def test_a_plain_variable_may_be_read_without_a_gradient(mirrored):
    weight = tf.Variable(3.0)
    with mirrored.scope():
        own = tf.Variable(1.0)

    def body(x):
        with tf.GradientTape() as tape:
            y = tf.cond(x > 0.0, lambda: total(weight * own * x), lambda: x)
        return tape.gradient(y, own)

    assert locally(mirrored, tf.function(lambda x: mirrored.run(body, args=(x,)))(numbered(mirrored))) == [6.0, 12.0]
