"""The contrib `TPUStrategy` of 2018: each name does what TensorFlow 1.12 documents for it."""

import collections
import pathlib
import re
import runpy

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import xla
from replica_engine.compat import contrib
from replica_engine.errors import ContribError

SUM = tf.VariableAggregation.SUM
MEAN = tf.VariableAggregation.MEAN
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA  # 2018's ONLY_FIRST_TOWER
NONE = tf.VariableAggregation.NONE
HOST = "/device:CPU:0"

METHODS = [
    "batch_reduce",
    "broadcast",
    "call_for_each_tower",
    "colocate_vars_with",
    "configure",
    "distribute_dataset",
    "finalize",
    "get_host_cpu_device",
    "group",
    "initialize",
    "map",
    "non_slot_devices",
    "read_var",
    "reduce",
    "run_steps_on_dataset",
    "scope",
    "unwrap",
    "update",
    "update_non_slot",
    "value_container",
]
PROPERTIES = [
    "between_graph",
    "is_single_tower",
    "num_hosts",
    "num_towers",
    "num_towers_per_host",
    "parameter_devices",
    "should_checkpoint",
    "should_init",
    "should_save_summary",
    "worker_device_index",
    "worker_devices",
    "steps_per_run",
]

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "from_contrib.md"


def named(value):
    return getattr(value, "name", str(value))


def make(towers, steps_per_run=1):
    return contrib.TPUStrategy(xla.PjrtClusterResolver("cpu"), steps_per_run, num_cores=towers)


@pytest.fixture
def distribution():
    """Two towers."""
    return make(2)


def spread(distribution, *values):
    """A value that is another one on each tower."""
    return distribution.experimental_distribute_values_from_function(
        lambda context: tf.constant(values[context.replica_id_in_sync_group])
    )


def each(distribution, value):
    """What each tower has of a value."""
    return [np.asarray(one).tolist() for one in distribution.unwrap(value)]


def merged(distribution, merge_fn, *args):
    """What each tower gets from a merge call, of arguments of its own."""

    def tower_fn(*args):
        return contrib.get_tower_context().merge_call(merge_fn, *args)

    return each(distribution, distribution.call_for_each_tower(tower_fn, *args))


def variable(distribution, initial, aggregation=NONE, on_read=False):
    kind = tf.VariableSynchronization.ON_READ if on_read else tf.VariableSynchronization.AUTO
    with distribution.scope():
        return tf.Variable(initial, aggregation=aggregation, synchronization=kind, trainable=not on_read)


def numbers(count, batch=1):
    """Makes a data set of batches 0.0, 1.0, ..."""
    return lambda: tf.data.Dataset.range(count).map(lambda i: tf.cast(i, tf.float32)).batch(batch, drop_remainder=True)


def one_shot(distribution, dataset_fn):
    with distribution.scope():
        return distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()


# Running.


def test_the_documented_example_of_call_for_each_tower(distribution):
    def merge_fn(distribution, three_plus_tower_id):
        return sum(distribution.unwrap(three_plus_tower_id))

    def fn(three):
        tower_ctx = contrib.get_tower_context()
        v = three + tower_ctx.tower_id
        s = tower_ctx.merge_call(merge_fn, v)
        return s + v

    with distribution.scope():
        merged_results = distribution.call_for_each_tower(fn, 3)
        assert each(distribution, merged_results) == [7 + 3, 7 + 4]


def test_call_for_each_tower_takes_arguments_of_each_tower_by_place_and_by_name(distribution):
    x, y = spread(distribution, 1.0, 2.0), spread(distribution, 3.0, 5.0)
    product = distribution.call_for_each_tower(lambda x, y, z: x * y + z, x, z=100.0, y=y, run_concurrently=False)
    assert each(distribution, product) == [103.0, 110.0]


def test_a_merge_function_takes_arguments_by_place_and_by_name(distribution):
    def merge_fn(distribution, x, plus, times=1.0):
        return sum(distribution.unwrap(x)) * times + plus

    def tower_fn(x):
        return contrib.get_tower_context().merge_call(merge_fn, x, 0.5, times=10.0)

    result = distribution.call_for_each_tower(tower_fn, spread(distribution, 1.0, 3.0))
    assert each(distribution, result) == [40.5, 40.5]


def test_the_context_of_a_tower_says_where_it_is(distribution):
    seen = []

    def tower_fn():
        context = contrib.get_tower_context()
        seen.append((context.num_towers, context.is_single_tower, context.distribution_strategy))
        seen.append((contrib.in_cross_tower_context(), contrib.has_distribution_strategy()))
        seen.append(context.device)
        context.merge_call(lambda distribution: seen.append((contrib.in_cross_tower_context(), distribution)))
        return context.tower_id

    assert each(distribution, distribution.call_for_each_tower(tower_fn)) == [0, 1]
    assert seen[:2] == [(2, False, distribution), (False, True)]
    assert "CPU:0" in seen[2]
    assert seen[3] == (True, distribution)


def test_a_scope_is_cross_tower_context(distribution):
    assert not contrib.has_distribution_strategy()
    with distribution.scope():
        assert contrib.get_distribution_strategy() is distribution
        assert contrib.has_distribution_strategy()
        assert contrib.in_cross_tower_context()
        assert contrib.get_tower_context() is None
        assert len(distribution.unwrap(tf.Variable(1.0))) == 2
    assert not contrib.has_distribution_strategy()


def test_map_calls_for_each_element_and_its_result_can_be_reduced_and_unwrapped(distribution):
    result = distribution.map([1.0, 2.0, 3.0], lambda x, times, plus=0.0: x * times + plus, 10.0, plus=1.0)
    assert distribution.unwrap(result) == [11.0, 21.0, 31.0]
    assert distribution.reduce(SUM, result, HOST) == 63.0
    assert distribution.reduce(MEAN, result, HOST) == 21.0
    assert distribution.reduce(FIRST, result, HOST) == 11.0
    assert distribution.reduce(MEAN, distribution.map(tf.constant([1, 2]), lambda x: x), HOST) == 1.5


# Steps.


def sums(distribution, count, batch=2):
    """The sums of batches of numbers, of each step and tower."""
    batches = np.arange(count).reshape(-1, distribution.num_towers, batch)
    return batches.sum(-1).tolist()


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


def test_an_output_in_tower_context_needs_an_aggregation(distribution):
    def step_fn(context, x):
        distribution.call_for_each_tower(lambda x: context.set_last_step_output("mine", x), x)

    with pytest.raises(ContribError, match=r"'mine' is set in tower context and needs an aggregation: SUM, MEAN or"):
        distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(2)))


def test_an_output_with_no_such_aggregation_says_which_there_are(distribution):
    step_fn = lambda context, x: context.set_last_step_output("x", x, "MEDIAN")  # noqa: E731
    with pytest.raises(ContribError, match=r"MEDIAN; it is one of SUM, MEAN, ONLY_FIRST_TOWER"):
        distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(2)))


def test_a_list_over_towers_can_be_unwrapped(distribution):
    step_fn = lambda context, x: context.set_last_step_output("x", x[0])  # noqa: E731
    outputs = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(2))).last_step_outputs
    assert distribution.unwrap(outputs["x"]) == [0.0, 1.0]


@pytest.mark.parametrize(("aggregation", "expected"), [(SUM, 1.0), (MEAN, 0.5), (FIRST, 0.0)], ids=named)
def test_a_list_over_towers_can_be_reduced(distribution, aggregation, expected):
    """As TensorFlow's own tests of 2018 do with outputs of the last step."""
    step_fn = lambda context, x: context.set_last_step_output("x", x[0])  # noqa: E731
    outputs = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(2))).last_step_outputs
    assert float(distribution.reduce(aggregation, outputs["x"], HOST)) == expected


def test_a_list_over_towers_of_structures_can_be_reduced(distribution):
    step_fn = lambda context, x: context.set_last_step_output("x", {"x": x[0]})  # noqa: E731
    outputs = distribution.run_steps_on_dataset(step_fn, one_shot(distribution, numbers(2))).last_step_outputs
    assert outputs["x"] == [{"x": 0.0}, {"x": 1.0}]
    assert distribution.reduce(SUM, outputs["x"], HOST) == {"x": 1.0}


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
                step_fn,
                iterator,
                iterations=distribution.steps_per_run,
                initial_loop_values={"loss": tf.constant(1e7)},
            )
            assert ctx.run_op is None  # has run
            np.testing.assert_allclose(ctx.last_step_outputs["loss"], losses[step - 1], rtol=1e-5)
            np.testing.assert_allclose(kernel.numpy(), kernels[step - 1], rtol=1e-5, atol=1e-6)
            assert distribution.read_var(global_step) == step
    assert isinstance(ctx.non_tensor_outputs["estimator_spec"], EstimatorSpec)
    assert launched() == 2


# Values.


AGGREGATIONS = [(SUM, 4.0), (MEAN, 2.0), (FIRST, 1.0), ("ONLY_FIRST_TOWER", 1.0), ("mean", 2.0)]


@pytest.mark.parametrize(("aggregation", "expected"), AGGREGATIONS, ids=named)
def test_reduce_outside_of_a_step(distribution, aggregation, expected):
    value = spread(distribution, 1.0, 3.0)
    v = variable(distribution, 0.0)
    hosts = ["/cpu:0", HOST, [HOST], distribution.get_host_cpu_device(0), distribution.worker_devices]
    for destinations in (*hosts, v, value):
        assert distribution.reduce(aggregation, value, destinations) == expected
    assert distribution.reduce(aggregation, {"value": (value,)}, HOST) == {"value": (expected,)}


@pytest.mark.parametrize(("aggregation", "expected"), AGGREGATIONS, ids=named)
def test_reduce_in_a_merge_function(distribution, aggregation, expected):
    """To another tensor it is an all-reduce; in a body a device is as good as another."""
    v = variable(distribution, 0.0)

    def merge_fn(distribution, x):
        all_three = [distribution.reduce(aggregation, x, destinations) for destinations in (x, v, "/device:TPU:0")]
        return tf.stack(all_three)

    assert merged(distribution, merge_fn, spread(distribution, 1.0, 3.0)) == [[expected] * 3] * 2


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_list_of_values_of_each_tower_is_reduced_one_by_one(distribution, count):
    """However many there are: two are not those of the two towers."""
    values = [spread(distribution, 1.0 + number, 3.0 + number) for number in range(count)]
    for aggregation, first in ((SUM, 4.0), (FIRST, 1.0)):
        step = 2.0 if aggregation == SUM else 1.0
        found = distribution.reduce(aggregation, values, HOST)
        assert [float(one) for one in found] == [first + step * number for number in range(count)]


def test_reduce_by_the_names_of_its_arguments(distribution):
    value = spread(distribution, 1.0, 3.0)
    assert distribution.reduce(aggregation=SUM, value=value, destinations=HOST) == 4.0


def test_batch_reduce_reduces_each(distribution):
    small, large = spread(distribution, 1.0, 3.0), spread(distribution, [10.0, 20.0], [30.0, 60.0])
    v = variable(distribution, 0.0)
    both = distribution.batch_reduce(aggregation=MEAN, value_destination_pairs=[(small, v), (large, HOST)])
    assert [one.numpy().tolist() for one in both] == [2.0, [20.0, 40.0]]

    def merge_fn(distribution, small, large):
        first, second = distribution.batch_reduce(SUM, [(small, v), (large, large)])
        return first + second

    assert merged(distribution, merge_fn, small, large) == [[44.0, 84.0]] * 2


@pytest.mark.parametrize("aggregation", [NONE, "NONE", "MEDIAN", None, 7], ids=repr)
def test_an_aggregation_that_does_not_reduce_says_which_do(distribution, aggregation):
    value = spread(distribution, 1.0, 3.0)
    reason = r"cannot be reduced with the aggregation .*; it is one of SUM, MEAN, ONLY_FIRST_TOWER\."
    with pytest.raises(ContribError, match=reason):
        distribution.reduce(aggregation, value, HOST)
    with pytest.raises(ContribError, match=reason):
        distribution.batch_reduce(aggregation, [(value, HOST)])
    with pytest.raises(ContribError, match=reason):
        merged(distribution, lambda distribution, x: distribution.reduce(aggregation, x, x), value)


@pytest.mark.parametrize("destinations", ["/device:GPU:0", "/device:CPU:1", [HOST, "/job:worker/device:CPU:0"]])
def test_a_destination_that_is_not_the_host_says_what_to_write(distribution, destinations):
    value = spread(distribution, 1.0, 3.0)
    reason = r"cannot be put on '/.*: outside a step all values are on the host\. Write '/job:localhost"
    for use in (
        lambda: distribution.reduce(SUM, value, destinations),
        lambda: distribution.batch_reduce(SUM, [(value, destinations)]),
        lambda: distribution.broadcast(1.0, destinations),
    ):
        with pytest.raises(ContribError, match=reason):
            use()


def test_broadcast_is_the_same_on_every_tower(distribution):
    v = variable(distribution, 0.0)
    for destinations in (None, v, HOST, distribution.worker_devices):
        value = distribution.broadcast(tf.constant(2.0), destinations)
        doubled = distribution.call_for_each_tower(lambda x: 2.0 * x, value)
        assert each(distribution, value) == [2.0, 2.0]
        assert each(distribution, doubled) == [4.0, 4.0]
    add = lambda distribution, x: distribution.broadcast(distribution.reduce(SUM, x, HOST)) + 1.0  # noqa: E731
    assert merged(distribution, add, spread(distribution, 1.0, 3.0)) == [5.0, 5.0]


def test_unwrap_is_a_list_of_what_towers_have_or_of_a_single_value(distribution):
    v = variable(distribution, 0.0, SUM, on_read=True)
    distribution.call_for_each_tower(lambda x: v.assign(x), spread(distribution, 1.0, 3.0))
    assert [one.numpy() for one in distribution.unwrap(v)] == [1.0, 3.0]
    single = tf.constant(1.0)
    for value in (single, 7, "name"):
        found = distribution.unwrap(value)
        assert type(found) is list
        assert len(found) == 1
        assert found[0] is value


def test_the_container_of_a_value_unwraps_to_it(distribution):
    mirrored, on_read = variable(distribution, 0.0), variable(distribution, 0.0, SUM, on_read=True)
    for v in (mirrored, on_read):
        for component in distribution.unwrap(v):
            container = distribution.value_container(component)
            assert container is v
            assert any(one is component for one in distribution.unwrap(container))
    single = tf.constant(1.0)
    assert distribution.value_container(single) is single


def test_group_is_done_when_all_towers_are(distribution):
    v, one = variable(distribution, 0.0, SUM), tf.constant(1.0)
    assert distribution.group(distribution.call_for_each_tower(lambda: v.assign_add(one)), name="train") is None
    assert v.numpy() == 2.0
    assert distribution.group(one) is one

    def merge_fn(distribution, x):
        with tf.control_dependencies([distribution.group(distribution.update(v, lambda v: v.assign(5.0)))]):
            return tf.identity(x)

    assert merged(distribution, merge_fn, spread(distribution, 1.0, 3.0)) == [1.0, 3.0]
    assert v.numpy() == 5.0


# Variables.


def test_read_var_aggregates_what_towers_have_on_their_own(distribution):
    mirrored, mean = variable(distribution, 3.0), variable(distribution, 0.0, MEAN, on_read=True)
    distribution.call_for_each_tower(lambda x: mean.assign(x), spread(distribution, 1.0, 3.0))
    with distribution.scope():
        assert distribution.read_var(mirrored) == 3.0
        assert distribution.read_var(mean) == 2.0
    add = lambda distribution, x: distribution.read_var(mirrored) + x  # noqa: E731
    assert merged(distribution, add, spread(distribution, 10.0, 20.0)) == [13.0, 23.0]


def test_read_var_aggregates_in_a_merge_function(distribution):
    total = variable(distribution, 0.0, SUM, on_read=True)
    distribution.call_for_each_tower(lambda x: total.assign(x), spread(distribution, 1.0, 3.0))
    assert merged(distribution, lambda distribution: distribution.read_var(total)) == [4.0, 4.0]


def test_update_runs_a_function_on_a_variable(distribution):
    v = variable(distribution, 1.0)
    assign = lambda v, x, times=1.0: v.assign_add(times * x)  # noqa: E731
    with distribution.scope():
        assert distribution.update(v, assign, tf.constant(2.0), times=10.0) is v
    assert v.numpy() == 21.0

    def merge_fn(distribution, x):
        return distribution.update(v, assign, distribution.reduce(SUM, x, v), times=10.0)

    assert merged(distribution, merge_fn, spread(distribution, 1.0, 3.0)) == [61.0, 61.0]
    assert v.numpy() == 61.0


def test_update_of_a_variable_of_each_tower_takes_a_value_of_each(distribution):
    v = variable(distribution, 1.0, SUM, on_read=True)
    distribution.update(v, lambda v, x: v.assign_add(x), spread(distribution, 10.0, 20.0))
    assert each(distribution, v) == [11.0, 21.0]


def test_update_that_is_not_grouped_is_a_list_over_towers(distribution):
    v = variable(distribution, 1.0)
    found = distribution.update(v, lambda v, x: v.assign_add(x), 2.0, grouped=False)
    assert type(found) is list
    assert [one.numpy() for one in found] == [3.0, 3.0]

    def merge_fn(distribution, x):
        found = distribution.update(v, lambda v: v.assign_add(1.0), grouped=False)
        assert type(found) is list
        assert len(found) == 2
        return tf.stack(found) + x

    assert merged(distribution, merge_fn, spread(distribution, 10.0, 20.0)) == [[14.0, 14.0], [24.0, 24.0]]


def test_what_update_returns_is_a_list_over_towers_if_it_is_no_variable(distribution):
    v = variable(distribution, 1.0)
    assert distribution.update(v, lambda v, x: v + x, 2.0, grouped=False) == [3.0, 3.0]


def test_what_update_returns_is_a_structure_of_lists_over_towers(distribution):
    v = variable(distribution, 1.0)
    both = lambda v, x: {"sum": v + x, "product": v * x}  # noqa: E731
    assert distribution.update(v, both, 2.0, grouped=False) == {"sum": [3.0, 3.0], "product": [2.0, 2.0]}

    def merge_fn(distribution):
        found = distribution.update(v, lambda v: (v + 1.0, v * 5.0), grouped=False)
        return tf.stack([tf.stack(list(one)) for one in found])

    assert merged(distribution, merge_fn) == [[[2.0, 2.0], [5.0, 5.0]]] * 2


def test_update_non_slot_runs_a_function_where_non_slot_variables_are(distribution):
    v = variable(distribution, 1.0)
    devices = distribution.non_slot_devices([v])
    found = distribution.update_non_slot(devices, lambda x, y: x + y, 1.0, y=2.0, grouped=False)
    assert set(found) == {3.0}
    assert set(devices) <= set(distribution.parameter_devices)

    def merge_fn(distribution, x):
        devices = distribution.non_slot_devices([v])
        return distribution.update_non_slot(devices, lambda x: 2.0 * x, distribution.reduce(SUM, x, HOST))

    assert merged(distribution, merge_fn, spread(distribution, 1.0, 3.0)) == [8.0, 8.0]


def test_update_non_slot_counts_a_step_once(distribution):
    """As the powers of Adam's betas were updated: each copy of the variable once."""
    step, v = variable(distribution, 0), variable(distribution, 1.0)

    def count(distribution):
        distribution.update_non_slot(distribution.non_slot_devices([v]), lambda: step.assign_add(1))
        return distribution.read_var(step)

    with distribution.scope():
        count(distribution)
    assert step.numpy() == 1
    assert merged(distribution, count) == [2, 2]
    assert step.numpy() == 2


def test_colocated_variables_are_where_the_variable_is(distribution):
    with distribution.scope():
        v1 = tf.Variable(1.0)
        with distribution.colocate_vars_with(v1):
            v2, v3 = tf.Variable(2.0), tf.Variable(3.0)
        distribution.update(v1, lambda v1, v2, v3: v1.assign(v2 + 10.0 * v3), v2, v3)
    assert v1.numpy() == 32.0
    assert each(distribution, v2) == [2.0, 2.0]
    distribution.call_for_each_tower(lambda: v3.assign(v2 * v1))
    assert each(distribution, v3) == [64.0, 64.0]


def test_variables_can_be_colocated_with_the_non_slot_devices(distribution):
    with distribution.scope():
        v = tf.Variable(1.0)
        devices = distribution.non_slot_devices([v])
        with distribution.colocate_vars_with(devices):
            power = tf.Variable(0.5)
        distribution.update_non_slot(devices, lambda: power.assign(power * 0.5))
    assert power.numpy() == 0.25


# Input.


def test_a_batch_of_a_distributed_data_set_is_for_one_tower(distribution):
    iterator = one_shot(distribution, numbers(8, 2))
    assert each(distribution, iterator.get_next()) == [[0.0, 1.0], [2.0, 3.0]]
    sums = distribution.call_for_each_tower(tf.reduce_sum, iterator.get_next())
    assert each(distribution, sums) == [4.0 + 5.0, 6.0 + 7.0]
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


def test_the_documented_example_of_distribute_dataset(distribution):
    def dataset_fn():
        return tf.data.Dataset.from_tensors([[1.0]]).repeat()

    with distribution.scope():
        distributed_dataset = distribution.distribute_dataset(dataset_fn)
        iterator = distributed_dataset.make_one_shot_iterator()
        tower_results = distribution.call_for_each_tower(lambda x: 2.0 * x, iterator.get_next())
    assert each(distribution, tower_results) == [[[2.0]], [[2.0]]]


def test_an_initializable_iterator_starts_anew(distribution):
    iterator = distribution.distribute_dataset(numbers(4)).make_initializable_iterator()
    before = each(distribution, iterator.get_next())
    each(distribution, iterator.get_next())
    iterator.initialize()
    assert each(distribution, iterator.get_next()) == before == [[0.0], [1.0]]


def test_a_distributed_data_set_can_be_iterated_over(distribution):
    dataset = distribution.distribute_dataset(numbers(4))
    expected = [[[0.0], [1.0]], [[2.0], [3.0]]]
    assert [each(distribution, batch) for batch in dataset] == expected
    assert [each(distribution, batch) for batch in dataset.make_one_shot_iterator()] == expected


# The system.


def test_one_process_with_one_host_does_everything(distribution):
    assert distribution.num_hosts == 1
    assert distribution.num_towers == distribution.num_towers_per_host == 2
    assert distribution.is_single_tower is False
    assert distribution.between_graph is False
    assert distribution.should_init is True
    assert distribution.should_checkpoint is True
    assert distribution.should_save_summary is True
    host = distribution.get_host_cpu_device(0)
    assert distribution.worker_devices == [host] * 2
    assert set(distribution.parameter_devices) == {host}
    with tf.device(host):
        assert tf.constant(1.0).device == host


def test_a_single_tower_is_one(distribution):
    single = make(1)
    assert single.is_single_tower is True
    assert single.num_towers == single.num_towers_per_host == 1
    assert single.worker_device_index == 0
    value = single.call_for_each_tower(lambda x: x * 2.0, tf.constant(1.5))
    assert each(single, value) == [3.0]
    for aggregation in (SUM, MEAN, FIRST):
        assert single.reduce(aggregation, value, HOST) == 3.0


def test_steps_per_run_is_what_was_given():
    assert make(2, steps_per_run=7).steps_per_run == 7
    assert contrib.TPUStrategy(num_cores=1).steps_per_run == 1


@pytest.mark.parametrize("host", [1, -1])
def test_a_host_that_is_not_there_says_so(distribution, host):
    with pytest.raises(ContribError, match=rf"no host {host}; hosts are numbered from 0 to 0"):
        distribution.get_host_cpu_device(host)


def test_the_index_of_workers_gives_each_tower_its_number(distribution):
    with distribution.scope():
        index = distribution.worker_device_index
        assert each(distribution, distribution.call_for_each_tower(lambda i: 10 * i, index)) == [0, 10]


def test_there_is_nothing_to_initialize_finalize_and_configure(distribution):
    with distribution.scope():
        assert not distribution.initialize()
        distribution.configure()
        distribution.configure(session_config=tf.compat.v1.ConfigProto(), task_type="worker", task_id=0)
        assert each(distribution, distribution.call_for_each_tower(lambda: tf.constant(1.0))) == [1.0, 1.0]
        assert not distribution.finalize()


def test_the_metadata_of_the_system_says_what_devices_there_are():
    resolver = xla.PjrtClusterResolver("cpu")
    metadata = contrib.get_tpu_system_metadata(resolver)
    assert metadata.num_cores == metadata.num_of_cores_per_host == resolver.num_accelerators()["CPU"]
    assert metadata.num_hosts == 1
    assert metadata.devices == [f"CPU:{number}" for number in range(metadata.num_cores)]
    assert isinstance(metadata, contrib.TPUSystemMetadata)


# Today's names on the same object.


def test_today_s_reduce_is_still_there(distribution):
    value = spread(distribution, [1.0, 2.0], [3.0, 4.0])
    for reduce_op in ("SUM", tf.distribute.ReduceOp.SUM):
        assert distribution.reduce(reduce_op, value, axis=None).numpy().tolist() == [4.0, 6.0]
    assert distribution.reduce(tf.distribute.ReduceOp.SUM, value, axis=0) == 10.0
    assert distribution.reduce(tf.distribute.ReduceOp.MEAN, value, 0) == 2.5
    in_function = tf.function(lambda: distribution.reduce("SUM", distribution.run(lambda: tf.constant(1.0)), axis=None))
    assert in_function() == 2.0


@pytest.mark.parametrize("reduce_op", ["SUM", "MEAN"])
def test_today_s_reduce_by_name_reduces_over_an_axis(distribution, reduce_op):
    value = spread(distribution, [1.0, 2.0], [3.0, 4.0])
    expected = {"SUM": 10.0, "MEAN": 2.5}[reduce_op]
    assert distribution.reduce(reduce_op, value, axis=0).numpy().tolist() == expected
    assert distribution.reduce(reduce_op, value, 0).numpy().tolist() == expected


@pytest.mark.parametrize("reduce_op", ["SUM", tf.distribute.ReduceOp.SUM], ids=repr)
def test_today_s_reduce_works_in_a_step_of_run_steps(distribution, reduce_op):
    def step(context, x):
        context.set_last_step_output("sum", distribution.reduce(reduce_op, x, axis=None), "MEAN")

    context = distribution.run_steps(step, [np.float32(1.0)], 1)
    assert context.last_step_outputs["sum"] == 2.0


def test_today_s_run_and_run_steps_are_still_there(distribution, launched):
    total = variable(distribution, 0.0, SUM)

    def step(context, x):
        total.assign_add(x)
        context.set_last_step_output("x", x, "MEAN")

    context = distribution.run_steps(step, [np.float32(1.0), np.float32(2.0)], 2)
    distribution.run(lambda: total.assign_add(tf.constant(10.0)))
    assert launched() == 2
    assert context.last_step_outputs["x"] == 2.0
    assert total.numpy() == 2 * (1 + 2 + 10)
    assert isinstance(distribution, replica_engine.TPUStrategy)


def test_keras_fits(distribution):
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 2)).astype("float32")
    y = x.sum(1, keepdims=True)

    def build():
        layer = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((2,)), layer])
        model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=2)
        return model

    with distribution.scope():
        model = build()
    other = build()
    found, expected = [m.fit(x, y, 8, 2, verbose=0, shuffle=False).history["loss"] for m in (model, other)]
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    np.testing.assert_allclose(model.get_weights()[0], other.get_weights()[0], rtol=2e-5, atol=2e-6)


# The guide.


def old_names():
    """The old names of the guide's table: what is in backquotes in the left column, without arguments."""
    rows = [line.split("|")[1] for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    return [re.split(r"[(\s]", name)[0] for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def test_the_guide_has_every_name_of_the_class():
    assert set(METHODS + PROPERTIES) - set(old_names()) == set()


def test_every_old_name_in_the_guide_is_there():
    owners = {
        "tower_context": contrib.TowerContext,
        "context": contrib.MultiStepContext,
        "contrib.distribute": contrib,
        "tf.VariableAggregation": None,  # TensorFlow's: ONLY_FIRST_REPLICA today
        "tpu": xla,
        "tpu_ops": xla,
    }
    of_module = {"TPUStrategy", "in_cross_tower_context", "get_distribution_strategy", "get_tpu_system_metadata"}
    names = old_names()
    assert of_module <= set(names)
    for name in names:
        owner, _, last = name.rpartition(".")
        there = contrib if name in of_module else owners.get(owner, contrib.TPUStrategy)
        assert there is None or hasattr(there, last), name


def test_names_of_2018_are_methods_and_properties():
    assert all(callable(getattr(contrib.TPUStrategy, name)) for name in METHODS)
    assert all(isinstance(getattr(contrib.TPUStrategy, name), property) for name in PROPERTIES)


def test_the_example_of_the_guide_prints_what_it_says(capsys, tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    (said,) = re.findall(r"print\(.*\)  # (.*)", example)
    program = tmp_path / "example.py"  # in a file: AutoGraph reads its source
    program.write_text(example)
    runpy.run_path(str(program))
    assert capsys.readouterr().out.strip() == said
