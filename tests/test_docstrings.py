"""Every example in a docstring runs and shows what it says."""

import doctest
import importlib
import pkgutil

import pytest

import replica_engine

MODULES = [
    module.name
    for module in pkgutil.walk_packages(replica_engine.__path__, "replica_engine.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["replica_engine", *MODULES])
def test_examples_run(name):
    module = importlib.import_module(name)
    results = doctest.testmod(module, verbose=False)
    assert results.failed == 0


def test_the_public_names_have_examples():
    for name in ("MirroredStrategy", "ReplicaContext", "call_for_each_replica"):
        assert ">>>" in getattr(replica_engine, name).__doc__
