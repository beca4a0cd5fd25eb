"""Device loops: what `run_steps` cannot take, and what it adds to what ends its inputs."""

import tensorflow as tf
from helpers.golden import shows

from replica_engine import TPUStrategy
from replica_engine.errors import (
    HostAccessError,
    InputsError,
    note_kept_steps,
    note_no_context,
    warn_whole_batch_of_steps,
)


@shows(InputsError.bad_iterations)
def test_no_steps():
    strategy = TPUStrategy(num_cores=2)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(64).batch(8))

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    strategy.run_steps(step, iter(batches), iterations=64 / 8)


@shows(InputsError.no_iterator)
def test_a_number_for_an_iterator():
    strategy = TPUStrategy(num_cores=2)

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    strategy.run_steps(step, 100)


@shows(InputsError.no_step)
def test_a_step_without_the_context():
    strategy = TPUStrategy(num_cores=2)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(64).batch(8))

    def step(x):
        return tf.reduce_sum(x)

    strategy.run_steps(step, iter(batches), iterations=8)


@shows(InputsError.no_step, "of_parts")
def test_a_step_of_two_parts_that_takes_three():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices((tf.zeros([64, 3]), tf.zeros([64]))).batch(8)
    batches = strategy.experimental_distribute_dataset(dataset)

    def step(context, x, y, weights):
        context.set_last_step_output("loss", tf.reduce_sum(weights * (x - y) ** 2), "SUM")

    strategy.run_steps(step, iter(batches), iterations=8)


@shows(note_no_context)
def test_a_step_that_takes_its_context_for_a_part_of_the_batch():
    strategy = TPUStrategy(num_cores=2)
    dataset = tf.data.Dataset.from_tensor_slices((tf.zeros([64]), tf.zeros([64]))).batch(8)
    batches = strategy.experimental_distribute_dataset(dataset)

    def step(x, y):
        return tf.reduce_sum((x - y) ** 2)

    strategy.run_steps(step, iter(batches), iterations=8)


@shows(warn_whole_batch_of_steps)
def test_an_iterator_of_a_dataset_that_was_not_distributed():
    strategy = TPUStrategy(num_cores=2)
    batches = iter(tf.data.Dataset.range(64).batch(8))

    def step(context, x):
        context.set_last_step_output("sum", tf.reduce_sum(x), "SUM")

    context = strategy.run_steps(step, batches, iterations=8)
    print("of the last batch:", context.last_step_outputs["sum"].numpy(), "instead of", sum(range(56, 64)))


@shows(InputsError.steps_in_function)
def test_a_loop_in_a_function():
    strategy = TPUStrategy(num_cores=2)
    batches = iter(tf.data.Dataset.range(64).batch(8))

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    @tf.function
    def train():
        strategy.run_steps(step, batches, iterations=8)

    train()


@shows(InputsError.uneven_batch)
def test_a_first_batch_that_cannot_be_shared_evenly():
    strategy = TPUStrategy(num_cores=2)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(64).batch(9))

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    strategy.run_steps(step, iter(batches), iterations=7)


@shows(InputsError.other_batch)
def test_a_batch_of_another_structure():
    strategy = TPUStrategy(num_cores=2)
    batches = [{"x": tf.zeros([4])}, {"x": tf.zeros([4])}, {"features": tf.zeros([4])}]

    def step(context, batch):
        context.set_last_step_output("loss", tf.reduce_sum(batch["x"]), "SUM")

    strategy.run_steps(step, batches, iterations=3)


@shows(InputsError.other_batch_shape)
def test_a_last_batch_that_is_smaller():
    strategy = TPUStrategy(num_cores=2)
    batches = strategy.experimental_distribute_dataset(tf.data.Dataset.range(20).batch(8))

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    strategy.run_steps(step, iter(batches), iterations=3)


@shows(InputsError.bad_output_name)
def test_an_output_named_by_a_list():
    strategy = TPUStrategy(num_cores=2)
    batches = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(64).batch(8)))

    def step(context, x):
        context.set_last_step_output(["loss"], tf.reduce_sum(x), "SUM")

    strategy.run_steps(step, batches, iterations=8)


@shows(InputsError.output_of_branch)
def test_an_output_that_is_set_in_a_branch():
    strategy = TPUStrategy(num_cores=2)

    def step(context, x):
        if x > 3.0:
            context.set_last_step_output("loss", x, "MEAN")

    strategy.run_steps(step, [tf.constant(2.0), tf.constant(4.0)], 2)


@shows(InputsError.bad_initial_values)
def test_initial_values_without_names():
    strategy = TPUStrategy(num_cores=2)
    batches = iter(tf.data.Dataset.range(64).batch(8))

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    strategy.run_steps(step, batches, iterations=8, initial_loop_values=[0])


@shows(HostAccessError.in_inputs)
def test_inputs_that_look_at_a_variable():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        scale = tf.Variable(1.0)

    def batches():
        yield tf.ones([4])
        yield tf.ones([4]) * scale

    def step(context, x):
        scale.assign_add(tf.reduce_sum(x))

    strategy.run_steps(step, batches(), iterations=2)


@shows(note_kept_steps)
def test_inputs_that_fail():
    strategy = TPUStrategy(num_cores=2)

    def batches():
        yield tf.zeros([4])
        yield tf.zeros([4])
        raise OSError("the disk is gone")

    def step(context, x):
        context.set_last_step_output("loss", tf.reduce_sum(x), "SUM")

    strategy.run_steps(step, batches(), iterations=10)
