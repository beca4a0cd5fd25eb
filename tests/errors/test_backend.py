"""Devices of compiled programs, and jax, which brings them."""

import sys

import jax
import jaxlib
import pytest
from helpers.golden import shows

import replica_engine
from replica_engine import TPUStrategy, xla
from replica_engine.errors import BackendMissingError, DeviceError
from replica_engine.pjrt import accelerators, devices


@shows(DeviceError, "not_shared")
def test_devices_that_two_workers_cannot_share():
    """In process 0 of 2."""
    TPUStrategy(xla.PjrtClusterResolver("cpu", "host-a:2222", 2, 0), num_cores=3)


@pytest.fixture
def _tpu_in_use(monkeypatch):
    reason = "ABORTED: The TPU is already in use by process with pid 4711. Not attempting to load libtpu.so."
    monkeypatch.setattr(devices, "_accelerators", lambda platform: ())
    monkeypatch.setattr(accelerators, "_reason", lambda platform: reason if platform == "tpu" else "")
    monkeypatch.setattr(accelerators, "_told", set())


@pytest.mark.usefixtures("_tpu_in_use")
@shows("warn_not_started")
def test_cpu_devices_instead_of_a_tpu():
    """On a machine whose TPU another process uses."""
    TPUStrategy(num_cores=2)


@pytest.fixture
def _imported_again(monkeypatch):
    """Makes the next use import `TPUStrategy` and the modules that need jax again."""
    for name in list(sys.modules):
        if name.startswith(("replica_engine.strategies.tpu", "replica_engine.pjrt.")):
            monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def _no_jax(monkeypatch, _imported_again):
    monkeypatch.setitem(sys.modules, "jax", None)


@pytest.mark.usefixtures("_no_jax")
@shows(BackendMissingError, "not_installed")
def test_without_jax():
    """Where jax is not installed."""
    replica_engine.TPUStrategy(num_cores=2)


@pytest.fixture
def _old_jax(monkeypatch, _imported_again):
    monkeypatch.setattr(jax, "__version__", "0.4.30")


@pytest.mark.usefixtures("_old_jax")
def test_with_an_old_jax():
    """Where jax 0.4.30 is installed."""
    with pytest.raises(BackendMissingError, match="replica_engine needs 0"):
        replica_engine.TPUStrategy(num_cores=2)


@pytest.fixture
def _new_jax(monkeypatch, _imported_again):
    monkeypatch.setattr(jax, "__version__", "1.0.0")
    monkeypatch.delattr(jaxlib._jax, "batched_device_put")


@pytest.mark.usefixtures("_new_jax")
def test_with_a_jax_of_the_future():
    """Where a jax is installed that has other names."""
    with pytest.raises(BackendMissingError, match="Install a version that replica_engine was tested with"):
        replica_engine.TPUStrategy(num_cores=2)
