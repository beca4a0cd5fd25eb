"""Small models that run eagerly: nothing to trace on one device and on threads, so that a check takes a moment."""

import keras
import numpy as np
import pytest
from helpers.versions import HAS_XLA

from replica_engine.testing import check_parity

KINDS = ["MirroredStrategy", "TPUStrategy"] if HAS_XLA else ["MirroredStrategy"]

X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(24, 1)).astype("float32")


def pytest_generate_tests(metafunc):
    """Runs a test that takes `kind` for each strategy."""
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS)


@pytest.fixture
def kinds():
    """Both, for a check of all at once: what one device computes is computed once for them."""
    return KINDS


@pytest.fixture
def make():
    """`make(*layers, loss=..., metrics=...)`: a compiled model with those layers between two Dense ones."""

    def make(*layers, loss="mse", optimizer="sgd", metrics=(), eager=True):
        keras.utils.set_random_seed(0)
        inside = [keras.layers.Dense(3, "tanh", name="first"), *layers, keras.layers.Dense(1, name="last")]
        model = keras.Sequential([keras.Input((4,)), *inside], name="small")
        model.compile(optimizer, loss, metrics=list(metrics), run_eagerly=eager)
        return model

    return make


@pytest.fixture
def on_threads():
    """`on_threads(model)`: the check of a model on two threads, one step with shares of 4 and 3 rows."""

    def on_threads(model, **options):
        defaults = {"steps": 1, "batch_size": 7, "strategies": "MirroredStrategy"}
        return check_parity(model, X, Y, **{**defaults, **options})

    return on_threads
