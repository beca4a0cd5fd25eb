"""What a callback builds, sets, loads or compiles counts from the next step on, on all replicas, as on one device.

Keras creates the variables of all this outside of a strategy's scope. A matrix of Keras' own callbacks, in two
processes, is in `test_resuming.py`.
"""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import OneLayer, built, dense
from keras import layers, optimizers

import replica_engine
from replica_engine import logical_devices
from replica_engine.keras import replicate_model

pytestmark = pytest.mark.on("mirrored")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 4)).astype("float32")
Y = RANDOM.normal(size=(16, 2)).astype("float32")
# Datasets: of arrays Keras makes a pipeline that takes longer to start than the model to train.
BATCHES, VALIDATION = (tf.data.Dataset.from_tensor_slices((X[:count], Y[:count])).batch(8) for count in (16, 8))
QUIET = {"shuffle": False, "verbose": 0}
DATA = {"validation_data": VALIDATION, **QUIET}


def regression(optimizer=None, **options):
    keras.utils.set_random_seed(1)
    optimizer = optimizer or optimizers.SGD(0.05, momentum=0.9)
    return dense(4, 2, optimizer, "mse", metrics=["mae"], run_eagerly=True, **options)


def read_state(model):
    return [variable.numpy() for variable in [*model.variables, *model.optimizer.variables]]


def remake(model):
    """Plain Keras goes on with the functions that it has."""
    for name in ("train", "test", "predict"):
        getattr(model, f"make_{name}_function")(force=True)


def build(model):
    model.optimizer.build(model.trainable_variables)


def set_unbuilt(model):
    model.optimizer = optimizers.Adagrad(0.1)
    remake(model)


def set_built(model):
    set_unbuilt(model)
    build(model)


def set_and_load(model):
    model.optimizer = optimizers.SGD(0.02, momentum=0.9)
    build(model)
    donor = regression()
    donor.fit(BATCHES, **QUIET)
    state = {}
    donor.optimizer.save_own_variables(state)
    model.optimizer.load_own_variables(state)
    remake(model)


def compile(model):
    model.compile(optimizers.Adam(0.1), "mae", metrics=["mse"], run_eagerly=True)
    remake(model)


def compile_and_use(model):
    compile(model)
    model.fit(VALIDATION, **QUIET)
    model.predict_on_batch(X[:5])


def apply(model):
    """A step of the callback's own."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(X[:8]) - Y[:8]) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


def compile_and_apply(model):
    compile(model)
    apply(model)


def restore(model):
    """TensorFlow's checkpoint of weights and optimizer, built there."""
    donor = regression()
    donor.fit(BATCHES, **QUIET)
    build(model)
    for variable, value in zip([*model.variables, *model.optimizer.variables], read_state(donor), strict=True):
        variable.assign(value)


# Each change in other hooks, by the model that callbacks are given (False) and by the original (True). Where nothing
# builds the optimizer, the first step does.
IN_HOOKS = [
    (build, "set_model", False),
    (build, "on_train_batch_begin", True),
    (set_unbuilt, "on_epoch_end", True),
    (set_built, "on_test_end", False),
    (set_and_load, "on_train_batch_end", True),
    (compile, "on_epoch_begin", True),
    (compile_and_use, "on_epoch_end", False),
    (compile_and_apply, "on_epoch_begin", True),
    (apply, "on_test_begin", False),
    (apply, "on_train_end", True),
    (restore, "on_train_batch_end", True),
]


class At(keras.callbacks.Callback):
    """Does it at the first call of a hook, with the model that it is given, or that it is a callback of."""

    def __init__(self, hook, do, model=None):
        super().__init__()
        self._do, self._given, self._is_done = do, model, False
        self._at_once = hook == "set_model"
        if not self._at_once:
            setattr(self, hook, self._now)

    def set_model(self, model):
        super().set_model(model)
        if self._at_once:
            self._now()

    def _now(self, *_, **__):
        if not self._is_done:
            self._is_done = True
            self._do(self._given or self.model)


def everything(model, original, callback):
    """Of a fit with the callback, and of one of the original after it, which has its own variables again."""
    history, state = model.fit(BATCHES, epochs=2, callbacks=[callback], **DATA).history, read_state(model)
    return [history, original.fit(BATCHES, **QUIET).history], [state, read_state(original)]


def check(alike, strategy, do, hook, by_original):
    alone, original = regression(), regression()
    model = replicate_model(original, strategy=strategy)
    expected = everything(alone, alone, At(hook, do))
    found = everything(model, original, At(hook, do, original if by_original else None))
    alike(found, expected, rtol=1e-3, atol=2e-5)


@pytest.fixture(scope="module")
def two_replicas(both):
    strategy = both(2)
    strategy.run(lambda: None)  # so that its threads are there before a test that looks for new ones
    return strategy


@pytest.mark.parametrize(
    ("do", "hook", "by_original"), IN_HOOKS, ids=[f"{do.__name__} {hook}" for do, hook, _ in IN_HOOKS]
)
def test_it_counts(two_replicas, alike, do, hook, by_original):
    check(alike, two_replicas, do, hook, by_original)


@pytest.mark.on("tpu")
@pytest.mark.parametrize(
    ("do", "hook"),
    [
        pytest.param(build, "on_train_begin", marks=pytest.mark.full("the other builds too")),
        (set_and_load, "on_train_batch_end"),
    ],
)
def test_it_counts_where_steps_are_compiled(two_replicas, alike, do, hook):
    check(alike, two_replicas, do, hook, by_original=False)


class Own(OneLayer):
    """Has a step, and a second optimizer, which Keras builds when the step first applies it."""

    def __init__(self):
        super().__init__()
        self.own = optimizers.Adam(0.05)

    def train_step(self, data):
        x, y = data[:2]
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.own.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.fixture
def own_alike(two_replicas, alike):
    """`own_alike(use)`: what `use(model, original)` gives is alike on one device and on replicas."""

    def own_alike(use):
        found = []
        for is_replicated in (False, True):
            keras.utils.set_random_seed(1)
            original = built(Own(), X[:1], loss="mse", run_eagerly=not is_replicated)
            model = replicate_model(original, strategy=two_replicas) if is_replicated else original
            found.append([variable.numpy() for variable in use(model, original)])
        alike(found[1], found[0])

    return own_alike


@pytest.mark.on("mirrored", "tpu")
def test_an_optimizer_that_a_step_builds_goes_on_in_the_next_fit(own_alike):
    """Its state is that of the original, whose variables the traced step updates."""

    def use(model, original):
        for _ in range(3):
            model.fit(BATCHES, **QUIET)
        return [*original.variables, *original.own.variables]

    own_alike(use)


def test_an_optimizer_that_a_step_builds_is_current_after_each_call(own_alike):
    """Its variables, and the TensorFlow variables that they held after the first call."""

    def use(model, original):
        model.train_on_batch(X[:4], Y[:4])
        held = [variable.value for variable in original.own.variables]
        for begin in (4, 8, 12):
            model.train_on_batch(X[begin : begin + 4], Y[begin : begin + 4])
            yield from [*original.own.variables, *held]

    own_alike(use)


def test_in_a_scope_it_trains_as_outside(two_replicas, alike):
    """Where users of tf.distribute are used to call fit; what a callback creates there is none of the replicas'."""
    alone, model = regression(), replicate_model(regression(), strategy=two_replicas)
    created = []
    note = At("on_epoch_end", lambda model: created.append(tf.Variable(1.0)))
    with two_replicas.scope():
        found = model.fit(BATCHES, epochs=2, callbacks=[note], **DATA).history
        assert tf.distribute.get_strategy() is two_replicas
        inside = tf.Variable(1.0)
    alike(found, alone.fit(BATCHES, epochs=2, **DATA).history)
    alike(read_state(model), read_state(alone))
    assert not hasattr(created[0], "values")
    assert len(inside.values) == 2


def test_an_optimizer_of_the_scope_becomes_the_models_own(two_replicas, alike):
    """A callback that compiles as tf.distribute has it."""

    def compile_in_scope(model):
        with two_replicas.scope():
            compile(model)

    alone, original = regression(), regression()
    model = replicate_model(original, strategy=two_replicas)
    expected = everything(alone, alone, At("on_epoch_begin", compile))
    alike(everything(model, original, At("on_epoch_begin", compile_in_scope)), expected)


def test_replicas_on_other_devices_than_the_weights(alike):
    """The optimizer knows the weights again: built before, or in a callback."""
    strategy = replica_engine.MirroredStrategy(logical_devices(3)[1:])
    for do in (build, lambda model: None):
        check(alike, strategy, do, "on_train_begin", by_original=False)


def test_moving_statistics_that_are_saved_are_those_that_training_goes_on_with(two_replicas, tmp_path):
    """Replicas agree on them then: a second process, which has them from the file, is where this one is."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(momentum=0.5), layers.Dense(2)])
    model.compile(optimizers.SGD(0.1), "mse", run_eagerly=True)
    fast = replicate_model(model, strategy=two_replicas)
    path = tmp_path / "now.weights.h5"
    found = []

    def look(_, logs):
        fast.save_weights(path)
        statistics = model.layers[0].moving_mean.value
        found.append([component.numpy() for component in two_replicas.experimental_local_results(statistics)])

    fast.fit(BATCHES, **QUIET, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=look)])
    assert all(np.array_equal(first, second) for first, second in found)
    model.load_weights(path)
    assert np.array_equal(model.layers[0].moving_mean.numpy(), found[-1][0])


def test_a_seed_that_is_restored_in_a_callback_is_another_one_on_each_replica(two_replicas):
    """Of the next epoch. Replicas with one seed would drop the same units."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5, seed=3), layers.Dense(2)])
    model.compile(optimizers.SGD(0.1), "mse", run_eagerly=True)
    fast = replicate_model(model, strategy=two_replicas)
    state = model.layers[0].seed_generator.state
    seeds = []

    def seeds_now(*_):
        components = two_replicas.experimental_local_results(state.value)
        seeds.append({component.numpy().tobytes() for component in components})

    set_seed = At("on_train_begin", lambda model: state.assign([7, 8]))
    fast.fit(BATCHES, **QUIET, callbacks=[set_seed, keras.callbacks.LambdaCallback(on_epoch_begin=seeds_now)])
    assert len(seeds[0]) == 2
    assert int(state.numpy()[0]) == 7


def test_plain_keras_is_only_asked_for_a_shard_afterwards(two_replicas):
    """Once no replicated method runs, nothing is left on the model; Keras' losses and metrics ask for a shard."""
    model = regression()
    replicate_model(model, strategy=two_replicas).fit(BATCHES, **QUIET)
    ours = set()

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if "keras/backup" not in name and ("replica_engine/keras/" in name or "upstream/keras/keras_models" in name):
            ours.add(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        model.fit(BATCHES, **QUIET)
    finally:
        sys.setprofile(None)
    assert ours == {"_in_shard", "current_shard"}
