"""Programs that run and do not do what is wanted: datasets, optimizers and variables in the wrong place."""

import keras
import tensorflow as tf
from helpers.golden import eager_only, shows

from replica_engine import MirroredStrategy
from replica_engine.errors.run_errors import warn_dataset_for_each, warn_foreign_optimizer, warn_shared_variable


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")


@shows(warn_foreign_optimizer)
def test_an_optimizer_that_is_made_and_built_outside_the_scope():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
    optimizer = keras.optimizers.Adam(0.1, name="adam")
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for _ in range(2):
        strategy.run(step, args=(tf.ones([4, 3]),))
    print("iterations:", optimizer.iterations.numpy())


@shows(warn_dataset_for_each)
@eager_only("TensorFlow never ends a Python loop over a dataset while it traces")
def test_a_dataset_given_to_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = tf.data.Dataset.range(8).batch(4)

    def epoch(dataset):
        return sum(tf.reduce_sum(batch) for batch in dataset)

    totals = strategy.run(epoch, args=(dataset,))
    print(strategy.reduce("SUM", totals, axis=None).numpy(), "instead of", sum(range(8)))


@shows(warn_shared_variable)
def test_a_plain_variable_that_all_replicas_write():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    steps = tf.Variable(0, name="steps")

    def step():
        steps.assign_add(1)

    train = tf.function(lambda: strategy.run(step))
    train()
    train()
    print("steps:", steps.numpy())
