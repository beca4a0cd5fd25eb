"""A training loop of one's own computes what one device computes on the whole batch.

Tolerance: N replicas add up a batch's gradients in N parts, so a sum of B terms may differ by B units in the last
place, B * 6e-8 of the largest term in float32. With batches of 8 and ten steps of a well-conditioned problem that
stays below 1e-5; where all numbers are small integers every sum is exact, and the results are equal bit by bit.
"""

import numpy as np
import pytest
import tensorflow as tf

STEPS, BATCH = 10, 8
RNG = np.random.default_rng(7)
INPUTS = RNG.normal(size=(STEPS, BATCH, 3)).astype("float32")
TARGETS = RNG.normal(size=(STEPS, BATCH, 2)).astype("float32")
START = [RNG.normal(size=shape).astype("float32") for shape in ((3, 4), (4,), (4, 2), (2,))]


def loss_of(weights, x, y):
    """The part of the global batch's mean loss that these examples make up."""
    hidden = tf.tanh(x @ weights[0] + weights[1])
    return tf.reduce_sum((hidden @ weights[2] + weights[3] - y) ** 2) / BATCH


def gradients_of(weights, x, y):
    with tf.GradientTape() as tape:
        loss = loss_of(weights, x, y)
    return loss, tape.gradient(loss, weights)


@pytest.fixture(scope="module")
def alone():
    """Losses and weights after all steps, with plain tensors on one device."""
    weights, losses = [tf.Variable(value) for value in START], []
    for x, y in zip(INPUTS, TARGETS, strict=True):
        loss, gradients = gradients_of(weights, tf.constant(x), tf.constant(y))
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.assign_sub(0.1 * gradient)
        losses.append(float(loss))
    return losses, [weight.numpy() for weight in weights]


def all_reduced(weights, gradients):
    gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.1 * gradient)


def aggregated(weights, gradients):
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.assign_sub(0.1 * gradient)


def merged(weights, gradients):
    def merge_fn(strategy, gradients):
        totals = strategy.extended.batch_reduce_to("SUM", list(zip(gradients, weights, strict=True)))
        for weight, total in zip(weights, totals, strict=True):
            strategy.extended.update(weight, lambda component, x: component.assign_sub(0.1 * x), args=(total,))

    tf.distribute.get_replica_context().merge_call(merge_fn, args=(gradients,))


WAYS = [
    pytest.param(all_reduced, tf.VariableAggregation.MEAN, id="all-reduce"),
    pytest.param(aggregated, tf.VariableAggregation.SUM, id="aggregation"),
    pytest.param(merged, tf.VariableAggregation.NONE, id="merge-call"),
]


@pytest.mark.replicas(2)
@pytest.mark.parametrize("where", ["eager", "in-function"])
@pytest.mark.parametrize(("apply", "aggregation"), WAYS)
def test_ten_steps_equal_one_device_on_the_whole_batch(strategy, n, alone, apply, aggregation, where):
    with strategy.scope():
        weights = [tf.Variable(value, aggregation=aggregation) for value in START]

    def replica_step(x, y):
        loss, gradients = gradients_of(weights, x, y)
        apply(weights, gradients)
        return loss

    def step(x, y):
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)), axis=None)

    if where == "in-function":
        step = tf.function(step)
    size = BATCH // n

    def split(batch):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(batch[context.replica_id_in_sync_group * size :][:size])
        )

    losses = [float(step(split(x), split(y))) for x, y in zip(INPUTS, TARGETS, strict=True)]

    expected_losses, expected_weights = alone
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for weight, expected in zip(weights, expected_weights, strict=True):
        first, *others = [one.numpy() for one in strategy.experimental_local_results(weight)]
        np.testing.assert_allclose(first, expected, rtol=1e-5, atol=1e-6)
        assert all(first.tobytes() == other.tobytes() for other in others)


def test_exact_sums_give_exactly_the_same_weights(strategy, n, run, per_replica):
    """A linear model on small integers: no rounding anywhere, so no tolerance either."""
    x = np.arange(24, dtype="float32").reshape(8, 3) % 5
    y = np.arange(8, dtype="float32") % 3
    size = 8 // n
    with strategy.scope():
        weights = tf.Variable([1.0, 2.0, -1.0], aggregation=tf.VariableAggregation.SUM)

    def fn(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.linalg.matvec(x, weights) - y) ** 2)
        weights.assign_sub(0.25 * tape.gradient(loss, weights))

    run(fn, args=(per_replica(lambda i: x[i * size :][:size]), per_replica(lambda i: y[i * size :][:size])))
    start = np.array([1.0, 2.0, -1.0], "float32")
    expected = start - 0.25 * 2 * x.T @ (x @ start - y)
    for component in strategy.experimental_local_results(weights):
        np.testing.assert_array_equal(component.numpy(), expected)


def test_the_order_of_a_sum_is_the_same_every_time(strategy, local, per_replica):
    """Numbers whose sum depends on the order of adding."""
    value = per_replica(lambda i: [1e8, -1e8, 1.0, 3.0][i])

    def fn(x):
        return tf.distribute.get_replica_context().all_reduce("sum", x)

    sums = {tuple(local(strategy.run(fn, args=(value,)))) for _ in range(10)}
    assert len(sums) == 1
    assert len(set(next(iter(sums)))) == 1
