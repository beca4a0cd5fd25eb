"""The contrib `TPUStrategy` of 2018 on its towers: calls for each of them, their input, and the system."""

import pytest
import tensorflow as tf
from helpers.towers import FIRST, HOST, MEAN, SUM, each, make, numbers, one_shot, spread

from replica_engine import xla
from replica_engine.compat import contrib
from replica_engine.errors import ContribError

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
    merge_fn = lambda distribution, x, plus, times=1.0: sum(distribution.unwrap(x)) * times + plus  # noqa: E731
    tower_fn = lambda x: contrib.get_tower_context().merge_call(merge_fn, x, 0.5, times=10.0)  # noqa: E731
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


# Input.


def test_a_batch_of_a_distributed_data_set_is_for_one_tower(distribution):
    iterator = one_shot(distribution, numbers(8, 2))
    assert each(distribution, iterator.get_next()) == [[0.0, 1.0], [2.0, 3.0]]
    sums = distribution.call_for_each_tower(tf.reduce_sum, iterator.get_next())
    assert each(distribution, sums) == [4.0 + 5.0, 6.0 + 7.0]
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


def test_the_documented_example_of_distribute_dataset(distribution):
    dataset_fn = lambda: tf.data.Dataset.from_tensors([[1.0]]).repeat()  # noqa: E731
    with distribution.scope():
        iterator = distribution.distribute_dataset(dataset_fn).make_one_shot_iterator()
        tower_results = distribution.call_for_each_tower(lambda x: 2.0 * x, iterator.get_next())
    assert each(distribution, tower_results) == [[[2.0]], [[2.0]]]


def test_an_initializable_iterator_starts_again(distribution):
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
