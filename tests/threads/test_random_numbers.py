"""What random ops without a seed of their own draw on each replica."""

import pytest
import tensorflow as tf
from helpers.devices import DEVICES

import replica_engine


@pytest.fixture(autouse=True)
def _no_seed_after_the_test():
    yield
    tf.random.set_seed(None)


def draws(size, traced=False, **options):
    """What each replica draws in two runs, and what is drawn after them."""
    strategy = replica_engine.MirroredStrategy(DEVICES[:size], **options)
    tf.random.set_seed(3)

    def draw():
        first = tf.random.normal([])
        tf.distribute.get_replica_context().all_reduce("SUM", first)
        return tf.stack([first, tf.random.uniform([])])

    fn = tf.function(draw) if traced else draw
    runs = [[part.numpy().tolist() for part in strategy.experimental_local_results(strategy.run(fn))] for _ in "12"]
    return [*zip(*runs, strict=True)], float(tf.random.normal([]))


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_replicas_draw_by_their_ids(traced):
    """Replica r draws the same whatever the number of replicas, and the global stream goes on as on one device."""
    (one, after_one), (four, after_four) = draws(1, traced), draws(4, traced)
    assert four[0] == one[0]
    assert after_four == after_one
    assert len(set(map(str, four))) == 4


def test_replica_0_draws_what_one_device_draws():
    tf.random.set_seed(3)
    plain = [[float(tf.random.normal([])), float(tf.random.uniform([]))] for _ in "12"]
    assert [list(each) for each in draws(4)[0][0]] == plain


def test_the_order_of_replicas_does_not_count():
    assert draws(4, concurrent=True) == draws(4)


def test_a_seed_set_by_each_replica_is_the_seed_of_what_it_draws_next():
    tf.random.set_seed(3)

    def draw():
        before = tf.random.uniform([])
        tf.random.set_seed(5)
        return before, tf.random.uniform([])

    before, after = replica_engine.MirroredStrategy(DEVICES[:2]).run(draw)
    assert len({float(value) for value in before.values}) == 2
    tf.random.set_seed(5)
    assert [float(value) for value in after.values] == [float(tf.random.uniform([]))] * 2


@pytest.mark.parametrize("size", [1, 4])
def test_loops_and_branches_of_a_graph_draw_by_replica(size):
    strategy = replica_engine.MirroredStrategy(DEVICES[:size])
    tf.random.set_seed(3)

    def draw():
        # One iteration after the other: TensorFlow lets them draw in any order otherwise, on one device as well.
        mapped = tf.map_fn(lambda x: x + tf.random.uniform([]), tf.zeros([2]), parallel_iterations=1)
        chosen = tf.cond(mapped[0] > -1.0, lambda: tf.random.normal([]), lambda: 0.0)
        return tf.concat([mapped, chosen[None]], 0)

    drawn = strategy.experimental_local_results(tf.function(lambda: strategy.run(draw))())
    assert len({tuple(value.numpy().tolist()) for value in drawn}) == size
    tf.random.set_seed(3)
    assert drawn[0].numpy().tolist() == tf.function(draw)().numpy().tolist()
