"""The value of several replicas, used as if it were one tensor: what to write instead, and what works as before."""

import collections.abc
import copy
import math
import operator
import pickle

import numpy as np
import pytest
import tensorflow as tf

from replica_engine.errors import NoValueError, ReplicaValueError

pytestmark = pytest.mark.replicas(2)

USES = {
    "float(x)": float,
    "int(x)": int,
    "complex(x)": complex,
    "x + y": lambda x: x + 1,
    "y + x": lambda x: 1 + x,
    "y * x": lambda x: np.ones(2) * x,
    "x / y": np.mean,
    "x > y": lambda x: x > 0.5,
    "x < y": lambda x: min(0.5, x),
    "-x": operator.neg,
    "round(x)": lambda x: round(x, 2),
    "f'{x:.3f}'": lambda x: f"loss {x:.3f}",
    "x[...]": lambda x: x[0],
    "for each in x": list,
}
CONVERSIONS = {
    "reduce_mean": tf.reduce_mean,
    "constant": tf.convert_to_tensor,
    "tensor + x": lambda x: tf.constant(1.0) + x,
    "x + tensor": lambda x: x + tf.constant(1.0),
    "x > tensor": lambda x: x > tf.constant(1.0),
    "assign": lambda x: tf.Variable(0.0).assign(x),
    "metric": lambda x: tf.keras.metrics.Mean().update_state(x),
    "stack": lambda x: tf.stack([x, x]),
}


@pytest.fixture(params=["eager", "function"])
def result(request, strategy, per_replica):
    """The result of a run: 1.0 on replica 0, 2.0 on replica 1."""

    def step():
        return strategy.run(lambda x: x + 1.0, args=(per_replica(float),))

    return step() if request.param == "eager" else tf.function(step)()


@pytest.mark.parametrize("asked", USES)
def test_a_use_as_one_number_says_what_to_write(result, asked):
    with pytest.raises(ReplicaValueError, match=r"for one number|For one number") as caught:
        USES[asked](result)
    assert f"`{asked}` needs one value, but x holds one for each of 2 replicas" in str(caught.value)
    assert isinstance(caught.value, TypeError)  # as Python's own


@pytest.mark.parametrize("use", CONVERSIONS.values(), ids=CONVERSIONS)
def test_a_function_of_tensorflow_says_what_to_write(result, use):
    with pytest.raises(ReplicaValueError, match=r"A function of TensorFlow needs one value.*each of 2 replicas"):
        use(result)


def test_an_attribute_without_a_name(result):
    assert getattr(result, "", None) is None


@pytest.mark.parametrize("name", ["numpy", "shape", "dtype", "item", "mean"])
def test_an_attribute_of_a_tensor_says_what_to_write(result, name):
    assert not hasattr(result, name)
    with pytest.raises(NoValueError, match=rf"x\.{name} is of one tensor.*strategy\.reduce"):
        getattr(result, name)


def test_the_truth_of_booleans_is_asked_of_one(strategy, per_replica):
    is_done = strategy.run(tf.math.equal, args=(per_replica(float), 0.0))
    with pytest.raises(ReplicaValueError, match=r"`if x` needs one value.*Write any\(strategy"):
        bool(is_done)
    with pytest.raises(ReplicaValueError, match="needs one value"):  # TensorFlow asks for the program
        tf.cond(is_done, lambda: 1, lambda: 2)
    assert any(strategy.experimental_local_results(is_done))
    assert not all(strategy.experimental_local_results(is_done))


def test_what_worked_before_works(strategy, local, result):
    assert bool(result)
    assert result == result
    assert result != 1.0
    assert f"{result}" == str(result)
    assert isinstance(result, tf.distribute.DistributedValues)
    assert not tf.is_tensor(result)
    assert not isinstance(result, (collections.abc.Sized, collections.abc.Sequence))
    assert not np.iterable(result)
    assert np.asarray(result).shape == ()
    assert np.asarray([result, result]).shape == (2,)
    assert [len(tf.nest.flatten(result)), len(tf.nest.flatten(result, expand_composites=True))] == [1, 2]
    for copied in (copy.copy(result), copy.deepcopy(result)):
        assert local(copied) == [1.0, 2.0]
    again = strategy.run(tf.function(lambda x: x * 2.0), args=(tf.nest.map_structure(lambda x: x, result),))
    assert local(again) == [2.0, 4.0]
    assert float(strategy.reduce("MEAN", result, axis=None)) == 1.5
    with pytest.raises(AttributeError, match="'PerReplica' object has no attribute 'no_such_name'"):
        result.no_such_name  # noqa: B018


def test_it_is_pickled_as_before(result):
    parts = [float(each) for each in pickle.loads(pickle.dumps(result)).values]
    assert parts == [1.0, 2.0]


def test_looking_for_attributes_does_not_fetch_results(strategy):
    result = strategy.run(lambda: tf.identity(1.0))
    before = set(vars(result))
    assert not hasattr(result, "dtype")
    assert set(vars(result)) == before


class Other:
    """A class that adds values of several replicas in a way of its own."""

    def __radd__(self, other):
        return "mine"


def test_other_classes_may_implement_the_operators(result):
    assert result + Other() == "mine"
    with pytest.raises(TypeError):
        result + object()


@pytest.mark.parametrize("use", [tf.abs, lambda x: tf.constant(1.0) + x - 1.0, lambda x: x + tf.constant(0.0)])
def test_each_replica_has_its_own_value_of_one_from_outside(run, local, result, use):
    assert local(run(lambda: use(result))) == [1.0, 2.0]


def test_a_replica_is_told_to_take_it_as_an_argument(strategy, result):
    for use in (float, math.sqrt, lambda x: x + 1.0):
        with pytest.raises(ReplicaValueError, match=r"as an argument: strategy\.run\(fn, args=\(x,\)\)"):
            strategy.run(lambda use=use: use(result))


def test_values_of_several_shapes_are_arguments(strategy, per_replica, local):
    rows = per_replica(lambda i: [1.0] * (1 + i))
    if type(strategy).__name__ == "TPUStrategy":
        with pytest.raises(ReplicaValueError, match="as an argument"):
            strategy.run(lambda: tf.reduce_sum(rows))
    else:
        assert local(strategy.run(lambda: tf.reduce_sum(rows))) == [1.0, 2.0]
