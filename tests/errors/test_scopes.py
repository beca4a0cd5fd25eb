"""The commonest mistakes: what was made outside the scope, or used in the wrong place."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.golden import shows

from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.errors import (
    InputsError,
    MergeCallGraphError,
    NotInReplicaError,
    NoValueError,
    ScopeError,
)


def make_model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="head")], name="net")


@shows(ScopeError.variable)
def test_a_model_outside_the_scope():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    strategy.run(step, args=(tf.ones([4, 3]),))


@shows(ScopeError.variable, "compiled")
def test_a_model_outside_the_scope_compiled_inside():
    strategy = TPUStrategy(num_cores=2)
    model = make_model()
    with strategy.scope():
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


@shows(ScopeError.optimizer)
def test_an_optimizer_outside_the_scope():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
    optimizer = keras.optimizers.Adam(0.1, name="adam")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    strategy.run(step, args=(tf.ones([4, 3]),))


@pytest.mark.parametrize("make", [keras.optimizers.Adam, keras.optimizers.RMSprop, keras.optimizers.Ftrl])
@pytest.mark.parametrize("traced", [False, True])
def test_an_optimizer_outside_the_scope_is_refused_each_time(make, traced):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = make_model()
    optimizer = make(0.1)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def train():
        strategy.run(step, args=(tf.ones([4, 3]),))

    for _ in range(3):
        with pytest.raises(ScopeError, match=f"The optimizer '{optimizer.name}' was made outside"):
            (tf.function(train) if traced else train)()


def test_compiled_replicas_refuse_an_optimizer_outside_the_scope_each_time():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        model = make_model()
    model.compile(keras.optimizers.Adam(name="adam"), "mse")
    for _ in range(2):
        with pytest.raises(ScopeError, match="The optimizer 'adam' was made outside"):
            model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


@shows(ScopeError.optimizer, "in_fit")
def test_compile_outside_the_scope():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        model = make_model()
    model.compile(keras.optimizers.Adam(name="adam"), "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


@shows(ScopeError.model_and_optimizer)
def test_a_model_and_an_optimizer_outside_the_scope():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    optimizer = keras.optimizers.Adam(0.1, name="adam")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    strategy.run(step, args=(tf.ones([4, 3]),))


@shows(ScopeError.model_and_optimizer, "built")
def test_a_model_and_an_optimizer_that_are_built_outside_the_scope():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    optimizer = keras.optimizers.Adam(0.1, name="adam")
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    strategy.run(step, args=(tf.ones([4, 3]),))


@shows(ScopeError.model_and_optimizer, "compiled")
def test_a_model_and_an_optimizer_outside_the_scope_of_compiled_replicas():
    strategy = TPUStrategy(num_cores=2)
    model = make_model()
    optimizer = keras.optimizers.Adam(0.1, name="adam")
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    strategy.run(step, args=(tf.ones([4, 3]),))


@shows(ScopeError.variable, "fit")
def test_a_model_outside_the_scope_that_is_compiled_and_trained_inside():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    model = make_model()
    with strategy.scope():
        model.compile("adam", "mse")
        model.fit(np.ones((8, 3)), np.ones((8, 2)), batch_size=4, verbose=0)


@shows(ScopeError.other_strategy)
def test_a_variable_of_another_strategy():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        count = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM, name="count")

    def step():
        count.assign_add(1.0)

    strategy.run(step)


@shows(ScopeError.other_strategy, "compiled")
def test_an_optimizer_of_another_strategy():
    strategy = TPUStrategy(num_cores=2)
    with TPUStrategy(num_cores=2).scope():
        optimizer = keras.optimizers.Adam(0.1, name="adam")
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])

    def step():
        optimizer.apply([tf.ones([2])], [weight])

    strategy.run(step)


@shows(ScopeError.optimizer, "built")
def test_an_optimizer_that_is_built_in_the_scope_only():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    optimizer = keras.optimizers.Adam(0.1, name="adam")
    with strategy.scope():
        model = make_model()
        optimizer.build(model.trainable_variables)


@shows(ScopeError.other_strategy, "built")
def test_an_optimizer_that_is_built_for_the_model_of_another_strategy():
    first, second = MirroredStrategy(["CPU:0", "CPU:1"]), MirroredStrategy(["CPU:0", "CPU:1"])
    with first.scope():
        model = make_model()
    with second.scope():
        optimizer = keras.optimizers.Adam(0.1, name="adam")
        optimizer.build(model.trainable_variables)


@shows(ScopeError.in_replica)
def test_run_in_a_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def inner(x):
        return x + 1.0

    def step(x):
        return strategy.run(inner, args=(x,))

    strategy.run(step, args=(tf.constant(1.0),))


@shows(ScopeError.in_replica, "compiled")
def test_run_in_a_compiled_replica():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return strategy.run(tf.square, args=(x,))

    strategy.run(step, args=(tf.constant(1.0),))


@shows(ScopeError.in_replica, "scope")
def test_scope_in_a_replica():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        with strategy.scope():
            weight = tf.Variable(1.0)
        return weight * x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(ScopeError.in_replica, "reduce")
def test_reduce_in_a_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return strategy.reduce("SUM", x, axis=None)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(ScopeError.in_replica, "reduce_to")
def test_reduce_to_in_a_replica():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return strategy.extended.reduce_to("SUM", x, destinations=x)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(ScopeError.in_replica, "batch_reduce_to")
def test_batch_reduce_to_in_a_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    def step(x):
        return strategy.extended.batch_reduce_to("SUM", [(x, x)])

    strategy.run(step, args=(tf.constant(1.0),))


@shows(ScopeError.in_replica, "reduce_compiled")
def test_reduce_in_a_compiled_replica():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return strategy.reduce("SUM", x, axis=None)

    strategy.run(step, args=(tf.constant(1.0),))


@shows(InputsError.next_in_replica)
def test_fit_in_a_replica():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")

    def step(x, y):
        model.fit(x, y, verbose=0)

    strategy.run(step, args=(np.ones((8, 3)), np.ones((8, 2))))


@shows(InputsError.next_in_replica, "compiled")
def test_next_in_a_replica():
    strategy = TPUStrategy(num_cores=2)
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4)))

    def step():
        return tf.reduce_sum(next(iterator))

    strategy.run(step)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch", "predict_on_batch"])
@pytest.mark.parametrize("make", [lambda: MirroredStrategy(["CPU:0", "CPU:1"]), lambda: TPUStrategy(num_cores=2)])
def test_methods_of_a_model_that_run_replicas(make, method):
    strategy = make()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    arrays = [np.ones((4, 3)), np.ones((4, 2))][: 1 if "predict" in method else 2]

    def step():
        getattr(model, method)(*arrays)

    with pytest.raises(
        (ScopeError, InputsError),
        match=r"test_scopes\.py:\d+ in step(?s:.)* of a Keras model run the replicas themselves",
    ):
        strategy.run(step)


@shows(ScopeError.compiled_for_one_device)
def test_jit_compile_on_replica_threads():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        weight = tf.Variable(2.0)

    def step(x):
        return weight * x

    @tf.function(jit_compile=True)
    def train(x):
        return strategy.run(step, args=(x,))

    train(tf.constant(1.0))


@shows(NotInReplicaError.used_after_run)
def test_a_context_that_was_kept():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    kept = []

    def step(x):
        kept.append(tf.distribute.get_replica_context())
        return x * 2.0

    strategy.run(step, args=(tf.constant(1.0),))
    kept[0].all_reduce("SUM", tf.constant(1.0))


@shows(NotInReplicaError.used_after_run, "compiled")
def test_a_context_of_a_compiled_body_that_was_kept():
    strategy = TPUStrategy(num_cores=2)
    kept = []

    def step(x):
        kept.append(tf.distribute.get_replica_context())
        return x * 2.0

    strategy.run(step, args=(tf.constant(1.0),))
    kept[0].merge_call(lambda strategy, x: x, args=(tf.constant(1.0),))


@shows(NoValueError.numpy)
def test_numpy_in_a_compiled_body():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        print("loss:", x.numpy())
        return x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(NoValueError.numpy, "traced")
def test_numpy_in_a_traced_step():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def step(x):
        print("loss:", x.numpy())
        return x

    strategy.run(step, args=(tf.constant(1.0),))


@shows(MergeCallGraphError.forward_mode)
def test_a_forward_accumulator_around_a_nested_function():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])

    @tf.function
    def total(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x * x)

    def step(x):
        with tf.autodiff.ForwardAccumulator(x, tf.constant(1.0)) as accumulator:
            y = total(x)
        return accumulator.jvp(y)

    strategy.run(step, args=(tf.constant(3.0),))
