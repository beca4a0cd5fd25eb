"""`gradient_accumulation_steps` of Keras' optimizers: one all-reduce in k steps, and the numbers of one device."""

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import compiled
from helpers.versions import HAS_XLA, WHY_NO_XLA

from replica_engine import MirroredStrategy, logical_devices
from replica_engine.keras import CrossReplicaOptimizer, replicate_model

# Sums of a few gradients in another order; Adam divides by a root that may be small.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
DECAY = keras.optimizers.schedules.ExponentialDecay

MAKERS = {
    "clipped together": lambda k: keras.optimizers.SGD(0.1, global_clipnorm=0.05, gradient_accumulation_steps=k),
    "each clipped, averaged": lambda k: keras.optimizers.AdamW(
        0.1, clipnorm=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2, gradient_accumulation_steps=k
    ),
}


def with_momentum(k):
    """Scaled, with a rate that decays; not clipped, so that any wrong factor shows."""
    rate = DECAY(0.1, 2, 0.5)
    return keras.optimizers.SGD(rate, momentum=0.9, loss_scale_factor=8.0, gradient_accumulation_steps=k)


def gradient(replica, step, shape=3):
    return np.cos(np.arange(shape) + 7 * replica + step).astype("float32")


def components(strategy, variable):
    value = getattr(variable, "value", variable)
    value = variable if callable(value) else value
    return [component.numpy() for component in strategy.experimental_local_results(value)]


def assert_equal_replicas(strategy, variable, expected, **close):
    first, *others = components(strategy, variable)
    np.testing.assert_allclose(first, expected, **{**CLOSE, **close})
    assert all(one.tobytes() == first.tobytes() for one in others)


@pytest.mark.graphs  # eagerly alike on all threads: test_any_number_of_replicas_accumulates_as_one_device
@pytest.mark.replicas(2)
@pytest.mark.parametrize("name", MAKERS)
def test_an_optimizer_accumulates_as_on_one_device(strategy, per_replica, name):
    check_accumulation(strategy, per_replica, MAKERS[name])


@pytest.mark.replicas(1, 3)
def test_any_number_of_replicas_accumulates_as_one_device(strategy, per_replica):
    check_accumulation(strategy, per_replica, with_momentum)


def check_accumulation(strategy, per_replica, make):
    """Seven steps in groups of 3: two updates, and an incomplete group whose sums wait in the accumulators."""
    n, k = strategy.num_replicas_in_sync, 3
    alone, expected = make(k), [tf.Variable([1.0, 2.0, 3.0]), tf.Variable(np.ones([2, 2], "float32"))]
    with strategy.scope():
        optimizer, weights = make(k), [tf.Variable(each) for each in expected]

    @tf.function
    def in_graph(first, second):
        strategy.run(lambda *grads: optimizer.apply(grads, weights), args=(first, second))

    def eagerly(first, second):
        strategy.run(lambda *grads: optimizer.apply(grads, weights), args=(first, second))

    for step in range(7):
        whole = sum(gradient(replica, step) for replica in range(n))
        alone.apply([tf.constant(whole), tf.fill([2, 2], whole[0])], expected)
        first = per_replica(lambda replica, step=step: gradient(replica, step))
        second = per_replica(lambda replica, step=step: np.full([2, 2], gradient(replica, step)[0]))
        (eagerly if step in (1, 2, 6) else in_graph)(first, second)  # groups may end in either
        for weight, one in zip(weights, expected, strict=True):
            assert_equal_replicas(strategy, weight, one.numpy())
    for variable, one in zip(optimizer.variables, alone.variables, strict=True):
        np.testing.assert_allclose(variable.numpy(), one.numpy(), **CLOSE)
    assert int(optimizer.iterations) == int(alone.iterations) == 2


@pytest.mark.replicas(2)
def test_a_group_is_one_step_with_the_mean_of_its_gradients(strategy, run, per_replica):
    n, k = strategy.num_replicas_in_sync, 3
    with strategy.scope():
        optimizer, weight = keras.optimizers.SGD(0.5, gradient_accumulation_steps=k), tf.Variable([1.0, 2.0, 3.0])

    def apply(grad):
        optimizer.apply([grad], [weight])

    for step in range(k):
        assert_equal_replicas(strategy, weight, [1.0, 2.0, 3.0])
        run(apply, args=(per_replica(lambda replica, step=step: gradient(replica, step)),))
    mean = sum(gradient(replica, step) for replica in range(n) for step in range(k)) / k
    assert_equal_replicas(strategy, weight, [1.0, 2.0, 3.0] - 0.5 * mean)


class Counted(tf.distribute.ReductionToOneDevice):
    """A reduction that counts how often it runs, inside graphs too."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        tf.numpy_function(self._count, [], [], stateful=True)
        return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)

    def _count(self):
        self.calls += 1


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "function"])
def test_threads_reduce_once_in_k_steps(jit):
    counted = Counted()
    strategy = MirroredStrategy(logical_devices(8)[:2], cross_device_ops=counted)
    with strategy.scope():
        weights = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)

    def step():
        strategy.run(lambda: optimizer.apply([tf.ones([2]), tf.ones([])], weights))

    step = tf.function(step) if jit else step
    calls = []
    for _ in range(8):
        step()
        calls.append(counted.calls)
    assert calls == [0, 0, 0, 2, 2, 2, 2, 4]  # once for each of two variables
    assert weights[1].numpy() == pytest.approx(3.0 - 2 * 0.1 * 2)


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
def test_a_program_has_its_collectives_in_the_branch_of_the_update(monkeypatch):
    from replica_engine import TPUStrategy
    from replica_engine.xla.calls.program_table import ProgramTable

    texts, own = [], ProgramTable.executable

    def executable(self, lowered):
        texts.append(lowered.as_text())
        return own(self, lowered)

    monkeypatch.setattr(ProgramTable, "executable", executable)
    strategy = TPUStrategy(num_cores=2)
    for k, outside in ((4, 0), (None, 2)):
        with strategy.scope():
            weights = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
            optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=k)
            optimizer.build(weights)
        strategy.run(lambda: optimizer.apply([tf.ones([2]), tf.ones([])], weights))  # noqa: B023
        assert _collectives(texts[-1]) == (outside, 2)


def _collectives(text):
    """How many collectives the main function of a program has outside of branches, and altogether."""
    main = text[text.index("func.func @main") :]
    lines, depth, branches, found = main.splitlines(), 0, [], []
    for line in lines:
        if "stablehlo.if" in line or "stablehlo.case" in line:
            branches.append(depth)
        if re.search(r"stablehlo\.(all_reduce|all_gather|collective_permute|all_to_all)", line):
            found.append(bool(branches))
        depth += line.count("{") - line.count("}")
        while branches and depth <= branches[-1]:
            branches.pop()
    return found.count(False), len(found)


@pytest.mark.replicas(2)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_rows_of_tables_and_variables_without_a_gradient(strategy, per_replica):
    def make():
        return (
            keras.optimizers.SGD(1.0, gradient_accumulation_steps=2),
            [tf.Variable(tf.zeros([4, 1])), tf.Variable(1.0)],
        )

    with strategy.scope():
        optimizer, weights = make()
    alone, expected = make()

    def grads(rows, weights):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(weights[0], rows))
        grad = tape.gradient(loss, weights[0])
        assert isinstance(grad, tf.IndexedSlices)
        return [grad, None]

    for step in range(3):
        rows = per_replica(lambda replica, step=step: [replica + step, 3])
        strategy.run(lambda rows: optimizer.apply(grads(rows, weights), weights), args=(rows,))
        alone.apply(grads([step, 3, step + 1, 3], expected), expected)
        assert_equal_replicas(strategy, weights[0], expected[0].numpy())
    assert weights[0].numpy().any()
    assert weights[1].numpy() == 1


@pytest.mark.replicas(2)
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_a_variable_without_a_gradient_in_the_last_step(strategy):
    """Keras updates the others, and forgets the gradients that this variable had before."""

    def make():
        return keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), [tf.Variable(1.0), tf.Variable(2.0)]

    with strategy.scope():
        optimizer, weights = make()
    alone, expected = make()
    for grads in ([1.0, 1.0], [1.0, None], [1.0, 1.0], [2.0, 3.0]):
        tensors = [None if each is None else tf.constant(each) for each in grads]
        strategy.run(lambda: optimizer.apply(tensors, weights))  # noqa: B023
        alone.apply([None if each is None else 2 * each for each in tensors], expected)
        for weight, one in zip(weights, expected, strict=True):
            assert_equal_replicas(strategy, weight, one.numpy())
    assert expected[1].numpy() == 2.0 - 2 * 2


RANDOM = np.random.default_rng(0)
WORDS = RANDOM.integers(0, 9, size=(20, 3))
LABELS = RANDOM.normal(size=(20, 2)).astype("float32")


def batches_of(size, count=20):
    """Of arrays Keras would make a pipeline for each fit."""
    return tf.data.Dataset.from_tensor_slices((WORDS[:count], LABELS[:count])).batch(size)


def model_of(k, make=lambda k: keras.optimizers.SGD(0.2, 0.9, clipnorm=0.3, gradient_accumulation_steps=k), **options):
    table = keras.layers.Embedding(12, 3, embeddings_initializer=keras.initializers.RandomNormal(seed=1))
    dense = keras.layers.Dense(2, kernel_initializer=keras.initializers.GlorotUniform(seed=2))
    return compiled([keras.Input((3,), dtype="int32"), table, keras.layers.Flatten(), dense], make(k), "mse", **options)


def trained(model, epochs=2, data=None):
    model.fit(batches_of(4) if data is None else data, epochs=epochs, verbose=0, shuffle=False)
    return model


@functools.cache
def alone(*args):
    """Trained on one device, without the time to trace it; the numbers are the same."""
    return trained(model_of(*args, run_eagerly=True))


def assert_same_state(found, expected, **close):
    for one, other in zip(
        [*found.weights, *found.optimizer.variables], [*expected.weights, *expected.optimizer.variables], strict=True
    ):
        np.testing.assert_allclose(one.numpy(), other.numpy(), **{**CLOSE, **close}, err_msg=one.path)


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_fit_in_a_scope(strategy):
    """Five steps an epoch in groups of 4: the second epoch begins in the middle of a group."""
    with strategy.scope():
        model = model_of(4, steps_per_execution=2)
    assert_same_state(trained(model), alone(4))
    for variable in model.trainable_variables:
        assert_equal_replicas(strategy, variable, variable.numpy())


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_fit_of_a_replicated_model(strategy):
    """Four batches of 7 rows in groups of 3."""
    model = model_of(3)
    trained(replicate_model(model, strategy=strategy), data=batches_of(7, 14))
    assert_same_state(model, trained(model_of(3, run_eagerly=True), data=batches_of(7, 14)))
    assert any(variable.numpy().any() for variable in model.optimizer._accumulated_gradients)


@pytest.mark.graphs
@pytest.mark.replicas(2)
@pytest.mark.full("as test_a_group_is_one_step_with_the_mean_of_its_gradients, in a fit")
def test_a_group_of_batches_is_a_batch(strategy):
    """With momentum alone: without accumulation Keras treats the rows of a table otherwise than dense gradients."""

    def make(k):
        return keras.optimizers.SGD(0.2, momentum=0.9, gradient_accumulation_steps=k)

    with strategy.scope():
        model = model_of(3, make)
    whole = model_of(None, make, run_eagerly=True)
    model.fit(batches_of(2, 18), verbose=0, shuffle=False)
    whole.fit(batches_of(6, 18), verbose=0, shuffle=False)
    for one, other in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_training_goes_on_from_the_middle_of_a_group(strategy, make_strategy_like, tmp_path):
    """Saved after 5 steps of groups of 4, and loaded by one device and by another number of replicas."""
    with strategy.scope():
        model = model_of(4)
    trained(model, epochs=1)
    model.save(tmp_path / "model.keras")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(tmp_path / "state"))

    def loaded():
        return keras.models.load_model(tmp_path / "model.keras")

    def restored():
        again = model_of(4)
        again.optimizer.build(again.trainable_variables)
        checkpoint = tf.train.Checkpoint(model=again, optimizer=again.optimizer)
        checkpoint.read(str(tmp_path / "state")).assert_existing_objects_matched()
        return again

    # On replicas one of the two for each strategy: each takes long to trace.
    on_replicas = (loaded if isinstance(strategy, MirroredStrategy) else restored, make_strategy_like(4).scope)
    for make, scope in ((loaded, contextlib.nullcontext), (restored, contextlib.nullcontext), on_replicas):
        with scope():
            again = make()
        again.run_eagerly = scope is contextlib.nullcontext  # which saves the time to trace it
        assert_same_state(trained(again, epochs=1), alone(4))


@pytest.fixture
def make_strategy_like(strategy):
    """`make_strategy_like(size)`: a strategy of the same kind with another number of replicas."""
    if isinstance(strategy, MirroredStrategy):
        return lambda size: MirroredStrategy(logical_devices(8)[:size])
    return lambda size: type(strategy)(num_cores=size)


@pytest.mark.replicas(2)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_with_a_cross_replica_optimizer(strategy, per_replica, reduction):
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0, 3.0])
        inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
        optimizer = CrossReplicaOptimizer(inner, reduction)
    for step in range(2):
        grad = per_replica(lambda replica, step=step: gradient(replica, step))
        strategy.run(lambda grad: optimizer.apply([grad], [weight]), args=(grad,))
    total = sum(gradient(replica, step) for replica in range(2) for step in range(2)) / 2
    assert_equal_replicas(strategy, weight, [1.0, 2.0, 3.0] - 0.5 * total / (2 if reduction == "mean" else 1))
    assert len(components(strategy, inner._accumulated_gradients[0])) == 2


@pytest.mark.graphs
@pytest.mark.replicas(2)
@pytest.mark.parametrize(
    "k",
    [
        pytest.param(None, id="plain", marks=pytest.mark.full("keras/test_layers.py has it")),
        pytest.param(2, id="in groups"),
    ],
)
def test_an_overflow_on_one_replica_counts_for_all(strategy, per_replica, k):
    """Keras itself asks the first replica alone, and weights become infinite where another one overflows."""
    with strategy.scope():
        weight = tf.Variable([1.0])
        inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=k)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0)

    @tf.function
    def step(grad):
        strategy.run(lambda grad: optimizer.apply([grad], [weight]), args=(grad,))

    step(per_replica(lambda replica: [float("inf") if replica else 1.0]))
    assert_equal_replicas(strategy, weight, [1.0])
    assert float(optimizer.dynamic_scale.numpy()) == 2.0
    assert int(inner.iterations) == 0
    for _ in range(k or 1):
        step(per_replica(lambda replica: [2.0 + 2 * replica]))  # of a loss that was scaled by 2
    assert_equal_replicas(strategy, weight, [1.0 - 0.5 * 3])


@pytest.mark.graphs
@pytest.mark.replicas(2)
def test_a_replicated_model_in_float16(strategy):
    """The loss is scaled, and each step of a group is unscaled by the scale of that step."""

    def make(k):
        return keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, gradient_accumulation_steps=k), initial_scale=16.0, dynamic_growth_steps=2
        )

    model = model_of(2, make)
    trained(replicate_model(model, strategy=strategy))
    assert_same_state(model, alone(2, make))
