"""What the steps of a device loop pass out."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.loop_steps import looped, make_total, numbers

from replica_engine import xla
from replica_engine.errors import InputsError, LoweringError

BOTH = pytest.mark.parametrize("context", ["replica", "cross-replica"])


@BOTH
def test_an_output_is_reduced_over_replicas_and_of_the_last_step(two, context):
    reduce_op = tf.distribute.ReduceOp
    expected = {"SUM": 21.0, "sum": 21.0, "MEAN": 10.5, reduce_op.SUM: 21.0, reduce_op.MEAN: 10.5}

    def step(context, x):
        for op in expected:
            context.set_last_step_output(repr(op), x, op)

    batches = [two.spread(lambda i, step=step: 10.0 * (i + step)) for step in (5, 3)]
    batches.append(two.spread(lambda i: 10.0 + i))
    outputs = looped(two, context, step, batches).last_step_outputs
    assert all(tf.is_tensor(output) for output in outputs.values())
    assert {name: float(output) for name, output in outputs.items()} == {
        repr(op): value for op, value in expected.items()
    }


@BOTH
def test_an_output_that_is_not_reduced_has_a_value_for_each_replica(two, context):
    def step(context, x):
        context.set_last_step_output("x", x)

    output = looped(two, context, step, [two.spread(lambda i: 5.0), two.spread(lambda i: 10.0 + i)])
    value = output.last_step_outputs["x"]
    assert isinstance(value, tf.distribute.DistributedValues)
    assert two.each(value) == [10.0, 11.0]


@BOTH
def test_outputs_may_be_structures_and_numbers(two, context):
    def step(context, x):
        context.set_last_step_output("sums", {"x": x, "more": [x + 1.0, (x * 2.0,)]}, "SUM")
        context.set_last_step_output("each", {"x": x, "more": [x + 1.0, (x * 2.0,)]})
        context.set_last_step_output("ints", tf.cast(x, tf.int32), "SUM")
        context.set_last_step_output("mean of ints", tf.cast(x, tf.int32), "MEAN")
        context.set_last_step_output("constants", [3, 0, 0.5], "SUM")
        context.set_last_step_output("constant", 7)

    outputs = looped(two, context, step, [two.spread(lambda i: i + 1.0)]).last_step_outputs
    plain = {
        name: tf.nest.map_structure(lambda each: each.numpy().item(), outputs[name])
        for name in outputs
        if "each" not in name and name != "constant"
    }
    assert plain == {
        "sums": {"x": 3.0, "more": [5.0, (6.0,)]},
        "ints": 3,
        "mean of ints": 1.5,
        "constants": [6, 0, 1.0],
    }
    assert two.each(outputs["each"]["x"]) == [1.0, 2.0]
    assert two.each(outputs["each"]["more"][1][0]) == [2.0, 4.0]
    assert two.each(outputs["constant"]) == [7, 7]


def test_an_output_that_is_set_twice_is_what_was_set_last(two):
    def step(context, x):
        context.set_last_step_output("x", x, "SUM")
        context.set_last_step_output("x", x + 1.0)

    outputs = two.strategy.run_steps(step, numbers(2), 2).last_step_outputs
    assert two.each(outputs["x"]) == [2.0, 2.0]


def test_an_output_of_an_unknown_shape_says_so(two):
    def step(context, x):
        context.set_last_step_output("found", tf.where(x > 0.0))

    with pytest.raises(LoweringError, match=r"shape that depends on data"):
        two.strategy.run_steps(step, [np.ones(3, np.float32)], 1)


def test_an_output_may_be_a_string(two):
    def step(context, x):
        context.set_last_step_output("text", tf.strings.as_string(tf.cast(x, tf.int32) + 10))

    context = two.strategy.run_steps(step, numbers(3), 3)
    assert two.each(context.last_step_outputs["text"]) == [b"12", b"12"]


def test_any_object_can_be_passed_out_while_tracing_and_comes_again_from_later_calls(two, launched):
    thing = object()

    def in_replica(context, x):
        context.set_non_tensor_output("thing", thing)
        context.set_non_tensor_output("name", "step")

    def across(context, x):
        context.set_non_tensor_output("thing", thing)
        context.set_non_tensor_output("names", ["a", "b"])

    before = xla.counts()
    for iterations in (2, 3):
        outputs = two.strategy.run_steps(in_replica, numbers(3), iterations).non_tensor_outputs
        assert outputs == {"thing": (thing, thing), "name": ("step", "step")}
        outputs = looped(two, "cross-replica", across, numbers(iterations)).non_tensor_outputs
        assert outputs == {"thing": thing, "names": ["a", "b"]}
    assert (xla.counts() - before).traces == 2
    assert launched() == 4


def test_what_is_done_to_a_context_is_not_seen_in_the_next_one(two):
    def step(context, x):
        context.set_non_tensor_output("name", "step")
        context.set_last_step_output("x", x)

    first = two.strategy.run_steps(step, numbers(1), 1)
    first.non_tensor_outputs["more"] = first.last_step_outputs["more"] = 1
    del first.non_tensor_outputs["name"]
    second = two.strategy.run_steps(step, numbers(1), 1)
    assert second.non_tensor_outputs == {"name": ("step", "step")}
    assert list(second.last_step_outputs) == ["x"]


def test_a_context_has_the_number_of_steps_and_an_operation_for_old_programs(two):
    context = two.strategy.run_steps(lambda context, x: None, numbers(5), 3)
    assert context.steps == 3
    assert context.run_op is None
    assert context.last_step_outputs == context.non_tensor_outputs == {}


def test_initial_values_give_way_to_what_steps_pass_out(two):
    _, step = make_total(two)
    initial = {"x": tf.constant(-1.0)}
    context = two.strategy.run_steps(step, numbers(2), 2, initial_loop_values=initial)
    assert two.each(context.last_step_outputs["x"]) == [1.0, 1.0]
    with pytest.raises(tf.errors.OutOfRangeError) as raised:
        two.strategy.run_steps(step, [], 2, initial_loop_values=initial)
    assert raised.value.context.last_step_outputs == initial
    with pytest.raises(tf.errors.OutOfRangeError) as raised:
        two.strategy.extended.experimental_run_steps_on_iterator(step, iter([]), 2, initial)
    assert raised.value.context.last_step_outputs == initial


@BOTH
def test_names_of_outputs_need_no_order(two, context):
    def step(context, x):
        context.set_last_step_output("name", x, "SUM")
        context.set_last_step_output(1, 2.0 * x, "SUM")

    outputs = looped(two, context, step, [two.spread(lambda i: 10.0 + i)]).last_step_outputs
    assert {name: float(value) for name, value in outputs.items()} == {"name": 21.0, 1: 42.0}


def set_in_if(context, x):
    if x > 3.0:
        context.set_last_step_output("loss", x, "MEAN")


def set_in_both_branches(context, x):
    if x > 3.0:
        context.set_last_step_output("loss", 2.0 * x)
    else:
        context.set_last_step_output("loss", 3.0 * x)


def set_in_cond(context, x):
    def positive():
        context.set_last_step_output("loss", 1.0, "SUM")
        return x

    tf.cond(x > 3.0, positive, lambda: x)


def set_in_loop(context, x):
    for _ in tf.range(2):
        x += 1.0
        context.set_last_step_output("loss", x)


def set_in_function(context, x):
    inner = tf.function(lambda x: context.set_last_step_output("loss", x, "MEAN"))
    inner(x)


def set_to_a_tensor_of_a_branch(context, x):
    kept = []
    tf.cond(x > 3.0, lambda: kept.append(x + 1.0) or x, lambda: x)
    context.set_last_step_output("loss", kept[0], "MEAN")


@BOTH
@pytest.mark.parametrize(
    "step", [set_in_if, set_in_both_branches, set_in_cond, set_in_loop, set_in_function, set_to_a_tensor_of_a_branch]
)
def test_an_output_of_a_branch_is_an_error_that_names_the_line(two, context, step):
    with pytest.raises(InputsError, match=r"'loss' is set at .*test_step_outputs\.py:\d+ in .*before the branch"):
        looped(two, context, step, [two.spread(lambda i: 5.0)])


@BOTH
def test_an_output_may_get_its_value_in_a_branch(two, context):
    def step(context, x):
        loss = 0.0
        if x > 10.0:
            loss = x
        context.set_last_step_output("loss", loss, "SUM")

    output = looped(two, context, step, [two.spread(lambda i: 10.0 + i)])
    assert float(output.last_step_outputs["loss"]) == 11.0


def test_an_output_that_is_known_outside_may_be_set_in_a_branch(two):
    """It is set whether the branch is taken or not, as ever."""

    def step(context, x):
        doubled = 2.0 * x
        if x > 100.0:
            context.set_last_step_output("x", doubled)

    output = looped(two, "replica", step, [two.spread(lambda i: 10.0 + i)])
    assert two.each(output.last_step_outputs["x"]) == [20.0, 22.0]
