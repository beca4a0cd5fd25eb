"""What `trace_once` must not copy, and what it must get right in a corner."""

import pytest
import tensorflow as tf
from helpers.once_programs import ON_READ, SUM, context, per, twice

from replica_engine import MirroredStrategy
from replica_engine.errors import ReplicaValueError, TraceOnceError

DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture
def ours():
    return MirroredStrategy(DEVICES, trace_once=True)


def on_replicas(strategy, body, *args):
    result = tf.function(lambda *args: strategy.run(body, args=args))(*args)
    return [value.numpy().tolist() for value in strategy.experimental_local_results(result)]


def traced_each(caplog):
    return [message for message in caplog.messages if "is traced by itself" in message]


def different(strategy):
    """A variable of 3 on replica 0 and 7 on replica 1."""
    with strategy.scope():
        variable = tf.Variable(3.0, synchronization=ON_READ, aggregation=SUM)
    variable.values[1].assign(7.0)
    return variable


def test_replica_0_alone_runs_its_python_code(ours):
    runs = []

    def body(x):
        runs.append(tf.distribute.get_replica_context())
        return context().all_reduce("SUM", x) + x

    assert on_replicas(ours, body, per(ours, 1.0, 2.0)) == [4.0, 5.0]
    assert len(runs) == 1


def test_eager_runs_run_each_replica(ours):
    runs = []
    ours.run(lambda: runs.append(0))
    assert len(runs) == 2


def test_a_component_that_is_used_by_itself_is_the_same_on_all_replicas(ours, caplog):
    variable = different(ours)
    assert on_replicas(ours, lambda: variable.values[0] + variable) == [6.0, 10.0]
    assert "a component of a distributed variable" in traced_each(caplog)[0]


def test_a_component_in_a_nested_function_that_was_traced_before(ours, caplog):
    variable = different(ours)
    nested = tf.function(lambda: variable.values[0] * 1.0)
    for _ in range(2):
        assert on_replicas(ours, lambda: nested() + variable) == [6.0, 10.0]
    assert len(traced_each(caplog)) == 2


def test_a_nested_function_that_was_traced_outside_replicas(ours):
    variable = different(ours)
    nested = tf.function(lambda: variable * 1.0)
    assert float(nested()) == 10.0
    assert on_replicas(ours, lambda: nested() + variable) == [6.0, 14.0]


def test_a_trace_that_was_made_outside_replicas(ours, caplog):
    variable = different(ours)
    nested = tf.function(lambda: variable.values[0] * 1.0).get_concrete_function()
    assert on_replicas(ours, lambda: nested() + 1.0) == [4.0, 4.0]
    assert len(traced_each(caplog)) == 1


def test_a_handle_that_was_taken_outside_replicas(ours, caplog):
    variable = different(ours)
    handle = variable.values[0].handle
    body = lambda: tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) + 1.0  # noqa: E731
    assert on_replicas(ours, body) == [4.0, 4.0]
    assert len(traced_each(caplog)) == 1


def test_a_random_op_in_a_branch(ours, caplog):
    tf.random.set_seed(3)

    def body(x):
        return tf.cond(x > 0.0, lambda: tf.random.uniform([]), lambda: 0.0)

    first, second = on_replicas(ours, body, per(ours, 1.0, 2.0))
    assert first != second
    assert "a random op without a seed of its own in a branch or loop" in traced_each(caplog)[0]


@pytest.mark.parametrize("trace_once", [True, "checked"])
def test_seeds_of_users_that_are_those_that_are_drawn(trace_once, caplog):
    def body():
        drawn = [tf.random.uniform([], seed=seed) for seed in (0, None, 1, None)]
        return [*drawn, context().all_reduce("SUM", drawn[-1]), tf.random.uniform([])]

    found = []
    for mode in (False, trace_once):
        tf.random.set_seed(3)
        strategy = MirroredStrategy(DEVICES, trace_once=mode)
        results = tf.function(lambda strategy=strategy: strategy.run(body))()
        found.append([[float(each) for each in strategy.experimental_local_results(of)] for of in results])
    assert found[0] == found[1]
    assert not traced_each(caplog)


def test_a_merge_call_in_a_branch(ours, caplog):
    def body(x):
        return tf.cond(tf.constant(True), lambda: context().all_reduce("SUM", x), lambda: x)

    assert on_replicas(ours, body, per(ours, 1.0, 2.0)) == [3.0, 3.0]
    assert "a sync point in tf.cond" in traced_each(caplog)[0]


def test_a_merge_call_in_a_nested_function_is_copied(ours, caplog):
    nested = tf.function(lambda x: context().all_reduce("SUM", x) * x)
    assert on_replicas(ours, lambda x: nested(x) + 1.0, per(ours, 1.0, 2.0)) == [4.0, 7.0]
    assert not traced_each(caplog)


def test_what_is_refused_after_a_sync_point_is_an_error_although_it_is_caught(ours):
    def body(x):
        x = context().all_reduce("SUM", x)
        try:
            return x * context()._replica_id_in_sync_group
        except TraceOnceError:
            return x

    with pytest.raises(TraceOnceError, match=r"the replica id as a Python number at .*test_limits.py:\d+ in body"):
        on_replicas(ours, body, per(ours, 1.0, 2.0))


def test_an_exception_of_the_user_is_the_users(ours):
    def body(x):
        context().all_reduce("SUM", x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        on_replicas(ours, body, per(ours, 1.0, 2.0))


def test_a_run_after_a_failed_one(ours):
    def body(x, fails):
        total = context().all_reduce("SUM", x)
        if fails:
            raise KeyError("mine")
        return total

    x = per(ours, 1.0, 2.0)
    step = tf.function(lambda x, fails: ours.run(body, args=(x, fails)))
    with pytest.raises(KeyError):
        step(x, True)
    assert [float(each) for each in ours.experimental_local_results(step(x, False))] == [3.0, 3.0]


class OnceMade(tf.Module):
    """A variable that is made in a replica, of the replica's argument."""

    weight = None

    def __call__(self, x):
        if self.weight is None:
            self.weight = tf.Variable(x * 2.0)
        return self.weight * x


def test_an_initial_value_of_a_replica(ours):
    module = OnceMade()
    with ours.scope():
        results = twice(ours, module, per(ours, 1.0, 2.0))
    assert [[float(each) for each in ours.experimental_local_results(of)] for of in results] == [[2.0, 4.0]] * 2
    assert [float(each) for each in module.weight.values] == [2.0, 2.0]


def makes_a_variable(made, then):
    def body(x):
        if not made:
            made.append(tf.Variable(tf.random.uniform([])))
        return then(x) + made[0]

    return body


def test_draws_after_a_variable_was_made_are_refused(ours):
    """Replica 0 draws more often than the others, which find the variable made."""
    tf.random.set_seed(3)
    body = makes_a_variable([], lambda x: tf.random.uniform([]))
    with pytest.raises(TraceOnceError, match="makes a variable, and it uses a random op"), ours.scope():
        on_replicas(ours, body, per(ours, 1.0, 2.0))


def test_what_is_refused_in_a_run_that_makes_a_variable_is_an_error(ours):
    """Another run would find it made, and nothing would set its initial value."""
    body = makes_a_variable([], lambda x: tf.py_function(lambda x: x, [x], tf.float32))
    with pytest.raises(TraceOnceError, match=r"makes a variable, and it uses tf\.py_function"), ours.scope():
        on_replicas(ours, body, per(ours, 1.0, 2.0))


def test_draws_before_a_variable_is_made():
    found = []
    for trace_once in (False, True):
        tf.random.set_seed(3)
        strategy = MirroredStrategy(DEVICES, trace_once=trace_once)
        made = []

        def body(x, made=made):
            drawn = tf.random.uniform([])
            if not made:
                made.append(tf.Variable(x * 2.0))  # so that TensorFlow runs the graph that makes it
            return drawn + made[0]

        with strategy.scope():
            found.append(on_replicas(strategy, body, per(strategy, 1.0, 2.0)))
    assert found[0] == found[1]


@pytest.mark.parametrize("trace_once", [True, "checked"])
def test_gradients_from_outside_through_branches_and_nested_functions(trace_once):
    strategy = MirroredStrategy(DEVICES, trace_once=trace_once)
    with strategy.scope():
        weight = tf.Variable(3.0)
    nested = tf.function(lambda x: x * weight)

    def body(x):
        return nested(tf.cond(x > 1.5, lambda: weight * x, lambda: x))

    @tf.function
    def step(x):
        return strategy.reduce("SUM", strategy.run(body, args=(x,)), axis=None)

    x = per(strategy, 1.0, 2.0)
    with tf.GradientTape() as tape:
        tape.watch(x.values)
        total = step(x)
    # The sum of w * x on replica 0 and w * w * x on replica 1.
    assert [float(each) for each in tape.gradient(total, [*x.values, *weight.values])] == [3.0, 9.0, 1.0, 12.0]


@pytest.mark.parametrize("given", ["check", 1, None, b"checked", tf.constant(True)])
def test_other_values_of_the_option(given):
    with pytest.raises(ReplicaValueError, match="trace_once must be"):
        MirroredStrategy(DEVICES, trace_once=given)
