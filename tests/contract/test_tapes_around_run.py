"""Which gradients of a tape around `run` are warned of: those with respect to what the replicas have used."""

import logging

import keras
import pytest
import tensorflow as tf

pytestmark = pytest.mark.graphs


@pytest.fixture
def warnings():
    """The warnings that the library has logged; a test fails that has some at its end, unless it has cleared them."""
    seen: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("replica_engine")
    logger.addHandler(handler)
    yield seen
    logger.removeHandler(handler)
    assert seen == []


@pytest.fixture
def told(warnings):
    """`told()`: whether a warning of a tape has come since this was asked last."""

    def told():
        taken, warnings[:] = list(warnings), []
        assert all(text.startswith("A gradient tape is around strategy.run at ") for text in taken)
        assert len(taken) <= 1
        return bool(taken)

    return told


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
    """`rows(fn, *args)`: the rows that the replicas return."""
    return lambda fn, *args: tf.concat(strategy.experimental_local_results(strategy.run(fn, args)), 0)


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_of_a_head_over_an_encoder_in_the_replicas(strategy, warnings, called, rows, encoder, head, frozen):
    encoder.trainable = not frozen

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(lambda: encoder(tf.ones([4, 3]))) @ head)
        return tape.gradient(loss, [head])

    (gradient,) = called(step)
    expected = 4 * strategy.num_replicas_in_sync * tf.reduce_sum(encoder.kernel.value, 0)
    assert gradient.numpy()[:, 0] == pytest.approx(expected.numpy())


@pytest.mark.parametrize(
    "sources",
    [
        lambda encoder, head: encoder.kernel,
        lambda encoder, head: [head, encoder.kernel.value],
        lambda encoder, head: {"head": head, "encoder": encoder.trainable_variables},
        lambda encoder, head: (head, [{"of": (encoder.bias,)}]),
    ],
)
def test_gradients_of_what_the_replicas_read(told, called, rows, encoder, head, sources):
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(lambda: encoder(tf.ones([4, 3]))) @ head)
        tape.gradient(loss, sources(encoder, head))
        return loss

    called(step)
    assert told()


def test_a_plain_variable_that_the_replicas_read(told, called, rows, head):
    weight = tf.Variable(2.0)

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(lambda: tf.ones([1, 2]) * weight) @ head)
        assert tape.gradient(loss, weight) is None
        return loss

    called(step)
    assert told()


def test_a_variable_that_a_function_in_the_replicas_reads(told, called, rows, encoder, head):
    def step(sources):
        compute = tf.function(lambda: encoder(tf.ones([4, 3])))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(lambda: compute() * 1.0) @ head)
        tape.gradient(loss, sources)
        return loss

    called(lambda: step([head]))
    assert not told()
    called(lambda: step([head, encoder.kernel]))
    assert told()


def test_a_persistent_tape_is_asked_again(told, called, rows, encoder, head):
    expected = []

    def step(sources):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(rows(lambda: encoder(tf.ones([4, 3]))) @ head)
        tape.gradient(loss, head)
        tape.jacobian(loss, head)
        expected.append(told())
        tape.gradient(loss, sources)
        expected.append(told())
        return loss

    called(lambda: step(head))
    called(lambda: step(encoder.bias))
    assert expected == [False, False, False, True]


def test_a_jacobian(told, called, rows, encoder, head):
    def step():
        with tf.GradientTape(persistent=True) as tape:
            loss = rows(lambda: encoder(tf.ones([1, 3]))) @ head
        tape.jacobian(loss, [head, encoder.kernel], experimental_use_pfor=False)
        return loss

    called(step)
    assert told()


def test_the_gradient_of_a_gradient(warnings, called, rows, encoder, head):
    """The outer tape is asked for the head, while a gradient that was computed inside it is known."""

    def step():
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(tf.square(rows(lambda: encoder(tf.ones([4, 3]))) @ head))
            slope = tf.reduce_sum(inner.gradient(loss, head))
        return outer.gradient(slope, head)

    assert called(step) is not None


def test_a_tape_that_watches_something_else_than_the_asked(told, called, rows, head):
    """An argument depends on a variable that is not asked for."""
    embedding = tf.Variable(tf.ones([2, 2]))

    def step(watched):
        with tf.GradientTape() as tape:
            x = tf.matmul(tf.ones([1, 2]), embedding)
            loss = tf.reduce_sum(rows(tf.square, x) @ head)
        tape.gradient(loss, [head, x] if watched else [head])
        return loss

    called(lambda: step(False))
    assert not told()
    called(lambda: step(True))
    assert told()


def test_a_part_of_a_distributed_argument(strategy, told, called, head):
    parts = strategy.experimental_distribute_values_from_function(lambda context: tf.ones([1, 2]))

    def step():
        own = strategy.experimental_local_results(parts)
        with tf.GradientTape() as tape:
            tape.watch(own)
            results = strategy.experimental_local_results(strategy.run(tf.square, args=(parts,)))
            loss = tf.reduce_sum(tf.concat(results, 0) @ head)
        assert tape.gradient(loss, {"x": list(own)}) == {"x": [None] * len(own)}
        return loss

    called(step)
    assert told()


def test_a_run_that_takes_the_results_of_another(strategy, told, called, encoder, head):
    """As in an adversarial training, whose second network is not asked for."""
    with strategy.scope():
        second = tf.Variable(tf.ones([2, 2]))

    def step(sources):
        with tf.GradientTape() as tape:
            hidden = strategy.run(lambda: encoder(tf.ones([4, 3])))
            results = strategy.run(lambda x: x @ second, args=(hidden,))
            loss = tf.reduce_sum(tf.concat(strategy.experimental_local_results(results), 0) @ head)
        tape.gradient(loss, sources)
        return loss

    called(lambda: step([head]))
    assert not told()
    called(lambda: step([encoder.kernel]))
    assert told()


def test_two_tapes(told, called, rows, encoder, head):
    def step(sources):
        with tf.GradientTape() as one, tf.GradientTape() as other:
            loss = tf.reduce_sum(rows(lambda: encoder(tf.ones([4, 3]))) @ head)
        one.gradient(loss, head)
        other.gradient(loss, sources)
        return loss

    called(lambda: step(head))
    assert not told()
    called(lambda: step(encoder.kernel))
    assert told()


def test_a_forward_accumulator_next_to_a_tape(warnings, called, rows, encoder, head):
    def step():
        with tf.autodiff.ForwardAccumulator(head, tf.ones([2, 1])) as accumulator, tf.GradientTape() as tape:
            loss = tf.reduce_sum(rows(lambda: encoder(tf.ones([4, 3]))) @ head)
        return tape.gradient(loss, head), accumulator.jvp(loss)

    gradient, product = called(step)
    assert float(product) == pytest.approx(float(tf.reduce_sum(gradient)))


def test_a_long_chain_of_runs(strategy, warnings, called, head):
    """What runs used is looked at once for each, and not once for each path to it."""
    with strategy.scope():
        weight = tf.Variable(tf.ones([2]))

    def step():
        with tf.GradientTape() as tape:
            state = strategy.run(lambda: tf.ones([1, 2]) * weight)
            for _ in range(40):
                state = strategy.run(lambda x: x * weight, args=(state,))
            loss = tf.reduce_sum(tf.concat(strategy.experimental_local_results(state), 0) @ head)
        return tape.gradient(loss, head)

    assert called(step).shape == [2, 1]
