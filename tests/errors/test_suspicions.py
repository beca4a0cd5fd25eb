"""Programs that run and do not do what is wanted: datasets, batches, tapes and variables in the wrong place."""

import keras
import numpy as np
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.errors import (
    InputsError,
    warn_dataset_for_each,
    warn_foreign_optimizer,
    warn_shared_variable,
    warn_tape_outside,
    warn_whole_batch,
)


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


@shows(warn_foreign_optimizer, "fit")
def test_two_optimizers_for_fit_that_are_built_outside_the_scope():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
    for rate in (0.1, 0.01):
        optimizer = keras.optimizers.SGD(rate, name="sgd")
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, epochs=2, verbose=0)


@shows(InputsError.distributed)
def test_a_distributed_dataset_given_to_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))

    def epoch(dataset):
        return sum(tf.reduce_sum(batch) for batch in dataset)

    strategy.run(epoch, args=(dataset,))


@shows(warn_dataset_for_each)
def test_a_dataset_given_to_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = tf.data.Dataset.range(8).batch(4)

    def epoch(dataset):
        return sum(tf.reduce_sum(batch) for batch in dataset)

    print(strategy.reduce("SUM", strategy.run(epoch, args=(dataset,)), axis=None).numpy(), "instead of", sum(range(8)))


@shows(warn_whole_batch)
def test_a_batch_that_was_not_distributed():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return tf.reduce_sum(x)

    for batch in tf.data.Dataset.range(8).batch(4):
        strategy.run(step, args=(batch,))


@shows(warn_whole_batch, "compiled")
def test_a_batch_that_was_not_distributed_to_a_compiled_body():
    strategy = TPUStrategy(num_cores=2)

    def step(x, y):
        return tf.reduce_sum(x * y)

    for batch in tf.data.Dataset.from_tensor_slices((np.ones(8), np.ones(8))).batch(4):
        strategy.run(step, args=batch)


@shows(warn_whole_batch, "in_function")
def test_a_batch_that_was_not_distributed_to_a_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return tf.reduce_sum(x)

    @tf.function
    def train_step(batch):
        return strategy.run(step, args=(batch,))

    for batch in tf.data.Dataset.range(8).batch(4):
        train_step(batch)


@shows(warn_whole_batch, "in_compiled_function")
def test_a_loop_over_a_dataset_that_was_not_distributed():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return tf.reduce_sum(x)

    @tf.function
    def epoch(dataset):
        for batch in dataset:
            strategy.run(step, args=(batch,))

    epoch(tf.data.Dataset.range(8).batch(4, drop_remainder=True))


@shows(warn_tape_outside)
def test_a_tape_around_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(3.0)

    with tf.GradientTape() as tape:
        loss = strategy.reduce("SUM", strategy.run(lambda: weight * weight), axis=None)
    print(tape.gradient(loss, weight))


@shows(warn_tape_outside, "compiled")
def test_a_tape_around_a_compiled_run():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        weight = tf.Variable(3.0)

    def step():
        return weight * weight

    with tf.GradientTape() as tape:
        losses = strategy.experimental_local_results(strategy.run(step))
    print(tape.gradient(losses[0], weight))


@shows(warn_tape_outside, "in_function")
def test_a_tape_around_run_in_a_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(3.0)

    @tf.function
    def gradient():
        with tf.GradientTape() as tape:
            loss = strategy.reduce("SUM", strategy.run(lambda: weight * weight), axis=None)
        return tape.gradient(loss, weight)

    print(gradient())


@shows(warn_tape_outside, "in_compiled_function")
def test_a_tape_around_a_compiled_run_in_a_function():
    strategy = TPUStrategy(num_cores=2)

    @tf.function
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            losses = strategy.experimental_local_results(strategy.run(lambda x: x * x, args=(x,)))
        return tape.gradient(losses[0], x)

    print(gradient(tf.constant(3.0)))


@shows(warn_shared_variable)
def test_a_plain_variable_that_all_replicas_write():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    steps = tf.Variable(0, name="steps")

    def step():
        steps.assign_add(1)

    strategy.run(step)
    strategy.run(step)
    print("steps:", steps.numpy())


@shows(warn_shared_variable, "equal")
def test_a_plain_variable_to_which_compiled_replicas_add():
    strategy = TPUStrategy(num_cores=2)
    samples = tf.Variable(0, name="samples")

    def step(x):
        samples.assign_add(len(x))

    batch = strategy.experimental_distribute_values_from_function(lambda context: tf.ones([4]))
    strategy.run(step, args=(batch,))
    print("samples:", samples.numpy())


@shows(warn_shared_variable, "compiled")
def test_a_plain_variable_in_a_compiled_body():
    strategy = TPUStrategy(num_cores=2)
    total = tf.Variable(0.0, name="total")

    def step(x):
        total.assign_add(x)

    def value(context):
        return tf.constant([1.0, 10.0][context.replica_id_in_sync_group])

    strategy.run(step, args=(strategy.experimental_distribute_values_from_function(value),))
    print("total:", total.numpy())


@shows(warn_shared_variable, "names")
def test_two_plain_variables_of_one_name_in_a_traced_step():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    seen = tf.Variable(0, name="seen")
    kept = tf.Variable(0, name="seen")

    @tf.function
    def train():
        def step():
            seen.assign_add(2)
            kept.assign_sub(3)

        strategy.run(step)

    for _ in range(2):
        train()
    print("seen:", seen.numpy(), "kept:", kept.numpy())


@shows(warn_shared_variable, "metrics")
def test_two_keras_metrics_outside_the_scope_of_compiled_replicas():
    strategy = TPUStrategy(num_cores=2)
    loss, error = keras.metrics.Mean(name="mean"), keras.metrics.Mean(name="mean")

    @tf.function
    def train(batch):
        def step(x):
            loss.update_state(x)
            error.update_state(x * x)

        strategy.run(step, args=(batch,))

    train(strategy.experimental_distribute_values_from_function(lambda context: tf.ones([2])))
    print("loss:", loss.count.numpy(), "error:", error.count.numpy())


@shows(warn_shared_variable, "many")
def test_more_plain_variables_than_warnings():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    counts = [tf.Variable(0, name=f"count_{number}") for number in range(7)]

    def step():
        for count in counts:
            count.assign_add(1)

    strategy.run(step)
