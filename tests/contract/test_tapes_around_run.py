"""Tapes around `run`: their gradients of what is computed of its results, and of a function with a run in it."""

import keras
import pytest
import tensorflow as tf

pytestmark = pytest.mark.graphs


@pytest.fixture(params=["eager", "in-function"])
def called(request):
    """`called(fn)`: calls a function, in eager mode or as a `tf.function`."""
    return lambda fn: (fn if request.param == "eager" else tf.function(fn))()


@pytest.fixture
def encoder(strategy):
    with strategy.scope():
        encoder = keras.layers.Dense(2, kernel_initializer="ones")
        encoder.build((None, 3))
    return encoder


@pytest.fixture
def head():
    return tf.Variable(tf.ones([2, 1]))


@pytest.fixture
def rows(strategy):
    """`rows(fn)`: the rows that the replicas return."""
    return lambda fn: tf.concat(strategy.experimental_local_results(strategy.run(fn)), 0)


def test_gradients_of_a_head_over_an_encoder_in_the_replicas(strategy, called, rows, encoder, head):
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(lambda: encoder(tf.ones([4, 3]))) @ head)
        return tape.gradient(loss, [head, encoder.kernel])

    gradient, of_encoder = called(step)
    expected = 4 * strategy.num_replicas_in_sync * tf.reduce_sum(encoder.kernel.value, 0)
    assert gradient.numpy()[:, 0] == pytest.approx(expected.numpy())
    assert of_encoder is None  # no tape sees into the replicas


def test_a_forward_accumulator_next_to_a_tape(called, rows, encoder, head):
    def step():
        with tf.autodiff.ForwardAccumulator(head, tf.ones([2, 1])) as accumulator, tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(lambda: encoder(tf.ones([4, 3]))) @ head)
        return tape.gradient(loss, head), accumulator.jvp(loss)

    gradient, product = called(step)
    assert float(product) == pytest.approx(float(tf.reduce_sum(gradient)))


@pytest.mark.threads("a compiled run has no gradient outside of it")
def test_gradients_of_the_whole_graph_are_right(strategy):
    """A tape around a function with a run, and `tf.gradients`, see all ops of a graph."""
    with strategy.scope():
        weight = tf.Variable(3.0)

    loss = tf.function(lambda x: strategy.reduce("SUM", strategy.run(lambda x: x * weight, args=(x,)), axis=None))
    x, expected = tf.constant(2.0), 3.0 * strategy.num_replicas_in_sync
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = loss(x)
    assert float(tape.gradient(y, x)) == expected

    @tf.function
    def outer(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loss(x)
        return tape.gradient(y, x), tf.gradients(loss(x), x)[0]

    assert [float(each) for each in outer(x)] == [expected, expected]
