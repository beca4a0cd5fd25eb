"""What a step keeps in an attribute is its replica's own: over a meeting, beside others, and in the next run."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from keras import layers

from replica_engine import MirroredStrategy
from replica_engine.keras import replicate_model

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(12, 4)).astype("float32")
Y = RANDOM.normal(size=(12, 3)).astype("float32")
pytestmark = pytest.mark.on("mirrored")


def replica():
    return tf.distribute.get_replica_context().replica_id_in_sync_group


def meet(value=0.0):
    return tf.distribute.get_replica_context().all_reduce("SUM", tf.convert_to_tensor(value))


def compiled(model):
    model.compile(keras.optimizers.SGD(0.2), "mse")
    return model


class KeepsItsBatch(keras.Model):
    """Keeps tensors, and a list and a dictionary of them, over a synchronized normalization."""

    def __init__(self):
        super().__init__()
        self.norm = layers.BatchNormalization(momentum=0.5, synchronized=True)
        self.dense = layers.Dense(3)
        self.kept = None

    def build(self, shape):
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x, training=False):
        self.parts = []
        self.parts.append(x)
        self.by_name = {"x": x}
        normal = self.norm(x, training=training)
        return self.dense(normal + self.parts[0] * self.by_name["x"])

    def train_step(self, data):
        self.kept, self.pair = data[1], (data[0], data)
        with tf.GradientTape() as tape:
            outputs = self(self.pair[0], training=True)
            loss = tf.reduce_mean(tf.square(outputs - self.kept))
            del self.kept  # as on one device, it is gone for this replica only
            assert not hasattr(self, "kept")
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss + 0 * tf.reduce_sum(self.pair[1][0])}


class Attention(layers.Layer):
    """Keeps its scores, which a penalty reads after a normalization over all replicas."""

    def build(self, shape):
        self.query = self.add_weight(shape=(shape[-1], shape[-1]), initializer="orthogonal")
        self.scale = tf.constant(0.5)  # what is made once is for all replicas

    def call(self, x):
        self.scores = tf.nn.softmax(tf.matmul(x, self.query) * self.scale)
        return x * self.scores


class Penalized(keras.Model):
    def __init__(self):
        super().__init__()
        self.attention, self.dense = Attention(), layers.Dense(3)
        self.norm = layers.BatchNormalization(synchronized=True)

    def build(self, shape):
        for each in (self.attention, self.norm, self.dense):
            each.build(shape)

    def call(self, x, training=False):
        outputs = self.dense(self.norm(self.attention(x), training=training))
        return outputs + tf.reduce_max(self.attention.scores, axis=1, keepdims=True)


@pytest.mark.parametrize("make", [KeepsItsBatch, Penalized])
@pytest.mark.parametrize("is_eager", [False, True])
def test_a_model_that_keeps_tensors_over_a_meeting_trains_as_on_one_device(make, is_eager):
    models = []
    for strategy in (None, MirroredStrategy(DEVICES[:3])):
        keras.utils.set_random_seed(3)
        model = make()
        model.build((None, 4))
        compiled(model).run_eagerly = is_eager
        trained = model if strategy is None else replicate_model(model, strategy=strategy)
        trained.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        models.append(model)
    for one, other in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)


class Module(tf.Module):
    total = None  # a default of the class

    def __init__(self):
        super().__init__()
        self.seen = self.rows = None


def run_in(form, strategy, step):
    def run(*args):
        return strategy.run(step, args)

    return run if form == "eager" else tf.function(run)


@pytest.mark.parametrize("form", ["eager", "graph"])
@pytest.mark.parametrize("concurrent", [False, True])
def test_a_module_in_a_loop_of_ones_own(form, concurrent):
    strategy, module = MirroredStrategy(DEVICES[:3], concurrent=concurrent), Module()
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: tf.range(2.0 + context.replica_id_in_sync_group) + 10.0 * context.replica_id_in_sync_group
    )

    def step(x):
        assert module.total is None
        module.seen, module.rows = x, x.shape[0]
        module.total = tf.reduce_sum(x)
        module.sparse = tf.sparse.from_dense(x[:1])
        tf.distribute.get_replica_context().merge_call(lambda strategy: None)
        result = module.seen, module.rows, module.total + tf.sparse.reduce_sum(module.sparse)
        meet()
        module.total = None
        return result

    run = run_in(form, strategy, step)
    for _ in range(2):
        seen, rows, total = run(batch)
        values = strategy.experimental_local_results(batch)
        for got, right in zip(strategy.experimental_local_results(seen), values, strict=True):
            np.testing.assert_array_equal(got, right)
        assert [int(each) for each in strategy.experimental_local_results(rows)] == [2, 3, 4]
        right = [float(tf.reduce_sum(each) + each[0]) for each in values]
        assert [float(each) for each in strategy.experimental_local_results(total)] == right
    assert module.total is None
    if form == "eager":
        np.testing.assert_array_equal(module.seen, values[0])
        assert module.rows == 2


@pytest.mark.parametrize("kind", [layers.LSTM, layers.GRU, layers.SimpleRNN])
def test_masks_of_recurrent_cells_while_all_replicas_run_at_once(kind):
    strategy = MirroredStrategy(DEVICES[:3], concurrent=True)
    with strategy.scope():
        layer = kind(3, dropout=0.3, recurrent_dropout=0.3)
        layer.build((None, 4, 2))
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: tf.ones([2 + 3 * context.replica_id_in_sync_group, 4, 2])
    )
    for _ in range(4):
        results = strategy.experimental_local_results(strategy.run(lambda x: layer(x, training=True), (batch,)))
        assert [each.shape[0] for each in results] == [2, 5, 8]


def test_what_is_kept_for_the_next_run_is_the_replicas_own_until_it_is_set_outside():
    strategy, module = MirroredStrategy(DEVICES[:2]), Module()

    def step():
        before = tf.constant(-1.0) if module.total is None else module.total
        module.total = tf.cast(replica() + 1, tf.float32) + tf.maximum(before, 0.0)
        return tf.identity(before)

    def values():
        return [float(each) for each in strategy.experimental_local_results(strategy.run(step))]

    assert [values() for _ in range(3)] == [[-1, -1], [1, 2], [2, 4]]
    assert float(module.total) == 3  # of the first replica
    module.total = tf.constant(7.0)
    assert [values(), values()] == [[7, 7], [8, 9]]
    assert float(Module().total or 5) == 5  # another object has the default of the class


def test_what_a_first_call_makes_is_shared():
    """Flags tell the other replicas that there is nothing to make, also of what holds tensors."""
    strategy = MirroredStrategy(DEVICES[:2])

    class Lazy(tf.Module):
        is_built, positions, calls = False, None, 0

        def __call__(self, x):
            self.calls += 1
            if not self.is_built:
                self.weight = tf.Variable(3.0)
                self.positions = tf.range(2.0)
                self.blocks = []
                self.blocks.append(tf.Variable(1.0))
                self.is_built = True
            meet()
            return x * self.weight * self.positions + self.blocks[0]

    class Holder(tf.Module):
        ready, table = False, None

        def __call__(self):
            if not self.ready:
                self.table, self.ready = tf.fill([2], tf.cast(replica(), tf.float32)), True
            meet()
            return self.table

    lazy, holder = Lazy(), Holder()
    for _ in range(2):
        results = strategy.experimental_local_results(strategy.run(lambda: lazy(2.0)))
        assert [each.numpy().tolist() for each in results] == [[1, 7], [1, 7]]
        results = strategy.experimental_local_results(strategy.run(holder))
        assert [each.numpy().tolist() for each in results] == [[0, 0], [1, 1]]
    assert len(lazy.trainable_variables) == 2
    assert len(strategy.experimental_local_results(lazy.weight)) == 2


def test_a_class_that_is_copied_to_another_process_has_no_attribute_more():
    cloudpickle = pytest.importorskip("cloudpickle")  # as Ray does with classes of the program

    class Keeps(tf.Module):
        default = None

        def __call__(self):
            self.default = self.kept = tf.cast(replica(), tf.float32)

    MirroredStrategy(DEVICES[:2]).run(Keeps())
    copied = cloudpickle.loads(cloudpickle.dumps(Keeps))()
    assert not hasattr(copied, "kept")
    assert copied.default is None
    copied.kept = 5
    assert copied.kept == 5


def test_a_property_and_a_setter_of_ones_own_are_called():
    strategy = MirroredStrategy(DEVICES[:2])

    class Own(tf.Module):
        @property
        def z(self):
            return self.inner * 2

        @z.setter
        def z(self, value):
            self.inner = value

    own = Own()

    def step():
        own.z = tf.cast(replica() + 1, tf.float32)
        meet()
        return own.z

    assert [float(each) for each in strategy.experimental_local_results(strategy.run(step))] == [2, 4]
