"""Variables with the contrib `TPUStrategy` of 2018: read, updated and colocated."""

import tensorflow as tf
from helpers.towers import HOST, MEAN, SUM, each, merged, spread, variable


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
    merge_fn = lambda distribution, x: distribution.update(v, assign, distribution.reduce(SUM, x, v), times=10.0)  # noqa: E731
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


def test_what_update_returns_is_a_structure_of_lists_over_towers_if_it_is_no_variable(distribution):
    v = variable(distribution, 1.0)
    assert distribution.update(v, lambda v, x: v + x, 2.0, grouped=False) == [3.0, 3.0]
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
