"""Devices of compiled programs, and jax, which brings them."""

import sys
import types

import jax
import jaxlib
import pytest
import tensorflow as tf
from helpers.golden import shows

import replica_engine
from replica_engine import TPUStrategy, hosts, xla
from replica_engine.errors import BackendMissingError, DeviceError, warn_not_started
from replica_engine.pjrt import accelerators, devices, executable, markers, workers


@shows(DeviceError.bad_count)
def test_half_a_device():
    TPUStrategy(num_cores=2.5)


@shows(DeviceError.too_many)
def test_more_devices_than_are_made():
    TPUStrategy(num_cores=5000)


@shows(DeviceError.not_shared)
def test_devices_that_two_workers_cannot_share():
    """In process 0 of 2."""
    TPUStrategy(xla.PjrtClusterResolver("cpu", "host-a:2222", 2, 0), num_cores=3)


@pytest.fixture
def _a_job_of_two_devices(monkeypatch):
    """This process has joined as worker 0 of 2, with one device each."""
    cluster = hosts.find_cluster({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host-a", "MASTER_PORT": "2222"})
    member = types.SimpleNamespace(check=lambda: None)
    joined = types.SimpleNamespace(cluster=cluster, member=member, platform="cpu", devices=[("own",), ("other",)])
    monkeypatch.setattr(workers, "_joined", [joined])


@pytest.mark.usefixtures("_a_job_of_two_devices")
@shows(DeviceError.too_few_in_job)
def test_a_second_strategy_with_more_devices():
    """After TPUStrategy(num_cores=2) in a job of two workers."""
    TPUStrategy(xla.PjrtClusterResolver("cpu", "host-a:2222", 2, 0), num_cores=4)


@shows(DeviceError.unknown_platform)
def test_a_platform_that_is_none():
    TPUStrategy(xla.PjrtClusterResolver("npu"))


@shows(DeviceError.one_a_replica)
def test_model_parallelism():
    strategy = TPUStrategy(num_cores=2)

    def step(x):
        return 2.0 * strategy.experimental_split_to_logical_devices(x, [1, 2])

    strategy.run(step, args=(tf.ones([4, 4]),))


@pytest.fixture
def _no_accelerators(monkeypatch):
    monkeypatch.setattr(devices, "_accelerators", lambda platform: ())


@pytest.mark.usefixtures("_no_accelerators")
@shows(DeviceError.none_of_platform)
def test_a_tpu_where_there_is_none():
    """On a machine without TPU."""
    TPUStrategy(xla.PjrtClusterResolver("tpu"))


@pytest.fixture
def _tpu_in_use(monkeypatch):
    reason = "ABORTED: The TPU is already in use by process with pid 4711. Not attempting to load libtpu.so."
    monkeypatch.setattr(devices, "_accelerators", lambda platform: ())
    monkeypatch.setattr(accelerators, "_reason", lambda platform: reason if platform == "tpu" else "")
    monkeypatch.setattr(accelerators, "_told", set())


@pytest.mark.usefixtures("_tpu_in_use")
@shows(DeviceError.not_started)
def test_a_tpu_that_does_not_start():
    """On a machine whose TPU another process uses."""
    TPUStrategy(xla.PjrtClusterResolver("tpu"))


@pytest.mark.usefixtures("_tpu_in_use")
@shows(warn_not_started)
def test_cpu_devices_instead_of_a_tpu():
    """On a machine whose TPU another process uses."""
    TPUStrategy(num_cores=2)


@pytest.fixture
def _two_gpus(monkeypatch):
    found = jax.devices("cpu") * 2
    monkeypatch.setattr(devices, "_accelerators", lambda platform: tuple(found[:2]) if platform == "gpu" else ())


@pytest.mark.usefixtures("_two_gpus")
@shows(DeviceError.too_few)
def test_more_gpus_than_there_are():
    """On a machine with two GPUs."""
    TPUStrategy(num_cores=4)


@shows(DeviceError.other_size)
def test_a_body_for_another_number_of_devices():
    def double(x):
        return 2.0 * x

    lowered = xla.lower(double, inputs=[[tf.constant(float(i))] for i in range(3)])
    lowered.compile(TPUStrategy(num_cores=2).extended.device_group)


@shows(DeviceError.no_group)
def test_a_body_for_a_list_of_devices():
    def double(x):
        return 2.0 * x

    lowered = xla.lower(double, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])
    lowered.compile(["CPU:0", "CPU:1"])


@pytest.fixture
def _as_on_a_tpu(monkeypatch):
    def on_tpu(program, platform, **options):
        return markers.expand_markers(program, "tpu", **options)

    monkeypatch.setattr(executable, "expand_markers", on_tpu)


@pytest.mark.usefixtures("_as_on_a_tpu")
@shows(DeviceError.no_host_calls)
def test_host_work_on_a_tpu():
    """On a TPU."""
    strategy = TPUStrategy(num_cores=2)

    def report(x):
        tf.print("x", x)

    def step(x):
        xla.outside_compilation(report, x)

    strategy.run(step, args=(tf.constant(1.0),))


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
@shows(BackendMissingError.not_installed)
def test_without_jax():
    """Where jax is not installed."""
    replica_engine.TPUStrategy(num_cores=2)


@pytest.fixture
def _old_jax(monkeypatch, _imported_again):
    monkeypatch.setattr(jax, "__version__", "0.4.30")


@pytest.mark.usefixtures("_old_jax")
@shows(BackendMissingError.unsupported)
def test_with_an_old_jax():
    """Where jax 0.4.30 is installed."""
    replica_engine.TPUStrategy(num_cores=2)


@pytest.fixture
def _new_jax(monkeypatch, _imported_again):
    monkeypatch.setattr(jax, "__version__", "1.0.0")
    monkeypatch.delattr(jaxlib._jax, "batched_device_put")


@pytest.mark.usefixtures("_new_jax")
@shows(BackendMissingError.name_vanished)
def test_with_a_jax_of_the_future():
    """Where a jax is installed that has other names."""
    replica_engine.TPUStrategy(num_cores=2)
