"""The original, its replicated models and threads, all at once: in callbacks, nested, side by side."""

import copy
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_models import dense

from replica_engine.errors import ReplicateError
from replica_engine.keras import replicate_model

X = np.random.default_rng(0).normal(size=(18, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
HALVES, WHOLE = (tf.data.Dataset.from_tensor_slices((X, Y)).batch(size) for size in (9, 18))


def make():
    keras.utils.set_random_seed(0)
    return dense(4, 1, keras.optimizers.SGD(0.05, momentum=0.9), "mse")


def make_alone():
    """As on one device; eager, which saves the time to trace it."""
    model = make()
    model.run_eagerly = True
    return model


class AfterTheFirstBatch(keras.callbacks.Callback):
    def __init__(self, do):
        super().__init__()
        self.do = do

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.found = self.do()


def on_another_thread(do):
    """What `do` returns or raises, there."""
    found = []

    def run():
        try:
            found.append(do())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    assert found, "it waits for the thread that waits for it"
    return found[0]


USES = {
    "evaluate": lambda model: lambda: model.evaluate(WHOLE, verbose=0),
    "predict": lambda model: lambda: model.predict(WHOLE, verbose=0),
    "fit": lambda model: lambda: model.fit(WHOLE, verbose=0).history["loss"],
}


def all_uses(model):
    """What each of them gives, one after the other."""
    return lambda: [use(model)() for use in USES.values()]


def everything(original, model, do):
    """All that comes of using a model in a callback of another, before and after."""
    for use in USES.values():
        use(original)()  # so that Keras has traced its functions, with the variables that it has now
    callback = AfterTheFirstBatch(do)
    history = model.fit(HALVES, verbose=0, shuffle=False, callbacks=[callback]).history["loss"]
    after = USES["fit"](original)()
    return [history, callback.found, after, *original.get_weights()]


def test_the_original_works_in_a_callback(both, alike):
    alone, original = make_alone(), make()
    expected = everything(alone, alone, all_uses(alone))
    alike(everything(original, replicate_model(original, strategy=both(2)), all_uses(original)), expected)


@pytest.mark.on("tpu")
def test_another_replicated_model_takes_its_turn_in_a_callback(both, alike):
    alone, original = make_alone(), make()
    expected = everything(alone, alone, USES["fit"](alone))
    model, other = (replicate_model(original, strategy=both(2)) for _ in range(2))
    alike(everything(original, model, USES["fit"](other)), expected)


@pytest.mark.on("mirrored")
def test_another_thread_may_use_the_model_meanwhile(both, alike):
    alone, original = make_alone(), make()
    expected = everything(alone, alone, USES["predict"](alone))
    model = replicate_model(original, strategy=both(2))
    alike(everything(original, model, lambda: on_another_thread(USES["predict"](model))), expected)


@pytest.mark.on("mirrored")
def test_another_replicated_model_on_another_thread_is_refused(both):
    original = make()
    model, other = (replicate_model(original, strategy=both(2)) for _ in range(2))
    callback = AfterTheFirstBatch(lambda: on_another_thread(USES["predict"](other)))
    model.fit(HALVES, verbose=0, callbacks=[callback])
    assert isinstance(callback.found, ReplicateError)
    assert "take turns" in str(callback.found)
    USES["predict"](other)()


@pytest.mark.on("tpu")
def test_what_a_user_has_put_on_an_optimizer_is_there_again(both):
    original = make()
    seen = []
    apply = original.optimizer.apply
    original.optimizer.apply = lambda *args: seen.append(len(args)) or apply(*args)
    mine = original.optimizer.apply
    replicate_model(original, strategy=both(2)).fit(WHOLE, verbose=0)
    assert original.optimizer.apply is mine


def test_keras_writes_the_class_of_the_original(tmp_path):
    @keras.saving.register_keras_serializable("test_taking_turns")
    class Registered(keras.Sequential):
        pass

    model = Registered([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    replicated = replicate_model(model, replicas=2)
    assert replicated.__class__ is type(replicated)
    assert isinstance(replicated, Registered)
    keras.saving.save_model(replicated, tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded) is Registered
    assert type(type(replicated).from_config(model.get_config())) is Registered
    assert type(keras.models.clone_model(replicated)) is type(keras.models.clone_model(model))
    assert type(copy.deepcopy(replicated)) is Registered
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_a_model_with_a_train_function_of_its_own_is_refused():
    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            self.train_function = lambda iterator: {}

    with pytest.raises(ReplicateError, match="overrides make_train_function"):
        replicate_model(Own([keras.Input((4,)), keras.layers.Dense(1)]), replicas=2)


@pytest.mark.on("mirrored")
def test_a_replicated_model_inside_another_one_inside_itself(both, alike):
    """Each `evaluate` is in a callback of the method before it."""
    original, alone = make(), make_alone()
    first, second = (replicate_model(original, strategy=both(2)) for _ in range(2))

    def trained(outer, between, innermost):
        class AfterABatch(keras.callbacks.Callback):
            def on_test_batch_end(self, batch, logs=None):
                inside.append(innermost.evaluate(WHOLE, verbose=0))

        inside = []
        callback = AfterTheFirstBatch(lambda: between.evaluate(WHOLE, verbose=0, callbacks=[AfterABatch()]))
        history = outer.fit(HALVES, verbose=0, shuffle=False, callbacks=[callback]).history["loss"]
        return [history, callback.found, inside, USES["fit"](outer)()]

    alike(trained(first, second, first), trained(alone, alone, alone))
    assert not isinstance(original.layers[0].kernel.value, tf.distribute.DistributedValues)
    alike(USES["fit"](original)(), USES["fit"](alone)())
