"""Objects and calls that do not belong to the strategy, and values that each replica has of its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.errors import (
    InputsError,
    MergeCallGraphError,
    MergeCallMismatchError,
    NotInReplicaError,
    NoValueError,
    ScopeError,
    StructureMismatchError,
)


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")


def test_a_model_outside_the_scope_compiled_inside():
    strategy = TPUStrategy(num_cores=2)
    model = make_model()
    with strategy.scope():
        model.compile("sgd", "mse")
    with pytest.raises(ScopeError, match="there is one for all replicas, and an update needs one"):
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


def test_a_model_and_an_optimizer_that_are_built_outside_the_scope():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    optimizer = keras.optimizers.Adam(0.1, name="adam")
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    with pytest.raises(ScopeError, match="Make the optimizer and the model under the scope"):
        strategy.run(step, args=(tf.ones([4, 3]),))


def test_a_model_outside_the_scope_that_is_compiled_and_trained_inside():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    with strategy.scope():
        model.compile("adam", "mse")
        with pytest.raises(ScopeError, match="there is one for all replicas, and an update needs one"):
            model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


def test_a_variable_of_another_strategy():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        count = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, name="count")

    def step():
        count.assign_add(1.0)

    with pytest.raises(ScopeError, match="belongs to another strategy than the one whose replicas use"):
        strategy.run(step)


def test_an_optimizer_of_another_strategy():
    strategy = TPUStrategy(num_cores=2)
    with TPUStrategy(num_cores=2).scope():
        optimizer = keras.optimizers.Adam(0.1, name="adam")
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])

    def step():
        optimizer.apply([tf.ones([2])], [weight])

    with pytest.raises(ScopeError, match="belongs to another strategy than the one whose replicas use"):
        strategy.run(step)


def test_an_optimizer_that_is_built_for_the_model_of_another_strategy():
    first, second = MirroredStrategy(["CPU:0", "CPU:1"]), MirroredStrategy(["CPU:0", "CPU:1"])
    with first.scope():
        model = make_model()
    with second.scope():
        optimizer = keras.optimizers.Adam(0.1, name="adam")
        with pytest.raises(ScopeError, match="belongs to another strategy than the one whose replicas use"):
            optimizer.build(model.trainable_variables)


def test_run_in_a_compiled_replica():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return strategy.run(tf.square, args=(x,))

    with pytest.raises(ScopeError, match="`fit`, `predict` and such methods of a Keras model run the"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_scope_in_a_replica():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        with strategy.scope():
            weight = tf.Variable(1.0)
        return weight * x

    with pytest.raises(ScopeError, match="A replica is in the scope already: leave the `with` out"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_reduce_to_in_a_replica():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return strategy.extended.reduce_to("SUM", x, destinations=x)

    with pytest.raises(ScopeError, match="In a replica, ask its context, on all replicas: tf"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_batch_reduce_to_in_a_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return strategy.extended.batch_reduce_to("SUM", [(x, x)])

    with pytest.raises(ScopeError, match="In a replica, ask its context, on all replicas: tf"):
        strategy.run(step, args=(tf.constant(1.0),))


@pytest.mark.parametrize("traced_by", ["a call", "get_concrete_function", "a function around it"])
def test_jit_compile_on_replica_threads(traced_by):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(2.0)

    def step(x):
        return weight * x

    @tf.function(jit_compile=traced_by != "a function around it")
    def train(x):
        return strategy.run(step, args=(x,))

    trace = {
        "a call": train,
        "get_concrete_function": train.get_concrete_function,
        "a function around it": tf.function(lambda x: train(x), jit_compile=True),
    }[traced_by]
    with pytest.raises(ScopeError, match="for 2 replicas is in a function with jit_compile=True: XLA"):
        trace(tf.constant(1.0))


def test_a_context_that_was_kept():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    kept = []

    def step(x):
        kept.append(tf.distribute.get_replica_context())
        return x * 2.0

    strategy.run(step, args=(tf.constant(1.0),))
    with pytest.raises(NotInReplicaError, match="A replica context was used after its run had returned: no"):
        kept[0].all_reduce("SUM", tf.constant(1.0))


def test_a_context_of_a_compiled_body_that_was_kept():
    strategy = TPUStrategy(num_cores=2)
    kept = []

    def step(x):
        kept.append(tf.distribute.get_replica_context())
        return x * 2.0

    strategy.run(step, args=(tf.constant(1.0),))
    with pytest.raises(NotInReplicaError, match="A replica context was used after its run had returned: no"):
        kept[0].merge_call(lambda strategy, x: x, args=(tf.constant(1.0),))


def test_numpy_in_a_traced_step():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def step(x):
        print("loss:", x.numpy())
        return x

    with pytest.raises(NoValueError, match="was called on a tensor x of a function that is traced: of a"):
        strategy.run(step, args=(tf.constant(1.0),))


def test_a_forward_accumulator_around_a_nested_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def total(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x * x)

    def step(x):
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            y = total(x)
        return accumulator.jvp(y)

    with pytest.raises(MergeCallGraphError, match="Such a function runs once for all replicas, and has no"):
        strategy.run(step, args=(tf.constant(3.0),))


def test_two_optimizers_for_fit_that_are_built_outside_the_scope(caplog):
    """They update all replicas as one: each batch is counted once."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
    for rate in (0.1, 0.01):
        optimizer = keras.optimizers.SGD(rate, name="sgd")
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, epochs=2, verbose=0)
        assert int(optimizer.iterations.numpy()) == 4
    assert "WARNING" not in caplog.text


def test_a_distributed_dataset_given_to_run():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))

    def epoch(dataset):
        return sum(tf.reduce_sum(batch) for batch in dataset)

    with pytest.raises(InputsError, match="is a DistributedDataset, and replicas take one batch of it"):
        strategy.run(epoch, args=(dataset,))


def test_a_plain_variable_to_which_compiled_replicas_add(caplog):
    strategy = TPUStrategy(num_cores=2)
    samples = tf.Variable(0, name="samples")

    def step(x):
        samples.assign_add(len(x))

    batch = strategy.experimental_distribute_values_from_function(lambda context: tf.ones([4]))
    strategy.run(step, args=(batch,))
    assert "so all replicas share it, and each write comes on top of" in caplog.text


def test_a_plain_variable_in_a_compiled_body(caplog):
    strategy = TPUStrategy(num_cores=2)
    total = tf.Variable(0.0, name="total")

    def step(x):
        total.assign_add(x)

    def value(context):
        return tf.constant([1.0, 10.0][context.replica_id_in_sync_group])

    strategy.run(step, args=(strategy.experimental_distribute_values_from_function(value),))
    assert "so all replicas share it, and each write comes on top of" in caplog.text


def test_two_plain_variables_of_one_name_in_a_traced_step(caplog):
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
    assert "so all replicas share it, and each write comes on top of" in caplog.text


def test_two_keras_metrics_outside_the_scope_of_compiled_replicas(caplog):
    strategy = TPUStrategy(num_cores=2)
    loss, error = keras.metrics.Mean(name="mean"), keras.metrics.Mean(name="mean")

    @tf.function
    def train(batch):
        def step(x):
            loss.update_state(x)
            error.update_state(x * x)

        strategy.run(step, args=(batch,))

    train(strategy.experimental_distribute_values_from_function(lambda context: tf.ones([2])))
    assert "so all replicas share it, and each write comes on top of" in caplog.text


def test_a_sum_and_a_gather_in_another_order_on_one_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            total, each = context.all_reduce("SUM", x), context.all_gather(x, axis=0)
        else:
            each, total = context.all_gather(x, axis=0), context.all_reduce("SUM", x)
        return total, each

    with pytest.raises(MergeCallMismatchError, match="The replicas met in different collectives"):
        strategy.run(step, args=(tf.constant([1.0]),))


def test_arguments_of_another_structure():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def log(strategy, values):
        tf.print(values)

    def step(x):
        context = tf.distribute.get_replica_context()
        first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        context.merge_call(log, args=({"loss": x} if first else {"error": x},))

    with pytest.raises(StructureMismatchError, match="replica 0 has a mapping with the keys"):
        strategy.run(step, args=(tf.constant(1.0),))
