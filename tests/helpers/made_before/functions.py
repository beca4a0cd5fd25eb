"""Functions that were traced, in every form in which a program holds on to one."""

import functools
import traceback

import pytest
import tensorflow as tf

from helpers.made_before import BOTH, MIRRORED, made_before
from helpers.made_before.control_flow import ONE, TWO, checks, context, total
from helpers.on_mirrored import locally, numbered, run


def _total(x):
    return total(x) + x


@made_before(*BOTH)
def a_function_called_by_an_eager_replica():
    return checks(tf.function(_total), 2.0, [4.0, 5.0], form="eager")


@made_before(*BOTH)
def its_call_under_a_name():
    fn = tf.function(_total)
    return checks(fn.__call__, 2.0, [4.0, 5.0])


@made_before(*BOTH)
def a_function_of_a_signature_that_is_run_itself():
    fn = tf.function(_total, input_signature=[tf.TensorSpec([], tf.float32)])
    assert fn(ONE) == 2.0

    def use(strategy):
        assert locally(strategy, strategy.run(fn, args=(ONE,))) == [3.0, 3.0]

    return use


class Scaling(tf.Module):
    def __init__(self):
        super().__init__()
        self.by = tf.Variable(2.0)

    @tf.function
    def scaled(self, x):
        return total(x) * self.by


SCALING = Scaling()


@made_before(*BOTH)
def a_method_of_a_module():
    scaled = SCALING.scaled  # which does not keep the module
    return checks(scaled, 2.0, [6.0, 6.0])


@made_before(*BOTH)
def a_partial_function_in_a_decorator():
    def logged(fn):
        @functools.wraps(fn)
        def call(*args):
            return fn(*args)

        return call

    fn = logged(functools.partial(tf.function(lambda by, x: total(x) * by), 2.0))
    return checks(fn, 2.0, [6.0, 6.0])


@made_before(*BOTH)
def a_concrete_function():
    weight = tf.Variable(3.0)
    concrete = tf.function(lambda x: x * weight).get_concrete_function(tf.TensorSpec([], tf.float32))
    assert concrete(ONE) == 3.0

    def use(strategy):
        weight.assign(5.0)
        assert run(strategy, lambda x: concrete(x), numbered(strategy)) == [5.0, 10.0]
        weight.assign(3.0)

    return use


@made_before(*BOTH)
def a_function_in_which_replicas_run_in_a_later_trace():
    found = []

    @tf.function
    def step(x):
        if not found:
            return tf.reduce_sum(x)
        return found[0].reduce("SUM", found[0].run(tf.reduce_sum, args=(x,)), axis=None)

    assert step(tf.ones([3])) == 3.0

    def use(strategy):
        found[:] = [strategy]
        size = 4 + len(step.experimental_get_tracing_count() * "1")  # a shape of which there is no trace yet
        assert step(tf.ones([size])) == 2.0 * size
        assert step(tf.ones([3])) == 3.0  # the trace of then

    return use


@made_before(*BOTH)
def a_function_of_python_that_runs_replicas_in_a_function():
    """The function was traced when its Python function had not heard of a strategy."""
    found = []

    def on_the_host(x):
        return x if not found else found[0].reduce("SUM", found[0].run(lambda y: y * 2.0, args=(x,)), axis=None)

    @tf.function
    def step(x):
        return tf.py_function(on_the_host, [x], tf.float32)

    assert step(ONE) == 1.0

    def use(strategy):
        found[:] = [strategy]
        assert step(ONE) == 4.0
        found.clear()
        assert step(ONE) == 1.0

    return use


@made_before(*BOTH)
def a_function_of_python_in_a_replica():
    from tensorflow import numpy_function, py_function

    @tf.function
    def step(x):
        return py_function(lambda x: x * 2.0, [x], tf.float32) + numpy_function(lambda x: x + x, [x], tf.float32)

    assert step(ONE) == 4.0

    def use(strategy):
        assert run(strategy, lambda x: tf.ensure_shape(step(x), []), numbered(strategy)) == [4.0, 8.0]

    return use


@made_before(MIRRORED)
def a_function_that_xla_compiles_for_one_device():
    fn = tf.function(lambda x: total(x) * 2.0, jit_compile=True)
    assert fn(ONE) == 2.0

    def use(strategy):
        from replica_engine.errors import MergeCallGraphError

        with pytest.raises(MergeCallGraphError, match="jit_compile=True"):
            run(strategy, lambda x: fn(x), numbered(strategy))

    return use


@made_before(*BOTH)
def a_function_that_fails_in_a_replica():
    """Its error has the user's lines."""

    @tf.function
    def checked(x):
        if context().num_replicas_in_sync > 1:
            raise ValueError("too many")
        return x

    assert checked(ONE) == 1.0

    def use(strategy):
        with pytest.raises(ValueError, match="too many") as failure:
            tf.function(lambda x: strategy.run(lambda y: checked(y), args=(x,)))(ONE)
        said = "".join(traceback.format_exception(failure.value))
        assert "in checked" in said
        assert ("replica 0 of 2" in said) != strategy.extended.backend.compiles

    return use


@made_before(*BOTH)
def a_step_in_a_loop_over_steps():
    """A function with a loop, traced alone, in which a later trace has replicas."""
    found = []

    @tf.function
    def train(x, count):
        so_far = tf.zeros_like(x)
        for _ in tf.range(count):
            so_far += found[0].reduce("SUM", found[0].run(tf.identity, args=(x,)), axis=None) if found else x
        return so_far

    assert train(tf.ones([2]), TWO).numpy().tolist() == [2.0, 2.0]

    def use(strategy):
        found[:] = [strategy]
        shape = [1] * (1 + train.experimental_get_tracing_count())
        assert float(tf.reduce_sum(train(tf.ones(shape), TWO))) == 4.0

    return use


@made_before(*BOTH)
def names_of_tf_distribute():
    distribute = tf.distribute
    set_strategy, get_strategy = distribute.experimental_set_strategy, distribute.get_strategy
    has_strategy, in_cross_replica_context = distribute.has_strategy, distribute.in_cross_replica_context
    default = get_strategy()
    assert not has_strategy()
    assert not in_cross_replica_context()

    def use(strategy):
        set_strategy(strategy)
        try:
            assert has_strategy()
            assert in_cross_replica_context()
            assert get_strategy() is strategy
            variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
            result = strategy.run(lambda: (variable.assign_add(1.0), tf.constant(1.0))[1])
            assert strategy.reduce(distribute.ReduceOp.SUM, result, axis=None) == 2.0
            assert float(variable) == 3.0
        finally:
            set_strategy(None)
        assert get_strategy() is default

    return use
