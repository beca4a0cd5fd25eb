"""`CrossReplicaOptimizer`: gradients of all replicas reduced before the optimizer sees them."""

import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine.errors import OptimizerError
from replica_engine.keras import CrossReplicaOptimizer

MAKERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "clipped": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.05),
    "accumulating": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2, weight_decay=0.01),
}
STEPS = 4


def gradient(replica, step):
    return np.cos(np.arange(3) + 7 * replica + step).astype("float32")


@pytest.mark.graphs
@pytest.mark.replicas(2)
@pytest.mark.parametrize(
    ("name", "reduction"),  # Adam makes little of a factor, so momentum has both
    [("momentum", "mean"), ("momentum", "sum"), ("clipped", "mean"), ("accumulating", "sum")],
)
def test_it_does_with_the_reduced_gradient_what_the_optimizer_does(strategy, per_replica, name, reduction):
    check_optimizer(strategy, per_replica, name, reduction)


@pytest.mark.graphs
@pytest.mark.replicas(1, 4)
def test_it_does_so_with_any_number_of_replicas(strategy, per_replica):
    check_optimizer(strategy, per_replica, "momentum", "mean")


def check_optimizer(strategy, per_replica, name, reduction):
    n = strategy.num_replicas_in_sync
    expected, alone = tf.Variable([1.0, 2.0, 3.0]), MAKERS[name]()
    for step in range(STEPS):
        total = sum(gradient(replica, step) for replica in range(n))
        alone.apply([tf.constant(total / (n if reduction == "mean" else 1))], [expected])

    with strategy.scope():
        weight = tf.Variable([1.0, 2.0, 3.0])
        optimizer = CrossReplicaOptimizer(MAKERS[name](), reduction)

    @tf.function
    def update(gradients):
        strategy.run(lambda grad: optimizer.apply_gradients([(grad, weight)]), args=(gradients,))

    for step in range(STEPS):
        update(per_replica(lambda replica, step=step: gradient(replica, step)))
    for component in strategy.experimental_local_results(weight):
        np.testing.assert_allclose(component.numpy(), expected.numpy(), rtol=1e-5)
    assert int(optimizer.iterations) == int(alone.iterations)
    assert len(optimizer.variables) == len(alone.variables)


@pytest.mark.replicas(2)
def test_the_variables_of_build_are_those_of_then(strategy, tmp_path):
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = CrossReplicaOptimizer(keras.optimizers.SGD(1.0), "sum")
        asked = [weight]
        optimizer.build(asked)
        asked.append(tf.Variable(2.0))
    strategy.run(lambda: optimizer.apply([tf.constant(0.5)]))
    assert [float(each) for each in strategy.experimental_local_results(weight)] == [0.0, 0.0]
    tf.train.Checkpoint(optimizer=optimizer).save(str(tmp_path / "c"))  # TensorFlow refuses a list that was changed


@pytest.mark.replicas(2)
def test_variables_without_a_gradient_and_rows_of_tables(strategy, per_replica):
    with strategy.scope():
        table, other = tf.Variable(tf.zeros([4, 1])), tf.Variable(1.0)
        optimizer = CrossReplicaOptimizer(keras.optimizers.SGD(1.0), "sum")

    def step(row):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, row))
        grad = tape.gradient(loss, table)
        assert isinstance(grad, tf.IndexedSlices)
        optimizer.apply([grad, None], [table, other])

    strategy.run(step, args=(per_replica(lambda replica: [replica + 1, 3]),))
    assert table.numpy().ravel().tolist() == [0, -1, -1, -2]
    assert other.numpy() == 1


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_keras_fit_accumulates_gradients_with_it(strategy):
    """Its gradients are reduced once in two steps, as those of the optimizer itself (test_accumulation.py)."""
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, x.sum(1))).batch(4)

    def trained(scope, wrap, **options):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
            model.compile(wrap(keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)), "mse", **options)
        model.fit(batches, epochs=2, verbose=0)
        return model.get_weights()

    found = trained(strategy.scope(), lambda optimizer: CrossReplicaOptimizer(optimizer, "sum"))
    expected = trained(tf.distribute.get_strategy().scope(), lambda optimizer: optimizer, run_eagerly=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.replicas(1, 2)
def test_in_cross_replica_context_there_is_nothing_to_reduce(strategy):
    with strategy.scope():
        weight = tf.Variable(1.0)
        optimizer = CrossReplicaOptimizer(keras.optimizers.SGD(1.0))
        with pytest.raises(OptimizerError, match=r"in the function that is given to strategy\.run"):
            optimizer.apply([tf.constant(1.0)], [weight])
    assert weight.numpy() == 1


def test_without_replicas_it_is_the_optimizer():
    weight = tf.Variable(1.0)
    optimizer = CrossReplicaOptimizer(keras.optimizers.SGD(0.5))
    optimizer.apply([tf.constant(1.0)], [weight])
    assert weight.numpy() == 0.5
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert float(optimizer.inner_optimizer.learning_rate) == 0.25


def test_it_is_saved_with_what_it_wraps():
    made = CrossReplicaOptimizer(keras.optimizers.Adam(0.5, clipnorm=1.0), "sum", name="across")
    again = keras.optimizers.deserialize(keras.optimizers.serialize(made))
    assert isinstance(again, CrossReplicaOptimizer)
    assert (again.reduction, again.name, again.inner_optimizer.clipnorm) == ("sum", "across", 1.0)


def test_misuse_is_an_error():
    with pytest.raises(OptimizerError, match="wraps a Keras optimizer"):
        CrossReplicaOptimizer("adam")
    with pytest.raises(OptimizerError, match='"mean" or "sum"'):
        CrossReplicaOptimizer(keras.optimizers.SGD(), "max")


_LOADS = """
    import keras
    import numpy as np
    import replica_engine.keras
    from keras.src.saving import object_registration

    assert not object_registration.GLOBAL_CUSTOM_OBJECTS, "importing the package registers nothing"
    {use}
    model = keras.models.load_model({path!r})
    print(type(model.optimizer).__name__, float(np.asarray(model.optimizer.learning_rate)))
"""


@pytest.mark.parametrize(
    "use",
    [
        "replica_engine.MirroredStrategy(['CPU:0']).scope()",
        "from replica_engine.keras import CrossReplicaOptimizer",
        "replica_engine.keras.replicate_model",
    ],
    ids=["a strategy", "its name", "replicate_model"],
)
def test_a_saved_model_is_loaded_by_a_program_that(use, programs, tmp_path):
    model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    model.compile(CrossReplicaOptimizer(keras.optimizers.SGD(0.5)), "mse")
    path = str(tmp_path / "model.keras")
    model.save(path)
    program = textwrap.dedent(_LOADS).format(use=use, path=path)
    assert programs.run(program).stdout == "CrossReplicaOptimizer 0.5\n"
