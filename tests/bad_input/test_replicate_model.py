"""`replicate_model` of anything, and its models on data of all kinds: as on one device, or an error.

What plain Keras raises for the same data is Keras' to word; replicas must not make anything worse of it.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.bad_inputs import ARRAYS, COMPOSITES, ENDLESS, PYTHON, TENSORS
from helpers.bad_values import examples, garbage, values_from
from helpers.outcomes import attempt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replica_engine.errors import ReplicateError, ReplicaValueError
from replica_engine.keras import replicate_model

X = np.linspace(0, 1, 24, dtype=np.float32).reshape(6, 4)
Y = X.sum(1, keepdims=True)
METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def small(compiled=True):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="ones")])
    if compiled:
        model.compile("sgd", "mse")
    return model


class Replicated:
    """A replicated model, and a plain one to compare with.

    Attributes:
        plain: the plain one.
        model: the replicated one.
    """

    def __init__(self, strategy):
        self.plain = small()
        self.model = replicate_model(small(), strategy=strategy)
        self.check()

    def check(self):
        """Both predict the same."""
        weights = [np.ones([4, 1], np.float32), np.zeros([1], np.float32)]
        for model in (self.plain, self.model):
            model.set_weights(weights)
        np.testing.assert_allclose(self.model.predict_on_batch(X), Y, rtol=1e-5)


def call(model, method, x, y=None):
    options = {} if "batch" in method else {"verbose": 0}
    if method == "predict_on_batch":
        return model.predict_on_batch(x)
    if method == "predict":
        return model.predict(x, batch_size=4, **options)
    return getattr(model, method)(x, y, **({} if "batch" in method else {"batch_size": 4}), **options)


def compare(both, method, x, y=None):
    """Replicas come to what one device comes to; where that fails, they fail as well, and go on working."""
    expected, refused = attempt(call, both.plain, method, x, y, documented=Exception)
    found, error = attempt(call, both.model, method, x, y, documented=type(refused) if refused else ())
    if refused is None:
        assert error is None, error
        if method.startswith("predict"):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    both.check()


@pytest.fixture
def models(both):
    return Replicated(both.strategy)


def data(width):
    """Arrays of samples: of other dtypes, with NaNs, with none, with one too many axes."""
    kinds = st.sampled_from([np.float16, np.float32, np.float64, np.int32, np.int64, np.bool_, np.uint8])
    shapes = st.tuples(st.integers(0, 9), st.just(width))
    return kinds.flatmap(lambda kind: hnp.arrays(kind, shapes)) | hnp.arrays(np.float32, st.tuples(st.integers(0, 3)))


@examples(15)
@given(model=garbage(), replicas=garbage(), strategy=garbage())
def test_no_models(model, replicas, strategy):
    attempt(replicate_model, model)
    if replicas is not None:
        attempt(replicate_model, small(), replicas)
    if strategy is not None:
        attempt(replicate_model, small(), strategy=strategy)
        attempt(replicate_model, small(), replicas, strategy)


@examples(10)
@given(x=data(4), y=data(1), method=st.sampled_from(["fit", "evaluate", "predict", "predict_on_batch"]))
def test_arrays(models, x, y, method):
    compare(models, method, x, y)


@examples(5)
@given(x=values_from(PYTHON, ARRAYS, TENSORS, COMPOSITES, ENDLESS), method=st.sampled_from(METHODS))
def test_no_inputs(models, x, method):
    compare(models, method, x, Y)


@examples(5)
@given(y=values_from(PYTHON, ARRAYS, TENSORS, COMPOSITES, ENDLESS), method=st.sampled_from(METHODS[:2]))
def test_no_targets(models, y, method):
    compare(models, method, X, y)


@pytest.mark.parametrize("replicas", [0, -1, 1.5, "2", True, 10**9, 2**80, [2], tf.constant("2")], ids=repr)
def test_numbers_of_replicas_that_are_none(replicas):
    with pytest.raises((ReplicateError, ValueError), match="replicas"):
        replicate_model(small(), replicas)


def test_a_model_that_is_not_compiled_predicts_and_does_not_train(both):
    model = replicate_model(small(compiled=False), strategy=both.strategy)
    np.testing.assert_allclose(model.predict(X, verbose=0), Y, rtol=1e-5)
    with pytest.raises(ValueError, match="compile"):
        model.fit(X, Y, verbose=0)


def test_nan_is_a_loss_like_any_other(models):
    x = X.copy()
    x[3, 1] = np.nan
    assert np.isnan(call(models.model, "evaluate", x, Y))
    assert np.isnan(call(models.model, "fit", x, Y).history["loss"][0])
    models.check()


def test_errors_of_keras_are_those_of_one_device(models):
    for x in (None, X[:, :3], np.array(["a"])):
        for method in METHODS:
            compare(models, method, x, Y)


def test_a_bytearray_is_no_batch(models):
    with pytest.raises(ReplicaValueError, match="bytearray"):
        models.model.train_on_batch(bytearray(b"ab"), Y)
