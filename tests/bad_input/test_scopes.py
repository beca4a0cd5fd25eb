"""Objects and calls that do not belong to the strategy, and values that each replica has of its own."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy, xla
from replica_engine.errors import (
    InputsError,
    MergeCallGraphError,
    MergeCallMismatchError,
    NotInReplicaError,
    NoValueError,
    ScopeError,
    StructureMismatchError,
)

ANOTHER = "belongs to another strategy than the one whose replicas use"
SHARED = "so all replicas share it, and each write comes on top of"


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")


@pytest.mark.parametrize(("kind", "optimizer"), [("tpu", "sgd"), ("threads", "adam")])
def test_a_model_outside_the_scope_that_is_compiled_inside(kind, optimizer, request):
    model = make_model()
    with request.getfixturevalue(kind).scope():
        model.compile(optimizer, "mse")
    with pytest.raises(ScopeError, match="there is one for all replicas, and an update needs one"):
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


def test_a_variable_of_another_strategy(threads):
    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        count = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, name="count")
    with pytest.raises(ScopeError, match=ANOTHER):
        threads.run(lambda: count.assign_add(1.0))


def test_an_optimizer_of_another_strategy(tpu):
    with TPUStrategy(num_cores=2).scope():
        optimizer = keras.optimizers.Adam(0.1, name="adam")
    with tpu.scope():
        weight = keras.Variable([1.0, 2.0])
    with pytest.raises(ScopeError, match=ANOTHER):
        tpu.run(lambda: optimizer.apply([tf.ones([2])], [weight]))


def test_an_optimizer_that_is_built_for_the_model_of_another_strategy(threads):
    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = make_model()
    with threads.scope():
        optimizer = keras.optimizers.Adam(0.1, name="adam")
        with pytest.raises(ScopeError, match=ANOTHER):
            optimizer.build(model.trainable_variables)


def test_scope_in_a_replica(tpu):
    def step(x):
        with tpu.scope():
            weight = tf.Variable(1.0)
        return weight * x

    with pytest.raises(ScopeError, match="A replica is in the scope already: leave the `with` out"):
        tpu.run(step, args=(tf.constant(1.0),))


@pytest.mark.parametrize("traced_by", ["a call", "get_concrete_function", "a function around it"])
def test_jit_compile_on_replica_threads(traced_by, threads):
    with threads.scope():
        weight = tf.Variable(2.0)

    def step(x):
        return weight * x

    @tf.function(jit_compile=traced_by != "a function around it")
    def train(x):
        return threads.run(step, args=(x,))

    trace = {
        "a call": train,
        "get_concrete_function": train.get_concrete_function,
        "a function around it": tf.function(lambda x: train(x), jit_compile=True),
    }[traced_by]
    with pytest.raises(ScopeError, match="for 2 replicas is in a function with jit_compile=True: XLA"):
        trace(tf.constant(1.0))


def test_jit_compile_after_a_program_in_the_function_around(threads):
    with threads.scope():
        weight = tf.Variable(2.0)
    inner = tf.function(lambda x: threads.run(lambda x: weight * x, args=(x,)), jit_compile=True)

    @tf.function
    def train(x):
        xla.replicate(lambda x: x + 1.0, [[x], [x]])  # the function around is not to be compiled as a whole
        return inner(x)

    with pytest.raises(ScopeError, match="for 2 replicas is in a function with jit_compile=True: XLA"):
        train(tf.constant(1.0))


USES = {
    "threads": lambda context: context.all_reduce("SUM", tf.constant(1.0)),
    "tpu": lambda context: context.merge_call(lambda strategy, x: x, args=(tf.constant(1.0),)),
}


@pytest.mark.parametrize(("kind", "use"), USES.items(), ids=USES)
def test_a_context_that_was_kept(kind, use, request):
    kept = []

    def step(x):
        kept.append(tf.distribute.get_replica_context())
        return x * 2.0

    request.getfixturevalue(kind).run(step, args=(tf.constant(1.0),))
    with pytest.raises(NotInReplicaError, match="A replica context was used after its run had returned: no"):
        use(kept[0])


def test_numpy_in_a_traced_step(threads):
    @tf.function
    def step(x):
        print("loss:", x.numpy())
        return x

    with pytest.raises(NoValueError, match="was called on a tensor x of a function that is traced: of a"):
        threads.run(step, args=(tf.constant(1.0),))


def test_a_forward_accumulator_around_a_nested_function(threads):
    @tf.function
    def total(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x * x)

    def step(x):
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            y = total(x)
        return accumulator.jvp(y)

    with pytest.raises(MergeCallGraphError, match="Such a function runs once for all replicas, and has no"):
        threads.run(step, args=(tf.constant(3.0),))


def test_two_optimizers_for_fit_that_are_built_outside_the_scope(threads, caplog):
    """They update all replicas as one: each batch is counted once."""
    with threads.scope():
        model = make_model()
    for rate in (0.1, 0.01):
        optimizer = keras.optimizers.SGD(rate, name="sgd")
        optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, epochs=2, verbose=0)
        assert int(optimizer.iterations.numpy()) == 4
    assert "WARNING" not in caplog.text


def test_a_distributed_dataset_given_to_run(threads):
    dataset = threads.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    with pytest.raises(InputsError, match="is a DistributedDataset, and replicas take one batch of it"):
        threads.run(lambda dataset: sum(tf.reduce_sum(batch) for batch in dataset), args=(dataset,))


def test_a_plain_variable_to_which_compiled_replicas_add_a_size(tpu, caplog):
    samples = tf.Variable(0, name="samples")
    batch = tpu.experimental_distribute_values_from_function(lambda context: tf.ones([4]))
    tpu.run(lambda x: samples.assign_add(len(x)), args=(batch,))
    assert SHARED in caplog.text


def test_two_plain_variables_of_one_name_in_a_traced_step(threads, caplog):
    seen = tf.Variable(0, name="seen")
    kept = tf.Variable(0, name="seen")

    @tf.function
    def train():
        threads.run(lambda: (seen.assign_add(2), kept.assign_sub(3)))

    for _ in range(2):
        train()
    assert SHARED in caplog.text


def test_two_keras_metrics_outside_the_scope_of_compiled_replicas(tpu, caplog):
    loss, error = keras.metrics.Mean(name="mean"), keras.metrics.Mean(name="mean")

    @tf.function
    def train(batch):
        def step(x):
            loss.update_state(x)
            error.update_state(x * x)

        tpu.run(step, args=(batch,))

    train(tpu.experimental_distribute_values_from_function(lambda context: tf.ones([2])))
    assert SHARED in caplog.text


def test_a_sum_and_a_gather_in_another_order_on_one_replica(threads):
    def step(x):
        context = tf.distribute.get_replica_context()
        if tf.get_static_value(context.replica_id_in_sync_group) == 0:
            total, each = context.all_reduce("SUM", x), context.all_gather(x, axis=0)
        else:
            each, total = context.all_gather(x, axis=0), context.all_reduce("SUM", x)
        return total, each

    with pytest.raises(MergeCallMismatchError, match="The replicas met in different collectives"):
        threads.run(step, args=(tf.constant([1.0]),))


def test_arguments_of_another_structure(threads):
    def step(x):
        context = tf.distribute.get_replica_context()
        first = tf.get_static_value(context.replica_id_in_sync_group) == 0
        context.merge_call(lambda _, values: tf.print(values), args=({"loss": x} if first else {"error": x},))

    with pytest.raises(StructureMismatchError, match="replica 0 has a mapping with the keys"):
        threads.run(step, args=(tf.constant(1.0),))
