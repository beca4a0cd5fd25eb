"""Steps with the contrib `TPUStrategy` of 2018: outputs of the last one, data that ends, and an estimator."""

import collections

import numpy as np
import pytest
import tensorflow as tf
from helpers.towers import FIRST, HOST, MEAN, NONE, SUM, make, numbers, one_shot, sums, variable

from replica_engine.compat import contrib
from replica_engine.errors import ContribError


def test_outputs_of_the_last_step_are_aggregated_in_every_way(distribution):
    def step_fn(context, x):
        total = distribution.call_for_each_tower(tf.reduce_sum, x)
        for aggregation in (SUM, MEAN, FIRST, NONE):
            context.set_last_step_output(aggregation.name, total, aggregation)
        context.set_last_step_output("FIRST_TOWER", total, "ONLY_FIRST_TOWER")
        context.set_last_step_output("default", total)
        context.set_last_step_output("structure", {"x": (total, 2.0 * total)}, aggregation=SUM)

    context = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(100, 2)), iterations=3)
    first, second = sums(distribution, 12)[2]
    outputs = context.last_step_outputs
    assert outputs["SUM"] == first + second
    assert outputs["MEAN"] == (first + second) / 2
    assert outputs["ONLY_FIRST_REPLICA"] == outputs["FIRST_TOWER"] == first
    assert outputs["structure"] == {"x": (first + second, 2 * (first + second))}
    for name in ("NONE", "default"):
        assert type(outputs[name]) is list
        assert outputs[name] == [first, second]


def test_outputs_can_be_set_in_tower_context_of_an_argument(distribution):
    def model_fn(context, x):
        for aggregation in (SUM, MEAN, FIRST):
            context.set_last_step_output(name=aggregation.name, output=tf.reduce_sum(x), aggregation=aggregation)

    def step_fn(context, x):
        distribution.call_for_each_tower(model_fn, context, x)

    context = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(100, 2)), 2)
    first, second = sums(distribution, 12)[1]
    assert context.last_step_outputs["SUM"] == first + second
    assert context.last_step_outputs["MEAN"] == (first + second) / 2
    assert context.last_step_outputs["ONLY_FIRST_REPLICA"] == first


@pytest.mark.parametrize(
    ("aggregation", "words"),
    [
        ((), r"'mine' is set in tower context and needs an aggregation: SUM, MEAN or"),
        (("MEDIAN",), r"MEDIAN\. The aggregation must be one of SUM, MEAN, ONLY"),
    ],
    ids=["none", "no such"],
)
def test_an_output_in_tower_context_needs_an_aggregation_that_there_is(distribution, aggregation, words):
    def step_fn(context, x):
        call = distribution.call_for_each_tower if not aggregation else lambda fn, x: fn(x)
        call(lambda x: context.set_last_step_output("mine", x, *aggregation), x)

    with pytest.raises(ContribError, match=words):
        distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(2)))


@pytest.mark.parametrize("wrapped", [lambda x: x, lambda x: {"x": x}], ids=["tensors", "structures"])
def test_a_list_over_towers_can_be_unwrapped_and_reduced(distribution, wrapped):
    """As TensorFlow's own tests of 2018 do with outputs of the last step."""
    step_fn = lambda context, x: context.set_last_step_output("x", wrapped(x[0]))  # noqa: E731
    outputs = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(2))).last_step_outputs
    assert outputs["x"] == distribution.unwrap(outputs["x"]) == [wrapped(0.0), wrapped(1.0)]
    for aggregation, expected in ((SUM, 1.0), (MEAN, 0.5), (FIRST, 0.0)):
        assert distribution.reduce(aggregation, outputs["x"], HOST) == wrapped(expected)


def test_outputs_that_are_no_tensors(distribution):
    thing = object()

    def step_fn(context, x):
        context.set_non_tensor_output(name="thing", output=thing)
        distribution.call_for_each_tower(lambda: context.set_non_tensor_output("in tower context", "name"))

    context = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(4)), 2)
    assert context.non_tensor_outputs["thing"] is thing
    assert set(context.non_tensor_outputs["in tower context"]) == {"name"}
    assert context.last_step_outputs == {}


def test_initial_loop_values_give_way_to_outputs_and_stay_without_batches(distribution):
    step_fn = lambda context, x: context.set_last_step_output("x", x[0], SUM)  # noqa: E731
    initial = {"x": tf.constant(1e7)}
    iterator = one_shot(distribution, numbers(4))
    context = distribution.run_steps_on_dataset(step_fn, iterator, 2, initial_loop_values=initial)
    assert context.last_step_outputs["x"] == 2 + 3
    with pytest.raises(tf.errors.OutOfRangeError, match="0 of 2 steps") as raised:
        distribution.run_steps_on_dataset(step_fn, iterator, 2, initial_loop_values=initial)
    assert raised.value.context.last_step_outputs["x"] == 1e7
    assert initial == {"x": tf.constant(1e7)}


def test_steps_of_data_that_ends_early_are_kept(distribution):
    total = variable(distribution, 0.0, SUM)

    def step_fn(context, x):
        distribution.call_for_each_tower(lambda x: total.assign_add(x[0]), x)

    with pytest.raises(tf.errors.OutOfRangeError, match="ended after 2 of 5 steps") as raised:
        distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(5)), 5)
    assert raised.value.context.steps == 2
    assert total.numpy() == 0 + 1 + 2 + 3


def test_one_iteration_is_run_if_it_is_not_said_and_a_tuple_is_several_arguments(distribution):
    pairs = lambda: tf.data.Dataset.zip((numbers(8)(), numbers(8, 2)()))  # noqa: E731
    step_fn = lambda context, x, y: context.set_last_step_output("xy", tf.reduce_sum(x) * tf.reduce_sum(y))  # noqa: E731
    context = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, pairs))
    assert context.last_step_outputs["xy"] == [0 * 1, 1 * 5]
    assert context.steps == 1


def test_a_step_function_is_in_cross_tower_context(distribution):
    seen = []

    def step_fn(context, x):
        seen.append((contrib.in_cross_tower_context(), contrib.get_distribution_strategy()))
        context.set_last_step_output("sum", sum(distribution.unwrap(x)), MEAN)

    context = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(4)), 2)
    assert set(seen) == {(True, distribution)}
    assert context.last_step_outputs["sum"] == 2 + 3


EstimatorSpec = collections.namedtuple("EstimatorSpec", "loss train_op predictions")


@pytest.fixture
def linear():
    """Features and labels of batches of 4, and what gradient descent on batches of 8 comes to after each step."""
    random = np.random.default_rng(0)
    x = random.normal(size=(64, 2)).astype("float32")
    y = x @ np.array([[1.0], [-2.0]], "float32")
    kernel, losses, kernels = np.zeros((2, 1), "float32"), [], []
    for step in range(6):
        batch = slice(8 * step, 8 * step + 8)
        error = x[batch] @ kernel - y[batch]
        losses.append(np.mean(error**2))
        kernel = kernel - 0.1 * 2 * x[batch].T @ error / 8
        kernels.append(kernel)
    input_fn = lambda: tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)  # noqa: E731
    return input_fn, losses, kernels


def test_an_estimator_of_2018_trains(linear, launched):
    input_fn, losses, kernels = linear
    distribution = make(2, steps_per_run=3)

    def model_fn(features, labels):
        with tf.GradientTape() as tape:
            predictions = features @ kernel
            loss = tf.reduce_mean((predictions - labels) ** 2)
        gradient = tape.gradient(loss, kernel)

        def apply(distribution, gradient):
            gradient = distribution.reduce(MEAN, gradient, kernel)
            update = distribution.update(kernel, lambda v, g: v.assign_sub(0.1 * g), gradient)
            return distribution.group(update)

        contrib.get_tower_context().merge_call(apply, gradient)
        return EstimatorSpec(loss, tf.group(global_step.assign_add(1)), predictions)

    def step_fn(ctx, features, labels=None):
        spec = distribution.call_for_each_tower(model_fn, features, labels)
        ctx.set_last_step_output(name="loss", output=spec.loss, aggregation=MEAN)
        ctx.set_non_tensor_output(name="estimator_spec", output=spec)
        return spec.train_op

    with distribution.scope():
        iterator = distribution.distribute_dataset(input_fn).make_one_shot_iterator()
        kernel = tf.Variable(tf.zeros([2, 1]), aggregation=MEAN)
        global_step = tf.Variable(0, aggregation=FIRST, trainable=False)
        for step in (3, 6):
            ctx = distribution.run_steps_on_dataset(
                step_fn, iterator, iterations=distribution.steps_per_run, initial_loop_values={"loss": tf.constant(1e7)}
            )
            assert ctx.run_op is None  # has run
            np.testing.assert_allclose(ctx.last_step_outputs["loss"], losses[step - 1], rtol=1e-5)
            np.testing.assert_allclose(kernel.numpy(), kernels[step - 1], rtol=1e-5, atol=1e-6)
            assert distribution.read_var(global_step) == step
    assert isinstance(ctx.non_tensor_outputs["estimator_spec"], EstimatorSpec)
    assert launched() == 2
