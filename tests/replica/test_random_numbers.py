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
