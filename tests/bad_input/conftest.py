"""Both strategies on two replicas, each with a step by which to see that it still works."""

import pytest
from helpers.devices import DEVICES
from helpers.versions import HAS_XLA

from replica_engine import MirroredStrategy

KINDS = {"mirrored": lambda: MirroredStrategy(DEVICES[:2])}
if HAS_XLA:
    from replica_engine import TPUStrategy

    KINDS["tpu"] = lambda: TPUStrategy(num_cores=2)
else:
    collect_ignore = [
        "test_bodies.py",
        "test_calls.py",
        "test_collectives.py",
        "test_devices.py",
        "test_replicate.py",
        "test_run_steps.py",
        "test_scopes.py",
        "test_values.py",
    ]

pytest.register_assert_rewrite("helpers.outcomes")


def _witness(kind):
    from helpers.outcomes import Witness  # not above: its assertions have to be rewritten first

    witness = Witness(KINDS[kind]())
    witness.check()
    return witness


@pytest.fixture(params=list(KINDS))
def both(request):
    """A new strategy of each kind, with its known-good step taken once."""
    return _witness(request.param)


@pytest.fixture
def compiled():
    """A new TPUStrategy, with its known-good step taken once."""
    return _witness("tpu")


@pytest.fixture
def threads():
    """A new MirroredStrategy."""
    return KINDS["mirrored"]()


@pytest.fixture
def tpu():
    """A new TPUStrategy."""
    return KINDS["tpu"]()
