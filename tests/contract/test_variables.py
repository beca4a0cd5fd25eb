"""Distributed variables: where they are made, what assigning and reading them means, how they are saved."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_mirrored import context, replica_id

NONE = tf.VariableAggregation.NONE
SUM = tf.VariableAggregation.SUM
MEAN = tf.VariableAggregation.MEAN
FIRST = tf.VariableAggregation.ONLY_FIRST_REPLICA
MIRRORED = [tf.VariableSynchronization.AUTO, tf.VariableSynchronization.ON_WRITE]
ON_READ = tf.VariableSynchronization.ON_READ


def make(strategy, initial, aggregation=NONE, synchronization=tf.VariableSynchronization.AUTO):
    with strategy.scope():
        return tf.Variable(
            initial, aggregation=aggregation, synchronization=synchronization, trainable=synchronization != ON_READ
        )


def components(strategy, variable):
    return [component.numpy().tolist() for component in strategy.experimental_local_results(variable)]


def merged(aggregation, values):
    """What assigning `values`, one a replica, amounts to, as tf.VariableAggregation documents it."""
    return {SUM: sum(values), MEAN: sum(values) / len(values), FIRST: values[0]}[aggregation]


# Creation.


def test_a_variable_has_a_component_on_every_device(strategy):
    v = make(strategy, [1.0, 2.0])
    found = strategy.experimental_local_results(v)
    assert [component.device for component in found] == list(strategy.extended.worker_devices)
    assert components(strategy, v) == [[1.0, 2.0]] * strategy.num_replicas_in_sync
    assert v.distribute_strategy is strategy
    assert isinstance(v, tf.Variable)


def test_a_variable_made_outside_a_scope_is_an_ordinary_one(strategy, local):
    v = tf.Variable(2.0)
    strategy.run(lambda: None)
    assert not isinstance(v, tf.distribute.DistributedValues)
    assert local(strategy.run(lambda: v * 2)) == [4.0] * strategy.num_replicas_in_sync


class Lazy:
    """Makes its variable when first called, as layers do."""

    def __init__(self):
        self.v = None

    def __call__(self):
        if self.v is None:
            self.v = tf.Variable(5.0, name="lazy")
        return self.v * tf.cast(replica_id() + 1, tf.float32)


def test_a_variable_made_in_a_run_is_shared_by_the_replicas(strategy, n, run, local):
    lazy = Lazy()
    for _ in range(2):
        assert local(run(lazy)) == [5.0 * (i + 1) for i in range(n)]
    assert lazy.v.distribute_strategy is strategy
    assert components(strategy, lazy.v) == [5.0] * n


@pytest.mark.threads("Python code in every run")
def test_each_replica_that_makes_a_variable_gets_the_same_one(strategy):
    made = strategy.run(lambda: (tf.Variable(1.0, name="a"), tf.Variable(2.0, name="b"), tf.Variable(3.0, name="a")))
    assert [components(strategy, v) for v in made] == [[k] * strategy.num_replicas_in_sync for k in (1.0, 2.0, 3.0)]
    assert all(v.distribute_strategy is strategy for v in made)


@pytest.mark.threads("Python code of each replica")
@pytest.mark.replicas(2, 4)
def test_replicas_that_make_different_variables_are_refused(strategy):
    with pytest.raises(RuntimeError, match="other"):
        strategy.run(lambda: tf.Variable(1.0, name="first" if int(replica_id()) == 0 else "other"))


def test_synchronization(strategy):
    """NONE is refused, and ON_READ variables are not trainable."""
    with pytest.raises(ValueError, match="`NONE` variable synchronization mode is not supported"):
        make(strategy, 1.0, synchronization=tf.VariableSynchronization.NONE)
    with strategy.scope():
        assert tf.Variable(1.0, synchronization=ON_READ).trainable is False
        assert tf.Variable(1.0).trainable is True


def test_scope_tells_its_variables_from_others(strategy):
    mine = make(strategy, 1.0)
    other = tf.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(mine)
    assert not strategy.extended.variable_created_in_scope(other)


# Mirrored variables: one value, kept equal on every write.


@pytest.mark.parametrize(("initial", "number"), [(0, 1), (0.0, 1), (0.0, 1.5), (0.0, np.float32(1.5))])
def test_each_replica_adds_a_python_number_to_a_sum(strategy, n, run, initial, number):
    v = make(strategy, initial, SUM)

    def fn():
        v.assign_add(number)
        v.assign_add(number)
        v.assign_sub(number)

    run(fn)
    assert components(strategy, v) == [n * number] * n


@pytest.mark.parametrize("synchronization", MIRRORED)
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_assigning_a_mirrored_variable_in_replicas_merges(strategy, n, per_replica, synchronization, aggregation):
    v = make(strategy, 100.0, aggregation, synchronization)
    x = per_replica(lambda i: 2.0 * i + 1)
    change = merged(aggregation, [2.0 * i + 1 for i in range(n)])

    strategy.run(lambda x: v.assign(x), args=(x,))
    assert components(strategy, v) == [change] * n
    strategy.run(lambda x: v.assign_add(x), args=(x,))
    assert components(strategy, v) == [2 * change] * n
    strategy.run(lambda x: v.assign_sub(x), args=(x,))
    assert components(strategy, v) == [change] * n


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_assigning_the_same_number_in_replicas_merges(strategy, n, aggregation):
    v = make(strategy, 1.0, aggregation)
    times = n if aggregation == SUM else 1
    strategy.run(lambda: v.assign(3.0))
    strategy.run(lambda: v.assign_add(2.0))
    assert components(strategy, v) == [5.0 * times] * n


def test_a_step_returns_what_each_assignment_gave_and_the_variable_itself(strategy):
    v = make(strategy, 0.0, FIRST)

    def fn():
        return v.assign_add(1.0), v.assign_add(1.0), v.read_value(), v

    *values, returned = strategy.run(fn)
    strategy.run(fn)
    assert [[float(each) for each in strategy.experimental_local_results(value)] for value in values] == [
        [number] * strategy.num_replicas_in_sync for number in (1.0, 2.0, 2.0)
    ]
    assert returned is v


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_replicas_see_what_they_assigned(strategy, n, run, local, per_replica, aggregation):
    v = make(strategy, 0.0, aggregation)

    def fn(x):
        v.assign(x)
        return v.read_value()

    expected = merged(aggregation, [i + 1.0 for i in range(n)])
    assert local(run(fn, args=(per_replica(lambda i: i + 1.0),))) == [expected] * n


def test_without_aggregation_a_replica_assigns_its_own_component(strategy, run, per_replica):
    """tf.VariableAggregation says that NONE is an error here. TensorFlow does this instead, and optimizers need it."""
    v = make(strategy, 0.0, NONE)
    run(lambda x: v.assign_add(x), args=(per_replica(lambda i: i + 1.0),))
    assert components(strategy, v) == [i + 1.0 for i in range(strategy.num_replicas_in_sync)]


def test_print_shows_the_value_of_each_replica(strategy, run):
    v = make(strategy, 5.0)
    run(lambda: v.assign(tf.cast(replica_id(), tf.float32)))
    shown = [f"numpy={float(replica)}" for replica in range(strategy.num_replicas_in_sync)]
    for text in str(v), repr(v):
        assert re.findall(r"numpy=[\d.]+", text) == shown


def test_a_mean_of_integers_is_refused(strategy):
    with pytest.raises(ValueError, match="aggregation=MEAN and a non-floating dtype is not supported"):
        make(strategy, 0, MEAN)


@pytest.mark.parametrize("synchronization", MIRRORED)
@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_assigning_a_mirrored_variable_outside_sets_every_component(strategy, n, synchronization, aggregation):
    v = make(strategy, 1.0, aggregation, synchronization)
    with strategy.scope():
        v.assign(3.0)
        assert components(strategy, v) == [3.0] * n
        v.assign_add(2.0)
        assert components(strategy, v) == [5.0] * n
        v.assign_sub(tf.constant(1.0))
    assert components(strategy, v) == [4.0] * n
    v.assign(7.0)
    assert float(v.numpy()) == float(v.read_value()) == float(v + 0.0) == 7.0
    assert components(strategy, v) == [7.0] * n


def test_assigning_in_a_function_outside_a_run(strategy):
    v = make(strategy, 1.0)

    @tf.function
    def step(x):
        v.assign_add(x)
        return v * 2

    assert float(step(tf.constant(2.0))) == 6.0
    assert components(strategy, v) == [3.0] * strategy.num_replicas_in_sync


def test_scatter_updates_in_replicas_merge(strategy, n, per_replica):
    v = make(strategy, [0.0, 0.0, 0.0, 0.0], SUM)

    def fn(x):
        v.scatter_add(tf.IndexedSlices(tf.stack([x, 100.0]), tf.stack([replica_id(), 3])))

    strategy.run(fn, args=(per_replica(lambda i: i + 1.0),))
    expected = [i + 1.0 if i < n else 0.0 for i in range(4)]
    expected[3] += 100.0 * n
    assert components(strategy, v) == [expected] * n


def test_gradients_flow_to_mirrored_variables(strategy, run, local, per_replica):
    v = make(strategy, 3.0)

    def fn(x):
        with tf.GradientTape() as tape:
            y = v * v * x
        return tape.gradient(y, v)

    assert local(run(fn, args=(per_replica(float),))) == [6.0 * i for i in range(strategy.num_replicas_in_sync)]


# Variables that are synchronized on read: each replica has its own value.


@pytest.mark.parametrize("aggregation", [NONE, SUM])
def test_an_on_read_variable_is_each_replicas_own(strategy, n, run, local, per_replica, aggregation):
    v = make(strategy, 1.0, aggregation, ON_READ)

    def fn(x):
        v.assign(x)
        v.assign_add(2 * x)
        v.assign_sub(1.0)
        return v.read_value()

    expected = [3.0 * (i + 1) - 1 for i in range(n)]
    assert local(run(fn, args=(per_replica(lambda i: i + 1.0),))) == expected
    assert components(strategy, v) == expected


@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST])
def test_reading_an_on_read_variable_outside_aggregates(strategy, per_replica, aggregation):
    v = make(strategy, 0.0, aggregation, ON_READ)
    strategy.run(lambda x: v.assign(x), args=(per_replica(lambda i: 10.0 * i + 1),))
    expected = merged(aggregation, [10.0 * i + 1 for i in range(strategy.num_replicas_in_sync)])
    with strategy.scope():
        assert float(v.read_value()) == expected
        assert float(tf.convert_to_tensor(v)) == expected
        assert float(strategy.extended.read_var(v)) == expected
        assert float(tf.function(lambda: v.read_value())()) == expected
    assert float(v.read_value()) == float(v.numpy()) == expected


@pytest.mark.replicas(2, 4)
def test_an_on_read_variable_without_aggregation_cannot_be_read_outside(strategy):
    v = make(strategy, 0.0, NONE, ON_READ)
    with strategy.scope(), pytest.raises(ValueError, match=r"[Aa]ggregation"):
        v.read_value()


@pytest.mark.parametrize("aggregation", [NONE, SUM, MEAN, FIRST])
def test_assigning_an_on_read_variable_outside(strategy, n, aggregation):
    """With SUM the value is divided among the components, so that reading gives it back."""
    v = make(strategy, 1.0, aggregation, ON_READ)
    with strategy.scope():
        v.assign(8.0, read_value=False)  # with NONE it cannot be read
    assert components(strategy, v) == [8.0 / n if aggregation == SUM else 8.0] * n
    with strategy.scope():
        if aggregation == SUM:
            with pytest.raises(ValueError, match="does not support `assign_add` in cross-replica context"):
                v.assign_add(2.0)
            with pytest.raises(ValueError, match="does not support `assign_sub` in cross-replica context"):
                v.assign_sub(2.0)
            assert float(v.read_value()) == 8.0
            return
        v.assign_add(2.0, read_value=False)
        v.assign_sub(1.0, read_value=False)
    assert components(strategy, v) == [9.0] * n


# The extended half.


def test_colocated_variables_lie_where_the_first_does(strategy):
    v = make(strategy, 1.0)
    with strategy.scope(), strategy.extended.colocate_vars_with(v):
        w = tf.Variable(2.0)
    found = [component.device for component in strategy.experimental_local_results(w)]
    assert found == [component.device for component in strategy.experimental_local_results(v)]
    assert components(strategy, w) == [2.0] * strategy.num_replicas_in_sync


def test_colocating_with_a_foreign_variable_is_refused(strategy):
    foreign = tf.Variable(1.0)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="must only be passed a variable created in this"),
        strategy.extended.colocate_vars_with(foreign),
    ):
        pass


@pytest.mark.threads("a component for each replica")
def test_update_calls_a_function_on_every_component(strategy, n):
    v = make(strategy, 1.0)
    devices = []

    def fn(component, x, *, scale):
        devices.append(component.device)
        return component.assign_add(x * scale)

    with strategy.scope():
        strategy.extended.update(v, fn, args=(tf.constant(2.0),), kwargs={"scale": 10.0})
        results = strategy.extended.update(v, lambda component: tf.constant(component.device), group=False)
    assert components(strategy, v) == [21.0] * n
    assert devices == [one.numpy().decode() for one in results] == list(strategy.extended.worker_devices)


def test_update_gives_each_component_its_part_of_a_mirrored_argument(strategy):
    v, w = make(strategy, 1.0), make(strategy, 5.0)
    with strategy.scope():
        value = strategy.extended.broadcast_to(tf.constant(4.0), destinations=v)
        strategy.extended.update(v, lambda component, x, y: component.assign(x + y), args=(value, w))
    assert components(strategy, v) == [9.0] * strategy.num_replicas_in_sync


def test_update_in_a_merge_function(strategy, n, run, per_replica):
    v = make(strategy, 1.0)

    def merge_fn(strategy, x):
        total = strategy.extended.reduce_to("SUM", x, destinations=v)
        strategy.extended.update(v, lambda component, x: component.assign_add(x), args=(total,))

    run(lambda x: context().merge_call(merge_fn, args=(x,)), args=(per_replica(float),))
    assert components(strategy, v) == [1.0 + sum(range(n))] * n


def test_update_in_a_replica_updates_every_component_once(strategy, run):
    v = make(strategy, 1.0)

    def fn():
        strategy.extended.update(v, lambda component: component.assign_add(2.0))

    run(fn)
    assert components(strategy, v) == [3.0] * strategy.num_replicas_in_sync


def test_reduce_to_a_variable_puts_the_result_on_its_devices(strategy, n, per_replica):
    v = make(strategy, 0.0)
    with strategy.scope():
        total = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, per_replica(float), destinations=v)
        mean = strategy.extended.reduce_to("MEAN", per_replica(float), destinations=v)
    assert [float(one) for one in strategy.experimental_local_results(total)] == [sum(range(n))] * n
    assert [float(one) for one in strategy.experimental_local_results(mean)] == [(n - 1) / 2] * n
    assert [one.device for one in strategy.experimental_local_results(total)] == list(strategy.extended.worker_devices)


def test_reduce_to_one_device_gives_one_value(strategy, per_replica):
    with strategy.scope():
        total = strategy.extended.reduce_to("SUM", per_replica(float), destinations="/cpu:5")
    (value,) = strategy.experimental_local_results(total)
    assert float(value) == sum(range(strategy.num_replicas_in_sync))
    assert value.device.endswith("CPU:5")


def test_batch_reduce_to_reduces_each_pair(strategy, n, per_replica):
    v, w = make(strategy, 0.0), make(strategy, [0.0, 0.0])
    pairs = [(per_replica(float), v), (per_replica(lambda i: [1.0, 2.0 * i]), w)]
    with strategy.scope():
        first, second = strategy.extended.batch_reduce_to("SUM", pairs)
    total = float(sum(range(n)))
    assert [float(one) for one in strategy.experimental_local_results(first)] == [total] * n
    assert [one.numpy().tolist() for one in strategy.experimental_local_results(second)] == [[n, 2 * total]] * n


def test_broadcast_to_puts_a_value_on_every_device(strategy):
    v = make(strategy, 0.0)
    with strategy.scope():
        value = strategy.extended.broadcast_to(tf.constant([1.0, 2.0]), destinations=v)
    results = strategy.experimental_local_results(value)
    assert [one.numpy().tolist() for one in results] == [[1.0, 2.0]] * strategy.num_replicas_in_sync
    assert [one.device for one in results] == list(strategy.extended.worker_devices)


def test_non_slot_devices_are_where_updates_run(strategy):
    v = make(strategy, 0.0)
    with strategy.scope():
        devices = strategy.extended.non_slot_devices([v])
        results = strategy.extended.update_non_slot(devices, lambda x: x + 1.0, args=(2.0,), group=False)
    assert list(devices) == list(strategy.extended.worker_devices)
    assert [float(one) for one in results] == [3.0] * strategy.num_replicas_in_sync


def test_value_container_is_the_variable_a_component_belongs_to(strategy):
    v = make(strategy, 2.5)
    with strategy.scope():
        assert float(strategy.extended.read_var(v)) == 2.5
    for component in strategy.experimental_local_results(v):
        assert strategy.extended.value_container(component) is v
    x = tf.constant(1.0)
    assert strategy.extended.value_container(x) is x


# Random numbers.


def test_components_start_equal_though_the_initializer_is_random(strategy, n):
    with strategy.scope():
        v = tf.Variable(lambda: tf.random.normal([3]))
    assert components(strategy, v) == [components(strategy, v)[0]] * n


@pytest.mark.replicas(2, 4)
def test_a_generator_made_in_scope_gives_replicas_different_numbers(strategy, n, local):
    with strategy.scope():
        generator = tf.random.Generator.from_seed(1234)
    numbers = local(strategy.run(lambda: generator.uniform([])))
    assert len(set(numbers)) == n


# Saving.


def test_a_checkpoint_brings_back_what_was_saved(strategy, n, tmp_path, per_replica):
    variables = {
        "mirrored": make(strategy, 2.0, MEAN),
        "sum": make(strategy, 0.0, SUM, ON_READ),
        "mean": make(strategy, 0.0, MEAN, ON_READ),
    }
    for name in ("sum", "mean"):
        strategy.run(lambda x, v=variables[name]: v.assign(x), args=(per_replica(lambda i: 4.0 * i),))
    saved = {name: float(v.numpy()) for name, v in variables.items()}
    assert saved == {"mirrored": 2.0, "sum": 4.0 * sum(range(n)), "mean": 2.0 * (n - 1)}
    path = tf.train.Checkpoint(**variables).save(str(tmp_path / "checkpoint"))

    with strategy.scope():
        for v in variables.values():
            v.assign(99.0)
    tf.train.Checkpoint(**variables).restore(path).assert_consumed()
    assert {name: float(v.numpy()) for name, v in variables.items()} == saved
    assert components(strategy, variables["sum"]) == [saved["sum"] / n] * n  # the sum is shared out
    assert components(strategy, variables["mean"]) == [saved["mean"]] * n


def test_a_checkpoint_can_be_read_without_a_strategy_and_back(strategy, tmp_path):
    path = tf.train.Checkpoint(v=make(strategy, 3.0)).save(str(tmp_path / "distributed"))
    plain = tf.Variable(0.0)
    tf.train.Checkpoint(v=plain).restore(path).assert_consumed()
    assert float(plain) == 3.0

    plain.assign(4.0)
    path = tf.train.Checkpoint(v=plain).save(str(tmp_path / "plain"))
    v = make(strategy, 0.0)
    tf.train.Checkpoint(v=v).restore(path).assert_consumed()
    assert components(strategy, v) == [4.0] * strategy.num_replicas_in_sync


class Scaler(tf.Module):
    def __init__(self):
        super().__init__()
        self.scale = tf.Variable(3.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def __call__(self, x):
        return x * self.scale


def test_a_saved_model_loads_with_and_without_a_strategy(strategy, n, tmp_path, local):
    with strategy.scope():
        module = Scaler()
    tf.saved_model.save(module, str(tmp_path))

    alone = tf.saved_model.load(str(tmp_path))
    assert alone(tf.constant([2.0])).numpy().tolist() == [6.0]

    with strategy.scope():
        loaded = tf.saved_model.load(str(tmp_path))
    assert components(strategy, loaded.scale) == [3.0] * n
    loaded.scale.assign(5.0)
    assert local(strategy.run(loaded, args=(tf.constant([2.0]),))) == [[10.0]] * n


@pytest.mark.parametrize("aggregation", [SUM, tf.VariableAggregation.MEAN])
@pytest.mark.parametrize("value", [2.0, [1.0, 2.0]])
def test_numpy_takes_a_variable_of_which_each_replica_has_its_own(strategy, value, aggregation):
    on_read = tf.VariableSynchronization.ON_READ
    with strategy.scope():
        v = tf.Variable(value, synchronization=on_read, aggregation=aggregation)
    for array in (np.asarray(v), np.array(v), keras.ops.convert_to_numpy(v)):
        assert array.shape == v.shape
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, v.numpy())
