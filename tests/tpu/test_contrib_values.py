"""Values of each tower of the contrib `TPUStrategy` of 2018: reduced, broadcast, unwrapped and grouped."""

import pytest
import tensorflow as tf
from helpers.towers import FIRST, HOST, MEAN, NONE, SUM, each, merged, named, spread, variable

from replica_engine.errors import ContribError

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
    reason = r"cannot be reduced with the aggregation .*\. The aggregation must be one of SUM, MEAN, ONLY_FIRST_TOWER\."
    with pytest.raises(ContribError, match=reason):
        distribution.reduce(aggregation, value, HOST)
    with pytest.raises(ContribError, match=reason):
        distribution.batch_reduce(aggregation, [(value, HOST)])
    with pytest.raises(ContribError, match=reason):
        merged(distribution, lambda distribution, x: distribution.reduce(aggregation, x, x), value)


@pytest.mark.parametrize("destinations", ["/device:GPU:0", "/device:CPU:1", [HOST, "/job:worker/device:CPU:0"]])
def test_a_destination_that_is_not_the_host_says_what_to_write(distribution, destinations):
    value = spread(distribution, 1.0, 3.0)
    reason = r"cannot be put on '/.*: outside a step all values are on the host\. Pass '/job:localhost"
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
    added = distribution.call_for_each_tower(lambda: v.assign_add(tf.identity(one)))
    assert distribution.group(added, name="train") is None
    assert v.numpy() == 2.0
    assert distribution.group(one) is one

    def merge_fn(distribution, x):
        with tf.control_dependencies([distribution.group(distribution.update(v, lambda v: v.assign(5.0)))]):
            return tf.identity(x)

    assert merged(distribution, merge_fn, spread(distribution, 1.0, 3.0)) == [1.0, 3.0]
    assert v.numpy() == 5.0
