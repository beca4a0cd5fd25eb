"""Python numbers that replicas are given, and that they return; arguments that differ as a whole."""

import pytest
import tensorflow as tf

from replica_engine.errors import ReplicaValueError, StructureMismatchError


def test_a_tf_function_returns_tensors(strategy):
    def step(x):
        return {"loss": x * 2.0, "skipped": 0.0, "count": 3, "done": True, "name": "a", "none": None}

    result = strategy.run(tf.function(step), args=(tf.constant(1.0),))
    found = {name: result[name] for name in ("skipped", "count", "done", "name")}
    assert all(isinstance(value, tf.Tensor) for value in found.values())
    assert {name: value.numpy() for name, value in found.items()} == {
        "skipped": 0.0,
        "count": 3,
        "done": True,
        "name": b"a",
    }
    assert result["none"] is None


def test_what_is_computed_of_a_number_can_be_reduced(strategy, n, run):
    result = run(lambda x: x * 2.0, [17.5])
    assert float(strategy.reduce("SUM", result, axis=None)) == 35.0 * n
    assert float(strategy.reduce("MEAN", result, axis=None)) == 35.0


def test_numbers_may_be_what_python_wants_them_to_be(run, local):
    """A shape, a bound, a choice, the argument of a function of Python's, a factor of any dtype."""
    import math

    def step(size, bound, flag, rate):
        total = tf.zeros([size], tf.float64)
        for _ in range(bound):
            total += math.sqrt(rate) * tf.ones([size], tf.float64)
        return total if flag else None

    assert set(map(tuple, local(run(step, [2, 3, True, 4.0])))) == {(6.0, 6.0)}


@pytest.fixture
def own(strategy):
    """`own(fn)`: a distributed value whose parts are structures."""

    def own(fn):
        values = [fn(replica) for replica in range(strategy.num_replicas_in_sync)]
        return type(strategy.experimental_distribute_values_from_function(lambda context: tf.zeros([])))(values)

    return own


def call(strategy, args=(), kwargs=None):
    return strategy.extended.call_for_each_replica(lambda x, y=0.0: x + y, args=args, kwargs=kwargs)


def test_all_arguments_may_be_one_distributed_value(strategy, n, local, own):
    sizes = range(n)
    assert local(call(strategy, own(lambda i: [tf.constant(float(i))]))) == [float(i) for i in sizes]
    assert local(call(strategy, own(lambda i: (float(i), 1.0)))) == [i + 1.0 for i in sizes]
    assert local(call(strategy, (1.0,), own(lambda i: {"y": float(i)}))) == [i + 1.0 for i in sizes]
    both = own(lambda i: (float(i),)), own(lambda i: {"y": tf.constant(2.0)})
    assert local(call(strategy, *both)) == [i + 2.0 for i in sizes]


def test_such_arguments_that_are_none_are_refused(strategy, own):
    with pytest.raises(ReplicaValueError, match="must be a list or tuple"):
        call(strategy, own(float))
    with pytest.raises(ReplicaValueError, match="mapping of names"):
        call(strategy, (1.0,), own(float))
    with pytest.raises(StructureMismatchError, match="a list of length 2"):
        call(strategy, own(lambda i: [1.0] * (2 if i == 1 else 1)))
