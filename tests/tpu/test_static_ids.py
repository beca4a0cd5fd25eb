"""The replica id has no value while a body is traced: who asks for one in Python is told, once."""

import keras
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, xla
from replica_engine.testing import logical_devices


def replica_id():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def compared():
    return 1.0 if tf.get_static_value(replica_id()) == 0 else 2.0


def in_a_branch():
    if tf.get_static_value(replica_id()) == 0:
        return tf.ones([])
    return tf.zeros([])


def computed():
    return 1.0 if tf.get_static_value(tf.cast(replica_id(), tf.int64) % 2 == 0) else 2.0


def captured():
    mine = replica_id()
    return tf.function(lambda: 1.0 if tf.get_static_value(mine) == 0 else 2.0)()


def in_a_helper():
    def known(tensor):
        return tf.get_static_value(tensor)

    return 1.0 if known(replica_id()) == 0 else 2.0


@pytest.fixture
def told(caplog):
    """How many warnings of a replica id without a value have come."""
    return lambda: sum("is None for the replica id" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("body", [compared, in_a_branch, computed, captured, in_a_helper])
def test_python_code_that_asks_for_the_id_is_told_once(two, told, caplog, body):
    two.strategy.run(body)
    assert told() == 1
    two.strategy.run(tf.function(body))
    tf.function(lambda: two.strategy.run(body))()
    assert told() == 1
    assert "test_static_ids.py" in caplog.text


def test_a_step_of_a_loop_is_told(two, told):
    two.strategy.run_steps(lambda context, x: compared(), [1.0] * 2, 2)
    assert told() == 1


def test_a_run_in_a_function_is_told(two, told):
    tf.function(lambda: two.strategy.run(in_a_branch))()
    assert told() == 1


def test_each_strategy_is_told(replicas, told):
    for count in (1, 2):
        replicas(2).strategy.run(compared)
        assert told() == count


def works_under_all_strategies():
    index = tf.get_static_value(replica_id())
    if index is None:
        return tf.where(replica_id() == 0, 1.0, 2.0)
    return 1.0 if index == 0 else 2.0


def index_or_none():
    return tf.get_static_value(replica_id())


def asks_a_helper():
    return 1.0 if index_or_none() is not None else 2.0


def first_or_unknown():
    return 1.0 if tf.get_static_value(replica_id()) in (0, None) else 2.0


def equal_to_none():
    return 1.0 if tf.get_static_value(replica_id()) == None else 2.0  # noqa: E711


def asks_for_something_else():
    tf.get_static_value(tf.random.uniform([]))
    tf.get_static_value(tf.random.uniform([]) + tf.cast(replica_id(), tf.float32))
    assert tf.get_static_value(tf.constant(1.0)) == 1.0
    return 1.0


def calls_libraries():
    one = keras.ops.one_hot(replica_id(), 4)
    return tf.linspace(0.0, 1.0, 4) + one + keras.ops.repeat(one, 2)[:4]


def on_the_host():
    return xla.outside_compilation(lambda: tf.constant(float(tf.get_static_value(xla.replica_id()) == 0)))


@pytest.mark.parametrize(
    "body",
    [
        works_under_all_strategies,
        asks_a_helper,
        first_or_unknown,
        equal_to_none,
        asks_for_something_else,
        calls_libraries,
        on_the_host,
    ],
)
def test_right_programs_are_not_told(two, told, body):
    two.strategy.run(body)
    two.strategy.run(tf.function(body))
    assert told() == 0


def test_one_replica_has_a_known_id(replicas, told):
    assert replicas(1).strategy.run(compared) == 1.0
    assert told() == 0


def test_outside_of_bodies_the_value_is_as_ever(told):
    assert tf.get_static_value(tf.constant(3)) == 3
    assert tf.get_static_value(tensor=tf.constant([1, 2]), partial=True).tolist() == [1, 2]
    assert tf.function(lambda x: tf.get_static_value(x) is None)(tf.constant(1))
    assert told() == 0


def test_replicas_that_are_traced_once_are_told_apart(two, told, caplog):
    """There too the library looks on where a program asks, and finds the user behind what looks on here."""
    mirrored = MirroredStrategy(logical_devices(two.size), trace_once=True)

    def body():
        return tf.constant(float(tf.get_static_value(replica_id())))

    results = tf.function(lambda: mirrored.run(body))()
    assert [float(each) for each in mirrored.experimental_local_results(results)] == [0.0, 1.0]
    assert "tf.get_static_value of a value that may differ by replica" in caplog.text
    assert told() == 0
