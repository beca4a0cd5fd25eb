"""Variables of strings: no device can have them, and each replica changes its own, as under tf.distribute."""

import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.errors import CollectiveError

FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


def new_strategy(replicas=2):
    return TPUStrategy(xla.PjrtClusterResolver("cpu"), num_cores=replicas)


def append(v):
    v.assign(v + "b")


def append_twice(v):
    v.assign(v + "b")
    v.assign(v + "c")


def in_a_function(v):
    tf.function(append)(v)


STEPS = [append, append_twice, in_a_function]


def values_after(strategy, step, around, initial=("a", "xy")):
    with strategy.scope():
        v = tf.Variable(list(initial), aggregation=FIRST)

    def body():
        step(v)
        return v.read_value()

    run = around(lambda: strategy.run(body))
    found = []
    for _ in range(3):
        results = strategy.experimental_local_results(run())
        found.append([v.numpy().tolist(), *(each.numpy().tolist() for each in results)])
    return found


def values_on_one_device(step):
    v = tf.Variable(["a", "xy"])
    run, found = tf.function(lambda: step(v)), []
    for _ in range(3):
        run()
        found.append([v.numpy().tolist()] * 3)
    return found


@pytest.mark.parametrize("step", STEPS)
def test_a_step_changes_a_variable_of_strings_once(step):
    wanted = values_on_one_device(step)
    assert values_after(new_strategy(), step, lambda run: run) == wanted
    assert values_after(new_strategy(), step, tf.function) == wanted


def test_it_is_once_for_any_number_of_replicas():
    found = [values_after(new_strategy(replicas), append, lambda run: run) for replicas in (1, 3)]
    assert [[row[0] for row in rows] for rows in found] == [
        [[b"ab", b"xyb"], [b"abb", b"xybb"], [b"abbb", b"xybbb"]]
    ] * 2
    assert all(value == row[0] for rows in found for row in rows for value in row)


def test_values_that_may_differ_are_refused():
    strategy = new_strategy()
    with strategy.scope():
        v = tf.Variable("a", aggregation=FIRST)

    def body():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        v.assign(v + tf.strings.as_string(replica))

    with pytest.raises(CollectiveError, match="string"):
        strategy.run(body)
    assert v.numpy() == b"a"


def test_an_on_read_variable_of_strings_has_a_value_for_each_replica():
    strategy = new_strategy()
    with strategy.scope():
        v = tf.Variable("a", synchronization=tf.VariableSynchronization.ON_READ, aggregation=FIRST)

    def body():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        v.assign(v + tf.strings.as_string(replica))
        return v.read_value()

    for wanted in ([b"a0", b"a1"], [b"a00", b"a11"]):
        results = strategy.experimental_local_results(strategy.run(body))
        assert [each.numpy() for each in results] == wanted
    assert [each.numpy() for each in v.values] == [b"a00", b"a11"]


def test_steps_in_one_launch_change_it_once_a_step():
    strategy = new_strategy()
    with strategy.scope():
        v = tf.Variable("a", aggregation=FIRST)
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(2, drop_remainder=True))
    strategy.run_steps(lambda context, x: v.assign(v + "b"), iter(data), 3)
    assert v.numpy() == b"abbb"


def test_the_host_may_change_it_between_runs():
    strategy = new_strategy()
    with strategy.scope():
        v = tf.Variable(["a"], aggregation=FIRST)
    strategy.run(append, args=(v,))
    v.assign(["z"])
    strategy.run(append, args=(v,))
    assert v.numpy().tolist() == [b"zb"]
