"""Distributed datasets: nothing lost, nothing twice, in eager loops and inside a tf.function."""

import pytest
import tensorflow as tf


def numbers(n, batch):
    return tf.data.Dataset.range(n).batch(batch)


def batches(strategy, distributed):
    """For each global batch, what each replica got."""
    return [[one.numpy().tolist() for one in strategy.experimental_local_results(batch)] for batch in distributed]


def flat(batches):
    return [number for batch in batches for part in batch for number in part]


def test_a_global_batch_is_split_over_the_replicas(strategy, n):
    distributed = strategy.experimental_distribute_dataset(numbers(16, 8))
    size = 8 // n
    assert batches(strategy, distributed) == [
        [list(range(start + i * size, start + (i + 1) * size)) for i in range(n)] for start in (0, 8)
    ]


def test_a_last_partial_batch_loses_no_example(strategy, n):
    """One that is smaller than the number of replicas is padded with nothing."""
    found = batches(strategy, strategy.experimental_distribute_dataset(numbers(13, 8)))
    assert len(found) == 2
    assert all(len(batch) == n for batch in found)
    assert sorted(flat(found)) == list(range(13))
    last = batches(strategy, strategy.experimental_distribute_dataset(numbers(9, 8)))[-1]
    assert last == [[8]] + [[]] * (n - 1)


def test_dropping_the_remainder_gives_static_shapes(strategy, n):
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(13).batch(8, drop_remainder=True))
    found = batches(strategy, distributed)
    assert flat(found) == list(range(8))
    spec = distributed.element_spec
    first = spec if n == 1 else spec._component_specs[0]
    assert first.shape == [8 // n]


@pytest.mark.replicas(2)
def test_a_dataset_can_be_gone_through_again(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers(8, 4))
    assert flat(batches(strategy, distributed)) == list(range(8))
    assert flat(batches(strategy, distributed)) == list(range(8))


@pytest.mark.replicas(2)
def test_structures_are_kept(strategy):
    dataset = tf.data.Dataset.from_tensor_slices({"x": [1.0, 2.0, 3.0, 4.0], "y": ([1, 2, 3, 4],)}).batch(4)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    locally = strategy.experimental_local_results(batch)
    assert [number for one in locally for number in one["x"].numpy()] == [1.0, 2.0, 3.0, 4.0]
    assert [number for one in locally for number in one["y"][0].numpy()] == [1, 2, 3, 4]


@pytest.mark.threads("shapes that differ")
@pytest.mark.replicas(1, 2)
def test_batches_feed_a_run(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers(13, 8))
    sums = [int(strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)) for batch in distributed]
    assert sums == [sum(range(8)), sum(range(8, 13))]


@pytest.mark.graphs
@pytest.mark.threads("shapes that differ")
def test_a_loop_inside_a_function_takes_every_batch(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers(13, 8))

    @tf.function
    def epoch(distributed):
        total, steps = tf.constant(0, tf.int64), tf.constant(0)
        for batch in distributed:
            total += strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)
            steps += 1
        return total, steps

    assert [int(number) for number in epoch(distributed)] == [sum(range(13)), 2]


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_an_all_reduce_inside_a_dataset_loop(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers(16, 8).map(lambda x: tf.cast(x, tf.float32)))

    @tf.function
    def epoch():
        total = 0.0
        for batch in distributed:
            sums = strategy.run(
                lambda x: tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_sum(x)), args=(batch,)
            )
            total += strategy.experimental_local_results(sums)[-1]
        return total

    assert float(epoch()) == sum(range(16))


@pytest.mark.graphs
@pytest.mark.replicas(1, 2)
def test_an_iterator_keeps_its_place_between_steps(strategy):
    @tf.function
    def step(iterator):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(next(iterator),)), axis=None)

    iterator = iter(strategy.experimental_distribute_dataset(numbers(24, 8)))
    assert [int(step(iterator)) for _ in range(3)] == [sum(range(k, k + 8)) for k in (0, 8, 16)]
    with pytest.raises(tf.errors.OutOfRangeError):
        step(iterator)
    endless = iter(strategy.experimental_distribute_dataset(numbers(8, 8).repeat()))
    assert [int(step(endless)) for _ in range(5)] == [28] * 5


@pytest.mark.replicas(2)
def test_an_eager_iterator_ends_with_stop_iteration(strategy, n):
    dataset = strategy.experimental_distribute_dataset(numbers(8, 8))
    iterator = iter(dataset)
    assert [part.shape[0] for part in strategy.experimental_local_results(next(iterator))] == [8 // n] * n
    with pytest.raises(StopIteration):
        next(iterator)
    iterator = iter(dataset)
    first = iterator.get_next_as_optional()
    assert bool(first.has_value())
    assert sum(int(tf.reduce_sum(part)) for part in strategy.experimental_local_results(first.get_value())) == 28
    assert not bool(iterator.get_next_as_optional().has_value())


@pytest.mark.replicas(4)
def test_a_dataset_function_gets_its_place_and_keeps_its_batches(strategy, n):
    """Batches of a dataset function are a replica's, not split."""
    seen = []

    def dataset_fn(context):
        seen.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        return numbers(16, context.get_per_replica_batch_size(8))

    found = batches(strategy, strategy.distribute_datasets_from_function(dataset_fn))
    assert seen == [(1, 0, n)]
    assert [[len(part) for part in batch] for batch in found] == [[8 // n] * n] * 2
    assert flat(found) == list(range(16))


@pytest.mark.replicas(1, 2)
def test_a_batch_size_that_does_not_divide_is_refused(strategy, n):

    def dataset_fn(context):
        if n == 1:
            assert context.get_per_replica_batch_size(n + 1) == 2
        else:
            with pytest.raises(ValueError, match="is not divisible by"):
                context.get_per_replica_batch_size(n + 1)
        return numbers(n, 1)

    assert flat(batches(strategy, strategy.distribute_datasets_from_function(dataset_fn))) == list(range(n))


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_a_distributed_batch_matches_the_element_spec(strategy):
    distributed = strategy.experimental_distribute_dataset(numbers(16, 8))

    @tf.function(input_signature=[distributed.element_spec])
    def step(batch):
        return strategy.reduce("SUM", strategy.run(tf.reduce_sum, args=(batch,)), axis=None)

    assert [int(step(batch)) for batch in distributed] == [28, sum(range(8, 16))]
