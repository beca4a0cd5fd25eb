"""Graphs of tf.compat.v1: every entrance to TPUStrategy says that it does not run there."""

import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.compat import contrib
from replica_engine.errors import GraphModeError
from replica_engine.pjrt.devices import device_group


def numbers():
    return tf.data.Dataset.range(8).batch(4)


ENTRANCES = {
    "run": lambda s, _: s.run(lambda: 1.0),
    "run of a tf.function": lambda s, _: s.run(tf.function(lambda: 1.0)),
    "scope": lambda s, _: s.scope(),
    "run_steps": lambda s, _: s.run_steps(lambda context, x: None, iter([1.0]), 1),
    "reduce": lambda s, value: s.reduce("SUM", value, axis=None),
    "reduce with an axis": lambda s, value: s.reduce("SUM", value, axis=0),
    "gather": lambda s, value: s.gather(value, axis=0),
    "a dataset": lambda s, _: s.experimental_distribute_dataset(numbers()),
    "a dataset of a function": lambda s, _: s.distribute_datasets_from_function(lambda context: numbers()),
    "values": lambda s, _: s.experimental_distribute_values_from_function(lambda context: tf.constant(1.0)),
    "make_dataset_iterator": lambda s, _: s.make_dataset_iterator(numbers()),
    "make_input_fn_iterator": lambda s, _: s.make_input_fn_iterator(lambda context: numbers()),
    "logical devices": lambda s, _: s.experimental_replicate_to_logical_devices(1.0),
    "extended.call_for_each_replica": lambda s, _: s.extended.call_for_each_replica(lambda: 1.0),
    "extended.run_steps_on_iterator": lambda s, _: s.extended.experimental_run_steps_on_iterator(
        lambda context, x: None, iter([1.0]), 1
    ),
    "extended.reduce_to": lambda s, value: s.extended.reduce_to("SUM", value, "CPU:0"),
    "extended.batch_reduce_to": lambda s, value: s.extended.batch_reduce_to("SUM", [(value, "CPU:0")]),
    "extended.broadcast_to": lambda s, _: s.extended.broadcast_to(tf.constant(1.0), "CPU:0"),
    "extended.update": lambda s, _: s.extended.update(tf.Variable(1.0), lambda variable: None),
    "extended.update_non_slot": lambda s, _: s.extended.update_non_slot(None, lambda: None),
    "extended.read_var": lambda s, _: s.extended.read_var(tf.Variable(1.0)),
    "extended.colocate_vars_with": lambda s, _: s.extended.colocate_vars_with(tf.Variable(1.0)),
    "xla.replicate": lambda s, _: xla.replicate(lambda x: x, [[1.0], [2.0]]),
    "contrib call_for_each_tower": lambda s, _: s.call_for_each_tower(lambda: 1.0),
    "contrib run_steps_on_dataset": lambda s, _: s.run_steps_on_dataset(lambda context, x: None, iter([1.0]), 1),
    "contrib reduce": lambda s, value: s.reduce(tf.VariableAggregation.SUM, value, destinations=None),
    "contrib broadcast": lambda s, _: s.broadcast(1.0),
    "contrib map": lambda s, _: s.map([1.0], lambda x: x),
    "contrib group": lambda s, value: s.group(value),
    "contrib distribute_dataset": lambda s, _: s.distribute_dataset(numbers),
    "contrib update": lambda s, _: s.update(tf.Variable(1.0), lambda variable: None),
    "contrib read_var": lambda s, _: s.read_var(tf.Variable(1.0)),
}


@pytest.fixture(params=ENTRANCES)
def entrance(request):
    make = contrib.TPUStrategy if request.param.startswith("contrib") else TPUStrategy
    strategy = make(num_cores=2)
    value = strategy.experimental_distribute_values_from_function(lambda context: tf.constant([1.0]))
    return lambda: ENTRANCES[request.param](strategy, value)


def test_every_entrance_says_so(entrance):
    with tf.Graph().as_default(), pytest.raises(GraphModeError, match="not in a graph of"):
        entrance()


@pytest.mark.parametrize("use", [xla.replicate, xla.lower])
def test_eager_mode_works_after_it(use):
    """Also where the graph was the first to ask for that many devices."""
    device_group("cpu", 2).programs = None
    with tf.Graph().as_default(), pytest.raises(GraphModeError):
        use(lambda x: x + 1.0, [[1.0], [2.0]])
    assert [float(each) for each in xla.replicate(lambda x: x + 1.0, [[1.0], [2.0]])] == [2.0, 3.0]


def test_what_was_compiled_outside_says_so():
    compiled = xla.lower(lambda x: x + 1.0, [[1.0], [2.0]]).compile()
    with tf.Graph().as_default(), pytest.raises(GraphModeError):
        compiled([[1.0], [2.0]])


def test_variables_of_the_strategy_say_so(two):
    variable = two.variable(1.0)
    with tf.Graph().as_default(), pytest.raises(GraphModeError):
        variable.assign(2.0)
    assert float(variable) == 1.0


def test_a_graph_that_a_function_builds_is_not_one(two):
    assert two.each(tf.function(lambda: two.strategy.run(lambda: tf.constant(2.0)))()) == [2.0, 2.0]


def test_what_a_message_shows_of_a_strategy_can_be_read(two):
    with tf.Graph().as_default():
        assert "2 replicas" in repr(two.strategy)
        assert two.strategy.num_replicas_in_sync == 2
