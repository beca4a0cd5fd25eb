"""Variables of strings: no device can have them, and each replica changes its own, as under tf.distribute."""

import pytest
import tensorflow as tf

from replica_engine.errors import CollectiveError

FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA


def append(v):
    v.assign(v + "b")


def append_twice(v):
    v.assign(v + "b")
    v.assign(v + "c")


def in_a_function(v):
    tf.function(append)(v)


def append_id(v):
    v.assign(v + tf.strings.as_string(tf.distribute.get_replica_context().replica_id_in_sync_group))


def values_after(replicas, step, around):
    """After each of three steps, the value on the host and on each replica."""
    v = replicas.variable(["a", "xy"], FIRST)

    def body():
        step(v)
        return v.read_value()

    run = around(lambda: replicas.strategy.run(body))
    found = []
    for _ in range(3):
        on_replicas = replicas.each(run())
        found.append([v.numpy().tolist(), *on_replicas])
    return found


@pytest.mark.parametrize("step", [append, append_twice, in_a_function])
def test_a_step_changes_a_variable_of_strings_once(replicas, step):
    v, wanted = tf.Variable(["a", "xy"]), []
    run = tf.function(lambda: step(v))
    for _ in range(3):
        run()
        wanted.append([v.numpy().tolist()] * 3)
    assert values_after(replicas(2), step, lambda run: run) == wanted
    assert values_after(replicas(2), step, tf.function) == wanted


def test_it_is_once_for_any_number_of_replicas(replicas):
    found = [values_after(replicas(size), append, lambda run: run) for size in (1, 3)]
    of_host = [[b"ab", b"xyb"], [b"abb", b"xybb"], [b"abbb", b"xybbb"]]
    assert [[row[0] for row in rows] for rows in found] == [of_host] * 2
    assert all(value == row[0] for rows in found for row in rows for value in row)


def test_values_that_may_differ_are_refused(two):
    v = two.variable("a", FIRST)
    with pytest.raises(CollectiveError, match="string"):
        two.strategy.run(append_id, args=(v,))
    assert v.numpy() == b"a"


def test_an_on_read_variable_of_strings_has_a_value_for_each_replica(two):
    v = two.variable("a", FIRST, on_read=True)

    def body():
        append_id(v)
        return v.read_value()

    for wanted in ([b"a0", b"a1"], [b"a00", b"a11"]):
        assert two.each(two.strategy.run(body)) == wanted
    assert [each.numpy() for each in v.values] == [b"a00", b"a11"]


def test_steps_in_one_launch_change_it_once_a_step(two):
    v = two.variable("a", FIRST)
    data = two.strategy.experimental_distribute_dataset(tf.data.Dataset.range(6).batch(2, drop_remainder=True))
    two.strategy.run_steps(lambda context, x: v.assign(v + "b"), iter(data), 3)
    assert v.numpy() == b"abbb"


def test_the_host_may_change_it_between_runs(two):
    v = two.variable(["a"], FIRST)
    two.strategy.run(append, args=(v,))
    v.assign(["z"])
    two.strategy.run(append, args=(v,))
    assert v.numpy().tolist() == [b"zb"]
