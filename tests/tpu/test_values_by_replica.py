"""Values that differ by replica: nobody who looks makes them equal, and copies keep them apart."""

import copy

import pytest
import tensorflow as tf

NONE = tf.VariableAggregation.NONE
SUM = tf.VariableAggregation.SUM
MEAN = tf.VariableAggregation.MEAN
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


LOOKS = {
    "numpy": lambda v, path: v.numpy(),
    "read_value": lambda v, path: v.read_value(),
    "identity": lambda v, path: tf.identity(v),
    "repr": lambda v, path: repr(v),
    "device": lambda v, path: v.device,
    "function": lambda v, path: tf.function(lambda: v * 1.0)(),
    "loop": lambda v, path: tf.function(lambda: tf.while_loop(lambda x: x < 1.0 - v, lambda x: x + 1.0 + v, [0.0]))(),
    "gradient": lambda v, path: gradient(v),
    "checkpoint": lambda v, path: tf.train.Checkpoint(v=v).save(str(path / "checkpoint")),
}


def gradient(variable):
    with tf.GradientTape() as tape:
        loss = variable * variable
    return tape.gradient(loss, variable)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_a_look_leaves_the_value_of_each_replica(two, look, tmp_path):
    variable = two.variable(0.0)
    for step in range(1, 3):
        two.strategy.run(lambda x: variable.assign_add(x), args=(two.spread(lambda i: i + 1.0),))
        look(variable, tmp_path)
        assert two.components(variable) == [1.0 * step, 2.0 * step]
        assert two.each(two.strategy.run(lambda: variable.read_value())) == [1.0 * step, 2.0 * step]


def test_a_host_write_makes_them_equal_again(two):
    variable = two.variable(0.0)
    two.strategy.run(lambda x: variable.assign_add(x), args=(two.spread(lambda i: i + 1.0),))
    variable.assign(variable.numpy())  # the value of replica 0, for all
    assert two.components(variable) == [1.0, 1.0]
    assert two.each(two.strategy.run(lambda: variable.read_value())) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("aggregation", "expected"), [(SUM, 30.0), (MEAN, 15.0), (FIRST, 10.0)], ids=["sum", "mean", "first"]
)
def test_on_read_variables_are_aggregated_as_they_are_now(two, aggregation, expected):
    variable = two.variable(0.0, aggregation, on_read=True)
    read = tf.function(lambda: variable.read_value())
    for step in range(1, 4):
        two.strategy.run(lambda x: variable.assign_add(x), args=(two.spread(lambda i: 10.0 * (i + 1)),))
        assert float(variable.read_value()) == expected * step
        assert float(variable.numpy()) == expected * step
        assert float(read()) == expected * step
        assert two.components(variable) == [10.0 * step, 20.0 * step]


# Copies.


def test_a_copy_goes_its_own_way(two):
    two.add(counter := two.variable(0.0))
    with two.strategy.scope():
        copied = copy.deepcopy(counter)
    two.add(counter)
    assert (float(copied.numpy()), float(counter.numpy())) == (1.0, 2.0)
    two.add(copied, 10.0)
    assert (float(copied.numpy()), float(counter.numpy())) == (11.0, 2.0)
    assert float(tf.function(lambda: copied + counter)()) == 13.0


def test_a_copy_is_one_value_on_all_replicas_where_the_variable_is(two):
    variable = two.variable(1.0, MEAN)
    with two.strategy.scope():
        copied = copy.deepcopy(variable)

    def body():
        context = tf.distribute.get_replica_context()
        return tf.cond(copied > 0.0, lambda: context.all_reduce("SUM", tf.constant(1.0)), lambda: tf.constant(0.0))

    assert float(two.strategy.experimental_local_results(two.strategy.run(body))[0]) == 2.0


@pytest.mark.parametrize("on_read", [False, True])
def test_a_copy_has_the_value_of_each_replica(two, on_read):
    variable = two.variable(0.0, NONE, on_read=on_read)
    two.strategy.run(lambda x: variable.assign(x), args=(two.spread(lambda i: i + 1.0),))
    with two.strategy.scope():
        copied = copy.deepcopy(variable)
    two.strategy.run(lambda: variable.assign(variable * 10.0))
    assert two.components(copied) == [1.0, 2.0]
    two.strategy.run(lambda: copied.assign(copied + 5.0))
    assert two.components(copied) == [6.0, 7.0]
    assert two.components(variable) == [10.0, 20.0]
