"""Both strategies, and short ways to say what nearly every test here says: as on one device.

Tracing and compiling take nearly all the time. So a claim is tested on both kinds of strategies where they differ in
code, and else on one of them, with `pytest.mark.on("mirrored")` or `pytest.mark.on("tpu")`. With `rest="tpu"` it is
tested on that in the full tier: the parts of it that differ are watched by others.
"""

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.versions import HAS_XLA

import replica_engine
from replica_engine import MirroredStrategy
from replica_engine.keras import replicate_model

MAKERS = {"mirrored": lambda size: MirroredStrategy(DEVICES[:size])}
if HAS_XLA:
    MAKERS["tpu"] = lambda size: replica_engine.TPUStrategy(num_cores=size)

# Losses, gradients and metrics are summed over replicas, and so in another order than on one device: a few units in
# the last place (6e-8 in float32) for each step. Adam divides by a root that may be small. Twenty steps of the small
# models here stay well below these; a sample that counts twice, or not at all, shows in the second digit.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Pair:
    """A model on one device, and the same replicated, which tests of a module share: compiling takes long.

    Attributes:
        alone: runs eagerly, which saves the time to trace it; the numbers are the same.
        replicated: what `replicate_model` made of `original`.
        original: the model that it was given.
        both: `alone` and `replicated`.
    """

    def __init__(self, make, strategy):
        self.alone, self.original = _seeded(make), _seeded(make)
        self.alone.run_eagerly = True
        self.replicated = replicate_model(self.original, strategy=strategy)
        self.both = (self.alone, self.replicated)
        self._start = []
        for model in (self.alone, self.original):
            model.optimizer.build(model.trainable_variables)
            self._start.append([variable.numpy() for variable in self._variables(model)])
        strategy.run(lambda: None)  # so that its threads are there before a test that looks for new ones

    def restart(self):
        """Resets both models to their initial state."""
        for model, values in zip((self.alone, self.original), self._start, strict=True):
            for variable, value in zip(self._variables(model), values, strict=True):
                variable.assign(value)
            model.reset_metrics()
            model.stop_training = False

    def _variables(self, model):
        return [*model.variables, *model.optimizer.variables]


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "on(kind, rest): run the test, or those of a module, on this kind of strategy, and not on all"
    )


def pytest_generate_tests(metafunc):
    """Runs a test that takes `both` on each kind of strategy, or on the ones that it is marked with."""
    if "both" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("on")
        kinds = [kind if kind in MAKERS else "mirrored" for kind in marker.args] if marker else list(MAKERS)
        if marker and (rest := marker.kwargs.get("rest")) in MAKERS and rest not in kinds:
            kinds.append(pytest.param(rest, marks=pytest.mark.full("as on the other kind of strategy")))
        metafunc.parametrize("both", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def both(request):
    """`both(size)`: a strategy of so many replicas; a test that takes it runs on each kind, or on that of its mark."""
    return MAKERS[request.param]


@pytest.fixture(scope="module")
def make_pair(both):
    """`make_pair(make, size)`: for the fixtures of a module."""
    return lambda make, size: Pair(make, both(size))


@pytest.fixture
def pair(two):
    """On one device and on 2 replicas, as they began: the `two` of a module, which its tests share."""
    two.restart()
    return two


@pytest.fixture
def is_tpu(both):
    """Whether steps are compiled by XLA."""
    return both is not MAKERS["mirrored"]


@pytest.fixture
def alone_and_replicated(both):
    """`alone_and_replicated(make, size)`: what `make()` builds for one device, and the same replicated."""

    def alone_and_replicated(make, size):
        alone = _seeded(make)
        alone.run_eagerly = True  # which saves the time to trace it; the numbers are the same
        return alone, replicate_model(_seeded(make), strategy=both(size))

    return alone_and_replicated


@pytest.fixture(scope="session")
def alike():
    """`alike(found, expected)`: the same numbers, in dicts, lists or arrays, but for the order of sums."""
    return _alike


@pytest.fixture(scope="session")
def agree():
    """`agree(models, call)`: `call` makes the same of both models, alone and replicated; returns what of the latter."""

    def agree(models, call, **close):
        expected, found = map(call, models)
        _alike(found, expected, **close)
        return found

    return agree


@pytest.fixture(scope="session")
def batched():
    """`batched(size, x, y)`: a dataset of batches of so many samples, of arrays or structures of arrays.

    Of arrays Keras makes a pipeline for each call, which takes longer than most models here take to train:
    tests/keras/test_inputs.py trains on arrays and on all else that Keras takes.
    """
    return _batched


@pytest.fixture
def trains_alike(alone_and_replicated):
    """`trains_alike(make, size, x, y)`: fits alone and replicated, and compares history, weights, optimizer state.

    In batches of `batch_size`, or those of a dataset. `close` are tolerances other than `CLOSE`. Returns both models,
    the replicated one last, and its history.
    """

    def trains_alike(make, size, *data, close=None, batch_size=32, validation_data=None, epochs=1):
        models = alone_and_replicated(make, size)
        data = data[0] if isinstance(data[0], tf.data.Dataset) else _batched(batch_size, *data)
        validation_data = validation_data and _batched(batch_size, *validation_data)
        options = {"epochs": epochs, "validation_data": validation_data, "shuffle": False, "verbose": 0}
        expected, found = (model.fit(data, **options).history for model in models)
        _alike(found, expected, **(close or {}))
        expected, new = (model.get_weights() for model in models)
        _alike(new, expected, **(close or {}))
        expected, new = ([variable.numpy() for variable in _kept(model)] for model in models)
        _alike(new, expected, **(close or {}))
        return *models, found

    return trains_alike


def _batched(size, *parts):
    return tf.data.Dataset.from_tensor_slices(keras.tree.lists_to_tuples(parts)).batch(size)


def _seeded(make):
    keras.utils.set_random_seed(1)
    return make()


def _kept(model):
    return [] if model.optimizer is None else model.optimizer.variables


def _alike(found, expected, **close):
    if isinstance(expected, Mapping):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, Sequence) and not isinstance(expected, str):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _alike(one, other, **close)
        return
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape
    assert found.dtype.kind == expected.dtype.kind
    assert np.all(np.isfinite(found.astype("float64")))
    np.testing.assert_allclose(found.astype("float64"), expected.astype("float64"), **{**CLOSE, **close})
