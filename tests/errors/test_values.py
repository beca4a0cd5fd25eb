"""Values that replicas cannot be given, or that cannot be brought together."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy, accumulate, join_outputs, split_batch
from replica_engine.errors import NoValueError, ReplicaValueError, note_no_value


@shows(ReplicaValueError.other_size)
def test_a_value_of_a_strategy_of_another_size():
    two, three = TPUStrategy(num_cores=2), TPUStrategy(num_cores=3)

    def replica_id(context):
        return tf.constant(context.replica_id_in_sync_group)

    ids = two.experimental_distribute_values_from_function(replica_id)
    three.run(tf.square, args=(ids,))


@shows(ReplicaValueError.distributed)
def test_a_distributed_value_in_another():
    strategy = TPUStrategy(num_cores=2)

    def replica_id(context):
        return tf.constant(context.replica_id_in_sync_group)

    def all_ids(context):
        return strategy.experimental_distribute_values_from_function(replica_id)

    ids = strategy.experimental_distribute_values_from_function(all_ids)
    strategy.run(tf.square, args=(ids,))


@shows(ReplicaValueError.several)
def test_the_loss_of_a_run_as_a_number():
    strategy = TPUStrategy(num_cores=2)
    loss = strategy.run(tf.square, args=(tf.constant(2.0),))
    print(f"loss {loss:.3f}")


@shows(ReplicaValueError.several, "tensorflow")
def test_the_loss_of_a_run_in_a_function_of_tensorflow():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    losses = strategy.run(tf.square, args=(tf.constant(2.0),))
    tf.reduce_mean(losses)


@shows(ReplicaValueError.several, "if")
def test_whether_replicas_are_done():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def is_done(loss):
        return loss < 0.1

    if strategy.run(is_done, args=(tf.constant(2.0),)):
        print("done")


@shows(ReplicaValueError.several, "replica")
def test_the_value_of_a_run_from_outside_a_replica():
    strategy = TPUStrategy(num_cores=2)
    scales = strategy.run(tf.square, args=(tf.constant(2.0),))

    def step(x):
        return x * (scales + 1.0)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(NoValueError.several)
def test_the_array_of_a_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    loss = strategy.run(tf.square, args=(tf.constant(2.0),))
    print(loss.numpy())


@shows(ReplicaValueError.endless)
def test_a_list_that_contains_itself():
    strategy = TPUStrategy(num_cores=2)
    history = [tf.constant(1.0)]
    history.append(history)

    def step(history):
        return history[0]

    strategy.run(step, args=(history,))


@shows(ReplicaValueError.no_tensor, "gradient")
def test_a_gradient_that_is_none():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        used, unused = tf.Variable(2.0), tf.Variable(3.0)

    def step(x):
        with tf.GradientTape() as tape:
            loss = used * x
        gradients = tape.gradient(loss, [used, unused])
        return tf.distribute.get_replica_context().all_reduce("SUM", gradients)

    strategy.run(step, args=(tf.constant(1.0),))


def test_compiled_replicas_say_that_a_gradient_is_none():
    with pytest.raises(ReplicaValueError, match=r"all_reduce is None\. A tape gives None"):
        TPUStrategy(num_cores=2).run(
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", [tf.constant(1.0), None])
        )


@shows(ReplicaValueError.no_tensor)
def test_a_number_that_is_too_large():
    strategy = TPUStrategy(num_cores=2)

    def step(batch):
        return batch["x"]

    strategy.run(step, args=({"x": np.array([1.0, "a"], dtype=object)},))


@shows(ReplicaValueError.not_reducible)
def test_a_sum_of_texts():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step():
        context = tf.distribute.get_replica_context()
        return f"replica {tf.get_static_value(context.replica_id_in_sync_group)}"

    strategy.reduce("SUM", strategy.run(step), axis=None)


@shows(ReplicaValueError.sum_of_one)
def test_a_sum_of_a_variable():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(1.0)
    strategy.reduce("SUM", weight, axis=None)


@shows(ReplicaValueError.sum_of_one, "number")
def test_a_sum_of_a_python_number():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def count():
        return 1.0

    strategy.reduce("SUM", strategy.run(count), axis=None)


@shows(ReplicaValueError.not_added)
def test_a_sum_of_truths():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def is_positive(x):
        return x > 0.0

    strategy.reduce("SUM", strategy.run(is_positive, args=(tf.constant(1.0),)), axis=None)


@shows(ReplicaValueError.no_such_axis)
def test_a_mean_of_losses_along_the_batch():
    strategy = TPUStrategy(num_cores=2)
    losses = strategy.run(tf.square, args=(tf.constant(2.0),))
    strategy.reduce("MEAN", losses, axis=0)


@shows(ReplicaValueError.other_shapes)
def test_a_sum_of_unequal_parts_of_a_batch():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def part(context):
        return tf.ones([2 - context.replica_id_in_sync_group])

    parts = strategy.experimental_distribute_values_from_function(part)
    strategy.reduce("SUM", parts, axis=None)


@shows(ReplicaValueError.swapped)
def test_the_values_before_the_reduction():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    losses = strategy.run(tf.square, args=(tf.constant(2.0),))
    strategy.reduce(losses, "SUM", axis=None)


@shows(ReplicaValueError.bad_reduction)
def test_a_largest_value():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    losses = strategy.run(tf.square, args=(tf.constant(2.0),))
    strategy.reduce("MAX", losses, axis=None)


@shows(ReplicaValueError.bad_reduction, "average")
def test_an_average():
    strategy = TPUStrategy(num_cores=2)
    losses = strategy.run(tf.square, args=(tf.constant(2.0),))
    strategy.reduce("AVG", losses, axis=None)


@shows(note_no_value)
def test_a_function_of_numpy():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return x / np.sum(x)

    strategy.run(step, args=(tf.constant([1.0, 2.0]),))


@shows(note_no_value, "exp")
def test_a_function_of_numpy_that_is_written_in_c():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def step(x):
        return strategy.run(lambda part: np.exp(part), args=(x,))

    step(tf.constant([1.0, 2.0]))


@shows(note_no_value, "if")
def test_a_condition_without_autograph():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def rectified(x):
        return x if x > 0.0 else 0.0

    @tf.function(autograph=False)
    def step(x):
        return strategy.run(rectified, args=(x,))

    step(tf.constant(1.0))


@shows(note_no_value, "float")
def test_a_python_number_without_autograph():
    strategy = TPUStrategy(num_cores=2)

    @tf.autograph.experimental.do_not_convert
    def step(x):
        return float(x) + 1.0

    strategy.run(step, args=(tf.constant(1),))


@shows(note_no_value, "variable")
def test_the_array_of_a_variable():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        weight = tf.Variable(1.0)

    def step(x):
        return x * weight.numpy()

    strategy.run(step, args=(tf.constant(1.0),))


@shows(note_no_value, "variable_in_numpy")
def test_a_function_of_numpy_of_a_variable():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(1.0)

    @tf.function
    def step(x):
        return strategy.run(lambda part: part * np.exp(weight), args=(x,))

    step(tf.constant(1.0))


@shows(ReplicaValueError.bad_rows)
def test_a_batch_size_that_is_negative():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    split_batch(strategy, np.ones([8, 4], "float32"), batch_size=-1)


@shows(ReplicaValueError.no_rows)
def test_outputs_that_are_text():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return {"doubled": 2.0 * x, "name": "step"}

    join_outputs(strategy, strategy.run(step, args=(tf.ones([4]),)))


@shows(ReplicaValueError.bad_axis)
def test_the_name_of_an_axis():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    losses = strategy.run(tf.square, args=(tf.ones([4]),))
    strategy.reduce("SUM", losses, axis="batch")


@shows(ReplicaValueError.no_function)
def test_a_call_in_the_place_of_a_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.run(tf.square(2.0))


@shows(ReplicaValueError.no_positional)
def test_an_argument_without_a_tuple():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.run(tf.square, args=(tf.constant(2.0)))


@shows(ReplicaValueError.no_keywords)
def test_keywords_in_a_list():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    strategy.run(tf.square, kwargs=[tf.constant(2.0)])


@shows(ReplicaValueError.no_strategy)
def test_devices_in_the_place_of_a_strategy():
    split_batch(["CPU:0", "CPU:1"], np.ones([8, 4], "float32"))


@shows(ReplicaValueError.bad_flag)
def test_a_word_for_yes():
    MirroredStrategy(["CPU:0", "CPU:1"], concurrent="yes")


@shows(ReplicaValueError.bad_choice)
def test_a_word_that_is_not_known():
    MirroredStrategy(["CPU:0", "CPU:1"], graph_optimizer="none")


@shows(ReplicaValueError.bad_steps)
def test_parts_of_a_batch_that_are_no_number():
    accumulate(tf.reduce_mean, (tf.ones([4]),), steps=0)


@shows(ReplicaValueError.bad_accumulation)
def test_parts_of_a_batch_combined_by_their_maximum():
    accumulate(tf.reduce_max, (tf.ones([4]),), steps=2, reduction="max")


@shows(ReplicaValueError.none_at_first)
def test_no_gradient_for_the_first_part():
    weight = tf.Variable(2.0)
    parts = []

    def gradient(x):
        parts.append(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(x * weight) if len(parts) > 1 else tf.reduce_sum(x)
        return tape.gradient(loss, weight)

    tf.function(lambda x: accumulate(gradient, (x,), steps=2))(tf.ones([4]))


@shows(ReplicaValueError.not_averaged)
def test_the_mean_of_counts():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def count(x):
        return tf.math.count_nonzero(x)

    def step(x):
        return accumulate(count, (x,), steps=2)

    strategy.run(step, args=(tf.ones([4]),))
