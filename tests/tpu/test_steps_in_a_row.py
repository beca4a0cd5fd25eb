"""Many steps in one launch come to what the same steps come to one at a time."""

import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.loop_steps import FIRST, SUM, make_total, numbers, replica_context

from replica_engine import xla
from replica_engine.errors import VariableCreationError

MEAN = tf.VariableAggregation.MEAN


class Training:
    """A training loop with its own optimizer, counters of all kinds and collectives."""

    def __init__(self, replicas):
        self.weight = replicas.variable([[0.1], [-0.2], [0.3]])
        self.velocity = replicas.variable(tf.zeros([3, 1]))
        self.seen = replicas.variable(0, SUM)
        self.largest = replicas.variable(0.0, FIRST)
        self.loss = replicas.variable(0.0, SUM, on_read=True)
        self.average = replicas.variable(0.0, MEAN, on_read=True)
        self.gathered = replicas.variable(tf.zeros([replicas.size, 3]))
        self.state = {}

    def step(self, features, labels):
        if not self.state:
            self.state["steps"] = tf.Variable(0, aggregation=FIRST)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(features @ self.weight) - labels) ** 2)
        gradient = replica_context().all_reduce("MEAN", tape.gradient(loss, self.weight))
        self.velocity.assign(0.9 * self.velocity + gradient)
        self.weight.assign_sub(0.1 * self.velocity)
        self.seen.assign_add(tf.shape(features)[0])
        self.largest.assign(tf.maximum(self.largest, replica_context().all_reduce("MAX", loss)))
        self.loss.assign_add(loss)
        self.average.assign(0.5 * self.average + 0.5 * loss)
        self.gathered.assign(replica_context().all_gather(features[:1], axis=0))
        self.state["steps"].assign_add(1)

    def variables(self, replicas):
        """Their values on each replica."""
        every = [*vars(self).values(), *self.state.values()]
        return {v.name: replicas.components(v) for v in every if isinstance(v, tf.Variable)}


def shares(replicas, steps):
    """An iterator with a share of each batch for each replica."""
    random = np.random.default_rng(0)
    x = random.normal(size=(steps * 4 * replicas.size, 3)).astype("float32")
    y = random.normal(size=(steps * 4 * replicas.size, 1)).astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4 * replicas.size, drop_remainder=True)
    return iter(replicas.strategy.experimental_distribute_dataset(dataset))


def test_a_training_loop_comes_to_the_same_numbers_as_step_by_step(replicas, launched):
    one_by_one, looped = replicas(2), replicas(2)
    expected, found = Training(one_by_one), Training(looped)
    for batch in shares(one_by_one, 7):
        one_by_one.strategy.run(expected.step, args=batch)
    assert launched() == 7

    batches = shares(looped, 7)
    for iterations in (4, 3):
        looped.strategy.run_steps(lambda context, *batch: found.step(*batch), batches, iterations)
    assert launched() == 9
    wanted, values = expected.variables(one_by_one), found.variables(looped)
    assert len(values) == len(wanted)
    for one, other in zip(values.values(), wanted.values(), strict=True):
        # XLA may fuse a loop's body in another way: a few units in the last place (6e-8) a step.
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_a_keras_optimizer_that_is_built_in_the_first_step_trains_as_step_by_step(two, replicas):
    def build(some):
        keras.utils.set_random_seed(1)
        with some.strategy.scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

        def train(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2) / some.size
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return model, optimizer, train

    model, optimizer, train = build(two)
    for batch in shares(two, 3):
        loss = two.strategy.run(train, args=batch)

    other = replicas(2)
    looped_model, looped_optimizer, looped_train = build(other)

    def step(context, x, y):
        context.set_last_step_output("loss", looped_train(x, y))

    context = other.strategy.run_steps(step, shares(other, 3), 3)
    np.testing.assert_allclose(other.each(context.last_step_outputs["loss"]), two.each(loss), rtol=1e-5)
    assert int(looped_optimizer.iterations.numpy()) == int(optimizer.iterations.numpy()) == 3
    for one, expected in zip(looped_optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), expected.numpy(), rtol=1e-5, atol=1e-7)
    for one, expected in zip(looped_model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-7)


def test_random_ops_draw_what_they_draw_step_by_step(two):
    """To the bit; and steps of both kinds take turns in one stream."""
    draws = two.variable(tf.zeros([6, 12]), on_read=True, aggregation=SUM)
    count = two.variable(0, FIRST)

    def draw():
        drawn = [tf.random.uniform([4]), tf.nn.dropout(tf.ones([4]), 0.5)]
        drawn.append(tf.cast(tf.random.uniform([4], 0, 1000, tf.int32), tf.float32))
        draws.assign(tf.tensor_scatter_nd_update(draws, [[count]], [tf.concat(drawn, 0)]))
        count.assign_add(1)

    def drawn():
        count.assign(0)
        return [one.copy() for one in two.components(draws)]

    tf.random.set_seed(3)
    for _ in range(6):
        two.strategy.run(draw)
    expected = drawn()

    def loop(iterations):
        two.strategy.run_steps(lambda context: draw(), itertools.repeat(()), iterations)

    tf.random.set_seed(3)
    loop(6)
    assert drawn() == expected
    tf.random.set_seed(3)
    loop(2)
    two.strategy.run(draw)
    loop(3)
    assert drawn() == expected
    rows = [tuple(row) for one in expected for row in one]
    assert len(set(rows)) == 12


def test_variables_that_the_first_step_creates_are_there_in_the_next_ones(two):
    made = types.SimpleNamespace(mirrored=None)

    def step(context, x):
        if made.mirrored is None:
            made.mirrored = tf.Variable(tf.ones([2]))
            made.own = tf.Variable(0.0, synchronization=tf.VariableSynchronization.ON_READ, aggregation=SUM)
        made.mirrored.assign_add(x + made.mirrored)
        made.own.assign_add(tf.cast(replica_context().replica_id_in_sync_group, tf.float32))

    before = xla.counts()
    two.strategy.run_steps(step, [tf.ones([2])] * 3, 3)
    two.strategy.run_steps(step, [tf.ones([2])] * 2, 2)
    assert (xla.counts() - before).compiles == 1
    assert made.mirrored.numpy().tolist() == [63.0, 63.0]  # 2 * (1 + x) - 1 each time
    assert two.components(made.own) == [0.0, 5.0]


def test_a_step_that_creates_variables_each_time_is_refused(two):
    with pytest.raises(VariableCreationError, match="each time it runs"):
        two.strategy.run_steps(lambda context, x: tf.Variable(1.0).assign_add(x), numbers(2), 2)


def test_what_the_host_assigns_between_loops_counts(two):
    total, step = make_total(two)
    two.strategy.run_steps(step, numbers(3), 3)
    total.assign(100.0)
    two.strategy.run_steps(step, numbers(3), 3)
    two.strategy.run(lambda: total.assign_add(total * 0.0 + 1.0))
    assert total.numpy() == 108.0
