"""Random programs, nested three deep, compute on replicas what they compute on one device.

`REPLICA_ENGINE_SEEDS=200` in the environment runs more of them.
"""

import os

import numpy as np
import pytest
import tensorflow as tf
from helpers import random_programs
from helpers.devices import DEVICES
from helpers.on_mirrored import shares, stepping
from helpers.random_programs import InLockStep, OnReplica

from replica_engine import MirroredStrategy

MANY = os.environ.get("REPLICA_ENGINE_SEEDS")
# Those that trace in little time.
REST = [pytest.param(seed, marks=pytest.mark.full("another number")) for seed in (5, 7, 11, 193)]
SEEDS = range(int(MANY)) if MANY else (0, 1, 2, 9, *REST)
VARIABLE, TOTAL = [0.2, -0.4, 0.6], 0.0


@pytest.mark.parametrize("seed", SEEDS)
def test_the_numbers_of_one_device(seed):
    size = 3 if seed % 5 == 4 else 2
    program = random_programs.make(seed)
    values = np.random.default_rng(seed).normal(size=(2, size, 3)).astype(np.float32)

    ops = InLockStep(size, tf.Variable(VARIABLE), tf.Variable(TOTAL))
    expected = random_programs.run(program, ops, *[[tf.constant(each) for each in of] for of in values])

    strategy = MirroredStrategy(DEVICES[:size])
    with strategy.scope():
        variable = tf.Variable(VARIABLE)
        total = tf.Variable(TOTAL, trainable=False, aggregation=tf.VariableAggregation.SUM)
    of_replicas = [
        strategy.experimental_distribute_values_from_function(
            lambda context, of=of: tf.constant(of[context.replica_id_in_sync_group])
        )
        for of in values
    ]

    def body(x, y):
        return random_programs.run(program, OnReplica(variable, total), x, y)

    step = tf.function(lambda x, y: strategy.run(body, args=(x, y)))
    results = [strategy.experimental_local_results(each) for each in step(*of_replicas)]
    for got, wanted in zip([*results, [variable], [total]], [*expected, [ops.variable], [ops.total]], strict=True):
        np.testing.assert_allclose([each.numpy() for each in got], [each.numpy() for each in wanted], 1e-4, 1e-5)


def test_loops_of_their_own_before_loops_with_merge_calls():
    """A tape around a nested function with a loop of the replica's own, and then around loops with merge calls.

    TensorFlow makes a function of the first loop if it takes the tape for one of higher order.
    """
    strategy = MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        variable = tf.Variable([0.2, -0.4, 0.6])
        total = tf.Variable(0.0, trainable=False, aggregation=tf.VariableAggregation.SUM)
    program = random_programs.make(263)[2:]
    x, y = np.random.default_rng(263).normal(size=(2, 2, 3)).astype(np.float32)

    def body(x, y):
        return random_programs.run(program, OnReplica(variable, total), x[0], y[0])

    stepping(strategy, body)(shares(strategy, x), shares(strategy, y))
