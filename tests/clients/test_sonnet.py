"""Sonnet's modules and optimizers on replicas come to one device's numbers.

A few of its modules, those that differ most in what they ask of a strategy; keras_3/ has all of them, and Sonnet's own
tests. Their variables are created where Sonnet creates them: by the replicas, in the first call, from random values.
"""

import functools

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
from helpers.comparing import assert_close
from helpers.sonnet_modules import MODULES, make_batch, on_one_device, on_replicas
from helpers.sonnet_replicators import REPLICAS, REPLICATORS

# Statistics that a call updates, a gather, a loop, and one of several layers.
QUICK = ["BatchNorm", "Embed", "dynamic_unroll(VanillaRNN)", "nets.VectorQuantizerEMA"]
RNG = np.random.default_rng(2)
INPUTS = RNG.normal(size=(3, 8, 5)).astype("float32")
TARGETS = RNG.normal(size=(3, 8, 2)).astype("float32")


@pytest.fixture(params=REPLICATORS)
def replicator(request):
    return REPLICATORS[request.param]()


@pytest.mark.parametrize("name", QUICK)
def test_a_module_computes_what_one_device_does(replicator, name):
    expected, weights = of_one_device(name)
    descriptor = MODULES[name]
    assert_close(on_replicas(replicator, descriptor, make_batch(descriptor), weights), expected)


@functools.cache
def of_one_device(name):
    descriptor = MODULES[name]
    return on_one_device(descriptor, make_batch(descriptor))


def test_random_weights_that_replicas_create_are_the_same_on_all(replicator):
    with replicator.scope():
        module = snt.nets.MLP([3, 4])
    replicator.run(tf.function(lambda: module(tf.ones([2, 5]))))
    kernels = [variable for variable in module.variables if variable.shape.rank == 2]
    assert len(kernels) == 2
    for kernel in kernels:
        first, *others = (copy.numpy() for copy in replicator.experimental_local_results(kernel))
        assert np.unique(first).size == first.size  # drawn, not filled
        for other in others:
            np.testing.assert_array_equal(first, other)


def steps(module, optimizer, run, weights):
    """Losses of three steps, and the weights after them. `run(fn)` takes whole batches."""

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((module(x) - y) ** 2)
        gradients = tape.gradient(loss, module.trainable_variables)
        if tf.distribute.has_strategy():
            loss, gradients = tf.distribute.get_replica_context().all_reduce("mean", (loss, gradients))
        optimizer.apply(gradients, module.trainable_variables)
        return loss

    run(module)(INPUTS[0])  # creates the variables
    for variable, value in zip(module.trainable_variables, weights, strict=True):
        variable.assign(value)
    step = run(step)
    losses = [float(step(x, y)) for x, y in zip(INPUTS, TARGETS, strict=True)]
    return losses, [variable.numpy() for variable in module.trainable_variables]


def alone(fn):
    return lambda *batch: fn(*map(tf.constant, batch))


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_an_optimizer_takes_the_steps_of_one_device(replicator, name):
    def run(fn):
        in_function = tf.function(lambda *shares: replicator.run(fn, args=shares))
        return lambda *batch: replicator.experimental_local_results(in_function(*map(shared, batch)))[0]

    def shared(batch):
        parts = np.split(batch, REPLICAS)
        return replicator.experimental_distribute_values_from_function(
            lambda context: tf.constant(parts[context.replica_id_in_sync_group])
        )

    def make():
        return snt.Linear(2), getattr(snt.optimizers, name)(0.1)

    weights = [RNG.normal(size=shape).astype("float32") for shape in ((2,), (5, 2))]
    losses, trained = steps(*make(), alone, weights)
    with replicator.scope():
        module, optimizer = make()
    assert_close(steps(module, optimizer, run, weights), (losses, trained))
