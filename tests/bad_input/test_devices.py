"""Devices that a strategy or a compiled body cannot have."""

import types

import jax
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy, logical_devices, workers, xla
from replica_engine.errors import DeviceError
from replica_engine.pjrt import devices, executable, job_devices
from replica_engine.pjrt.jaxlib import BY_TRANSFERS
from replica_engine.upstream import thread_state


@pytest.fixture
def _a_job_of_two_devices(monkeypatch):
    """This process has joined as worker 0 of 2, with one device each."""
    cluster = workers.find_cluster({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host-a", "MASTER_PORT": "2222"})
    member = types.SimpleNamespace(check=lambda: None)
    joined = types.SimpleNamespace(cluster=cluster, member=member, platform="cpu", devices=[("own",), ("other",)])
    monkeypatch.setattr(job_devices, "_joined", [joined])


@pytest.fixture
def _two_gpus(monkeypatch):
    found = jax.devices("cpu") * 2
    monkeypatch.setattr(devices, "_accelerators", lambda platform: tuple(found[:2]) if platform == "gpu" else ())


@pytest.fixture
def _as_on_a_tpu(monkeypatch):
    monkeypatch.setattr(executable.jaxlib, "HOST_CALL_TARGETS", {"cpu": BY_TRANSFERS})


@pytest.fixture
def _before_the_start(monkeypatch):
    monkeypatch.setattr(thread_state, "started", lambda: False)


def test_half_a_device():
    with pytest.raises(DeviceError, match="The number of devices must be a positive int"):
        TPUStrategy(num_cores=2.5)


@pytest.mark.usefixtures("_a_job_of_two_devices")
def test_a_second_strategy_with_more_devices():
    """After TPUStrategy(num_cores=2) in a job of two workers."""
    with pytest.raises(DeviceError, match="4 CPU devices were asked for, and all workers together have"):
        TPUStrategy(xla.PjrtClusterResolver("cpu", "host-a:2222", 2, 0), num_cores=4)


def test_a_platform_that_is_none():
    with pytest.raises(DeviceError, match="Pass one of tpu, gpu, cpu, or None for the first of these"):
        TPUStrategy(xla.PjrtClusterResolver("npu"))


@pytest.mark.usefixtures("_two_gpus")
def test_more_gpus_than_there_are():
    """On a machine with two GPUs."""
    with pytest.raises(DeviceError, match="Ask for 2 or fewer, or run on CPU devices, which are made"):
        TPUStrategy(num_cores=4)


def test_a_body_for_a_list_of_devices():
    def double(x):
        return 2.0 * x

    lowered = xla.lower(double, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])
    with pytest.raises(DeviceError, match="devices, or None for the first devices of the best platform"):
        lowered.compile(["CPU:0", "CPU:1"])


@pytest.mark.usefixtures("_as_on_a_tpu")
def test_host_work_with_a_type_that_cannot_be_sent():
    """On a TPU."""
    strategy = TPUStrategy(num_cores=2)

    def report(x):
        tf.print("x", x)

    def step(x):
        xla.outside_compilation(report, tf.cast(x, tf.dtypes.experimental.float8_e5m2))

    with pytest.raises(
        DeviceError, match=r"in step, takes or returns a value of the type tensor<f8E5M2>, which cannot"
    ):
        strategy.run(step, args=(tf.constant(1.0),))


def test_gpus_where_there_are_none():
    """On a machine without GPUs."""
    with pytest.raises(DeviceError, match="No such device: GPU:0, GPU:1"):
        MirroredStrategy(["GPU:0", "GPU:1"])


def test_devices_asked_for_too_late():
    """TensorFlow has started with 8 CPU devices."""
    x = tf.ones([4])
    with pytest.raises(DeviceError, match="16 logical CPU devices were requested, but TensorFlow has"):
        MirroredStrategy(logical_devices(16)).run(tf.square, args=(x,))


@pytest.mark.usefixtures("_before_the_start")
def test_logical_gpus_of_no_gpu():
    """On a machine without GPUs."""
    with pytest.raises(DeviceError, match="This machine has no GPU device that could be divided into"):
        MirroredStrategy(logical_devices(2, "GPU"))


def test_logical_tpus():
    with pytest.raises(DeviceError, match="`kind` of logical devices must be"):
        logical_devices(2, kind="TPU")
