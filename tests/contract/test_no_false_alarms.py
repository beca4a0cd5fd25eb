"""Programs that are right, and close to those of which the library warns: none of them is warned of."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import compiled
from helpers.on_mirrored import index
from helpers.warned import when_warned


@pytest.fixture(autouse=True)
def warnings():
    """The warnings that the library logs; a test fails that has some at its end, unless it has cleared them."""
    seen: list[str] = []
    with when_warned(seen.append):
        yield seen
    assert seen == []


def test_batches_of_a_distributed_dataset(strategy):
    for batch in strategy.experimental_distribute_dataset(tf.data.Dataset.range(16).batch(8)):
        strategy.run(tf.reduce_sum, args=(batch,))


@pytest.mark.parametrize(
    ("synchronization", "aggregation"), [("ON_WRITE", "SUM"), ("ON_READ", "SUM"), ("ON_READ", "MEAN")]
)
def test_variables_of_the_scope(strategy, synchronization, aggregation):
    with strategy.scope():
        total = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization[synchronization],
            aggregation=tf.VariableAggregation[aggregation],
        )

    def step(x):
        total.assign_add(x)

    x = strategy.experimental_distribute_values_from_function(lambda context: tf.ones([]))
    tf.function(lambda: strategy.run(step, args=(x,)))()


def test_a_plain_variable_that_gets_what_all_replicas_reduced(strategy, n):
    mean = tf.Variable(0.0)

    def step(x):
        mean.assign(tf.distribute.get_replica_context().all_reduce("MEAN", x))

    x = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(float(context.replica_id_in_sync_group))
    )
    tf.function(lambda: strategy.run(step, args=(x,)))()
    assert mean.numpy() == (n - 1) / 2


def test_a_plain_variable_that_a_merge_function_writes(strategy):
    count = tf.Variable(0.0)

    def add(strategy):
        count.assign_add(2.0)

    def step():
        tf.distribute.get_replica_context().merge_call(add)

    tf.function(lambda: strategy.run(step))()
    assert count.numpy() == 2.0


@pytest.mark.threads("a compiled body has no Python index of the replica")
def test_a_plain_variable_of_each_replica(strategy, n):
    mine = [tf.Variable(0.0) for _ in range(n)]

    def step():
        mine[index()].assign_add(1.0)

    tf.function(lambda: strategy.run(step))()
    assert [each.numpy() for each in mine] == [1.0] * len(mine)


@pytest.mark.threads("a compiled body has no Python index of the replica")
def test_branches_that_meet_in_one_line_and_loops(strategy):
    def mean(x):
        return tf.distribute.get_replica_context().all_reduce("MEAN", x)

    def step():
        first = index() == 0
        x = mean(1.0) if first else mean(2.0)
        for _ in range(3):
            x = mean(mean(x) + 1.0)
        return x

    strategy.run(step)
    tf.function(lambda: strategy.run(step))()


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_fit_with_dropout_metrics_and_a_rest(strategy, n):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    x, y = np.ones((5 * n, 3), "float32"), np.ones((5 * n, 1), "float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(2 * n)
    model.fit(batches, verbose=0)
    model.evaluate(batches, verbose=0)
    model.predict(batches, verbose=0)


WITHOUT_A_REST = {
    "left out": lambda samples: samples.batch(4, drop_remainder=True),
    "taken before": lambda samples: samples.take(8).batch(4),
    "taken after": lambda samples: samples.batch(4).take(2),
    "filtered": lambda samples: samples.batch(4).filter(lambda x, y: tf.shape(x)[0] == 4),
    "batched again": lambda samples: samples.batch(5).unbatch().take(8).batch(4, num_parallel_calls=2),
    "filled up": lambda samples: samples.batch(4).map(lambda x, y: (tf.repeat(x[:1], 4, 0), tf.repeat(y[:1], 4, 0))),
    "never reached": lambda samples: samples.batch(4).repeat(),
}


@pytest.mark.replicas(2)
def test_fit_of_a_dataset_whose_rest_never_comes(strategy, warnings):
    with strategy.scope():
        model = compiled([keras.Input((3,)), keras.layers.Dense(1)], "sgd", "mse", run_eagerly=True)
    samples = tf.data.Dataset.from_tensor_slices((np.ones((11, 3), "float32"), np.ones((11, 1), "float32")))
    for name, batched in WITHOUT_A_REST.items():
        model.optimizer.iterations.assign(0)
        model.fit(batched(samples), steps_per_epoch=2, verbose=0)
        assert (int(model.optimizer.iterations.numpy()), warnings) == (2, []), name


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_an_evaluation_with_a_rest_that_does_not_divide(strategy):
    with strategy.scope():
        model = compiled([keras.Input((3,)), keras.layers.Dense(1)], "sgd", "mse", metrics=["mae"])
    model.evaluate(np.ones((11, 3), "float32"), np.ones((11, 1), "float32"), batch_size=4, verbose=0)
