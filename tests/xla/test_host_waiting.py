"""What would wait, in host work, for the very step that it is called from."""

import pytest
import tensorflow as tf
from helpers.host_work import check_strategy_works

from replica_engine import TPUStrategy, xla
from replica_engine.errors import HostAccessError

WAITING = {
    "the values of a variable": lambda strategy, variable: variable.values,
    "a step": lambda strategy, variable: strategy.run(lambda: tf.zeros([])),
    "a step of another strategy": lambda strategy, variable: TPUStrategy(num_cores=2).run(lambda: tf.zeros([])),
    "a replicated function": lambda strategy, variable: xla.replicate(lambda: tf.zeros([]), num_replicas=2),
    "a checkpoint": lambda strategy, variable: tf.train.Checkpoint(v=variable).write("/nonexistent/path"),
    "a function with the variable": lambda strategy, variable: tf.function(lambda: variable + 1.0)(),
    "an op with Python in it": lambda strategy, variable: tf.py_function(variable.numpy, [], tf.float32),
    "a device loop": lambda strategy, variable: strategy.run_steps(lambda c, x: None, [tf.zeros([])], iterations=1),
}


@pytest.mark.parametrize("wait", WAITING.values(), ids=WAITING.keys())
def test_what_would_wait_for_the_step_is_an_error(two, wait):
    with two.scope():
        variable = tf.Variable(1.0)

    def fn():
        wait(two, variable)

    def body():
        variable.assign_add(1.0)
        xla.outside_compilation(fn)

    two.run(lambda: variable.assign_add(1.0))
    with pytest.raises((HostAccessError, tf.errors.UnknownError), match="outside_compilation"):
        two.run(body)
    assert variable.numpy() == 2.0
    check_strategy_works(two)


def test_a_function_traced_before_cannot_use_the_variable_either(two):
    with two.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)
    read = tf.function(lambda: variable + 1.0)
    read()
    seen = []

    def fn():
        seen.append(float(read()))

    def body():
        variable.assign(tf.constant(10.0))
        xla.outside_compilation(fn)

    with pytest.raises(HostAccessError):
        two.run(body)
    assert seen == []
    assert variable.numpy() == 1.0
