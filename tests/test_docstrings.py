"""Every example in a docstring runs and shows what it says."""

import doctest
import importlib
import pkgutil
import re

import pytest
from helpers.versions import HAS_XLA

import replica_engine

NEEDS_JAX = re.compile(r"replica_engine\.(xla|pjrt|strategies\.tpu)")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(replica_engine.__path__, "replica_engine.")
    if not module.name.endswith("__main__") and (HAS_XLA or not NEEDS_JAX.search(module.name))
]


TRAINS = pytest.mark.full("its examples train and compile, as the tests do")
MARKS = dict.fromkeys(("keras", "strategies", "testing", "xla"), TRAINS)


@pytest.mark.parametrize(
    "package",
    [pytest.param(name, marks=MARKS.get(name, ())) for name in sorted({name.split(".")[1] for name in MODULES})],
)
def test_examples_run(package):
    names = [name for name in MODULES if name.split(".")[1] == package]
    failed = [name for name in names if doctest.testmod(importlib.import_module(name), verbose=False).failed]
    assert not failed


def test_examples_of_the_package_itself_run():
    assert doctest.testmod(replica_engine, verbose=False).failed == 0


def test_the_public_names_have_examples():
    for name in ("MirroredStrategy", "ReplicaContext", "call_for_each_replica"):
        assert ">>>" in getattr(replica_engine, name).__doc__
