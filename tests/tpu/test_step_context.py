"""The context of the steps of a device loop, and what they raise while they are traced."""

import pytest
import tensorflow as tf
from helpers.host_work import Failing
from helpers.loop_steps import SUM, make_total, numbers, replica_context

from replica_engine.errors import LoweringError

# The contexts of steps.


def test_a_step_is_in_replica_context_and_may_do_what_programs_do_with_a_strategy(two):
    strategy = two.strategy
    kinds = []

    def step(context, x):
        kinds.append((tf.distribute.in_cross_replica_context(), tf.distribute.get_strategy() is strategy))
        outputs = {
            "id": replica_context().replica_id_in_sync_group,
            "all": replica_context().all_reduce("SUM", x),
            "merged": replica_context().merge_call(lambda s, x: s.extended.reduce_to("MEAN", x, "CPU:0"), (x,)),
            "run": strategy.run(lambda x: replica_context().all_reduce("SUM", x) + x, args=(x,)),
            "called": strategy.extended.call_for_each_replica(lambda x: x * 3.0, args=(x,)),
            "reduced": strategy.reduce("SUM", strategy.run(lambda x: x * 2.0, args=(x,)), axis=None),
            "reduced along": strategy.reduce("MEAN", tf.stack([x, x + 1.0]), axis=0),
            "local": strategy.experimental_local_results(x)[1],
        }
        context.set_last_step_output("all", outputs)

    x = two.spread(lambda i: i + 1.0)
    outputs = strategy.run_steps(step, [x, x], 2).last_step_outputs["all"]
    assert kinds == [(False, True)]
    assert {name: two.each(value) for name, value in outputs.items()} == {
        "id": [0, 1],
        "all": [3.0, 3.0],
        "merged": [1.5, 1.5],
        "run": [4.0, 5.0],
        "called": [3.0, 6.0],
        "reduced": [6.0, 6.0],
        "reduced along": [2.0, 2.0],
        "local": [2.0, 2.0],
    }


def test_a_step_of_extended_is_in_cross_replica_context_as_tensorflow_documents(two):
    strategy = two.strategy
    total = two.variable(0.0, SUM)
    kinds = []

    def replica_fn(x, y):
        total.assign_add(x)
        return x + y

    def step(context, inputs):
        kinds.append((tf.distribute.in_cross_replica_context(), tf.distribute.get_strategy() is strategy, type(inputs)))
        both = strategy.extended.call_for_each_replica(replica_fn, args=inputs)
        again = strategy.run(replica_fn, args=inputs)
        context.set_last_step_output("sum", both, tf.distribute.ReduceOp.SUM)
        context.set_last_step_output("each", again)
        context.set_last_step_output("reduced", strategy.reduce("MEAN", both, axis=None))
        context.set_last_step_output("local", strategy.experimental_local_results(both)[1])

    x = two.spread(lambda i: i + 1.0)
    context = strategy.extended.experimental_run_steps_on_iterator(step, [(x, x)] * 3, 3)
    assert kinds == [(True, True, tuple)]
    outputs = context.last_step_outputs
    assert float(outputs["sum"]) == 6.0
    assert two.each(outputs["each"]) == [2.0, 4.0]
    assert two.each(outputs["reduced"]) == [3.0, 3.0]
    assert two.each(outputs["local"]) == [4.0, 4.0]
    assert total.numpy() == 3 * 2 * 3.0


# Failures of a step.


@pytest.mark.parametrize("error", [Failing(7), StopIteration("no more")], ids=repr)
def test_what_a_step_raises_while_it_is_traced_is_raised(two, launched, error):
    total, good = make_total(two)

    def step(context, x):
        total.assign_add(x)
        raise error

    with pytest.raises(type(error)) as raised:
        two.strategy.run_steps(step, numbers(3), 3)
    assert raised.value is error
    assert launched() == 0
    two.strategy.run_steps(good, numbers(3), 3)
    assert total.numpy() == 6.0


def test_what_xla_cannot_compile_is_named_with_the_line_of_the_step(two):
    def step(context, x):
        total.assign_add(x * tf.cast(next(iter(tf.data.Dataset.range(3))), tf.float32))

    total = two.variable(0.0, SUM)
    with pytest.raises(LoweringError, match=r"`step` uses \w+ at .*test_step_context.py:\d+ in step") as raised:
        two.strategy.run_steps(step, numbers(3), 3)
    line = step.__code__.co_firstlineno + 1
    assert f"test_step_context.py:{line}" in str(raised.value)
