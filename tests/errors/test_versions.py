"""TensorFlow, Keras and jax in versions that do not serve, or that were never tested."""

import importlib
import sys

import pytest
import tensorflow as tf
from helpers.golden import shows
from tensorflow.python.autograph.impl import api

import replica_engine
from replica_engine.errors import TensorFlowVersionError
from replica_engine.errors.device_errors import untested_version


def import_again(monkeypatch, *names):
    """Makes the next use import modules again."""
    modules = [importlib.import_module(f"replica_engine.{name}") for name in ("upstream.versions", *names)]
    for module in modules:
        package, _, last = module.__name__.rpartition(".")
        monkeypatch.delattr(sys.modules[package], last)
        monkeypatch.delitem(sys.modules, module.__name__)


@pytest.fixture
def _no_tensorflow(monkeypatch):
    import_again(monkeypatch)

    class Nowhere:
        def find_spec(self, name, path=None, target=None):
            if name == "tensorflow":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.delitem(sys.modules, "tensorflow")
    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])


@pytest.mark.usefixtures("_no_tensorflow")
@shows(TensorFlowVersionError)
def test_without_tensorflow():
    """Where TensorFlow is not installed."""
    replica_engine.MirroredStrategy(["CPU:0"])


@pytest.fixture
def _old_tensorflow(monkeypatch):
    import_again(monkeypatch)
    monkeypatch.setattr(tf, "__version__", "2.18.1")


@pytest.mark.usefixtures("_old_tensorflow")
def test_with_an_old_tensorflow():
    """Where TensorFlow 2.18.1 is installed."""
    with pytest.raises(TensorFlowVersionError, match="replica_engine needs 2"):
        replica_engine.MirroredStrategy(["CPU:0"])


@pytest.fixture
def _new_tensorflow(monkeypatch):
    import_again(monkeypatch, "values.split_batches", "upstream.graphs.autograph")
    monkeypatch.setattr(tf, "__version__", "2.30.0")


@pytest.mark.usefixtures("_new_tensorflow")
@shows(untested_version)
def test_with_a_new_tensorflow():
    """Where TensorFlow 2.30.0 is installed."""
    replica_engine.MirroredStrategy(["CPU:0"])


@pytest.fixture
def _lacking_tensorflow(monkeypatch, _new_tensorflow):
    monkeypatch.delattr(api, "autograph_artifact")


@pytest.mark.usefixtures("_lacking_tensorflow")
def test_with_a_tensorflow_that_lacks_a_name():
    """Where TensorFlow 2.30.0 is installed, and has other names."""
    with pytest.raises(TensorFlowVersionError, match="Install the newest version that replica_engine was tested"):
        replica_engine.accumulate(2)
