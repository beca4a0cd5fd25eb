"""Replicas that give an optimizer unlike lists: an error that names the replicas and the variables."""

import keras
import pytest
import tensorflow as tf
from helpers.on_mirrored import index

from replica_engine import MirroredStrategy
from replica_engine.errors import ReplicaEngineError, ReplicaMismatchError
from replica_engine.keras import CrossReplicaOptimizer

OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam": keras.optimizers.Adam,
    "Ftrl": keras.optimizers.Ftrl,
    "sum": lambda: CrossReplicaOptimizer(keras.optimizers.SGD(0.1), reduction="sum"),
    "mean": lambda: CrossReplicaOptimizer(keras.optimizers.Adam(), reduction="mean"),
}


def made(name):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        variables = [keras.Variable([1.0], name="a"), keras.Variable([2.0], name="b")]
        optimizer = OPTIMIZERS[name]()
        optimizer.build(variables)
    return strategy, optimizer, variables


def run(strategy, step, in_function):
    (tf.function(lambda: strategy.run(step)) if in_function else lambda: strategy.run(step))()


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "Ftrl"])
def test_variables_in_another_order(name, in_function):
    strategy, optimizer, variables = made(name)

    def step():
        pairs = [(tf.ones([1]), each) for each in variables]
        optimizer.apply_gradients(pairs if index() == 0 else pairs[::-1])

    with pytest.raises(ReplicaMismatchError, match=r"(?s)test_unlike_replicas.*replica 0: a\n  replica 1: b\n.*order"):
        run(strategy, step, in_function)
    assert [each.numpy().tolist() for each in variables] == [[1.0], [2.0]]


@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("lacks", [0, 1])
def test_a_replica_without_a_gradient(name, lacks, in_function):
    strategy, optimizer, variables = made(name)

    def step():
        missing = None if (index() == 0) == (lacks == 0) else tf.ones([1])
        optimizer.apply([tf.ones([1]), missing], variables)

    with pytest.raises(ReplicaEngineError) as failure:
        run(strategy, step, in_function)
    assert "replica 0" in str(failure.value)
    assert "replica 1" in str(failure.value)
    assert "test_unlike_replicas" in str(failure.value)
    assert [each.numpy().tolist() for each in variables] == [[1.0], [2.0]]


def test_an_error_of_the_users_own_merge_function_stays():
    strategy, _, (a, b) = made("SGD")

    def merge(strategy, variable):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merge, args=(a if index() == 0 else b,)))
