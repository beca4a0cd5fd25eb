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


def test_more_gpus_than_there_are(monkeypatch):
    """On a machine with two GPUs."""
    found = jax.devices("cpu") * 2
    monkeypatch.setattr(devices, "_accelerators", lambda platform: tuple(found[:2]) if platform == "gpu" else ())
    with pytest.raises(DeviceError, match="Ask for 2 or fewer, or run on CPU devices, which are made"):
        TPUStrategy(num_cores=4)


def test_host_work_with_a_type_that_cannot_be_sent(tpu, monkeypatch):
    """On a TPU."""
    monkeypatch.setattr(executable.jaxlib, "HOST_CALL_TARGETS", {"cpu": BY_TRANSFERS})

    def step(x):
        xla.outside_compilation(lambda x: tf.print("x", x), tf.cast(x, tf.dtypes.experimental.float8_e5m2))

    words = r"in step, takes or returns a value of the type tensor<f8E5M2>, which cannot"
    with pytest.raises(DeviceError, match=words):
        tpu.run(step, args=(tf.constant(1.0),))


def test_arguments_that_name_no_devices():
    with pytest.raises(DeviceError, match="num_cores, the number of devices, must be a positive int; got"):
        TPUStrategy(num_cores=2.5)
    with pytest.raises(DeviceError, match="Pass one of tpu, gpu, cpu, or None for the first of these"):
        TPUStrategy(xla.PjrtClusterResolver("npu"))
    with pytest.raises(DeviceError, match="`kind` of logical devices must be"):
        logical_devices(2, kind="TPU")


def test_a_second_strategy_with_more_devices(monkeypatch):
    """In a job of two workers with one device each, whose worker 0 is this process."""
    cluster = workers.find_cluster({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "host-a", "MASTER_PORT": "2222"})
    member = types.SimpleNamespace(check=lambda: None)
    joined = types.SimpleNamespace(cluster=cluster, member=member, platform="cpu", devices=[("own",), ("other",)])
    monkeypatch.setattr(job_devices, "_joined", [joined])
    with pytest.raises(DeviceError, match="4 CPU devices were asked for, and all workers together have"):
        TPUStrategy(xla.PjrtClusterResolver("cpu", "host-a:2222", 2, 0), num_cores=4)


def test_a_body_for_a_list_of_devices():
    lowered = xla.lower(lambda x: 2.0 * x, inputs=[[tf.constant(1.0)], [tf.constant(2.0)]])
    with pytest.raises(DeviceError, match="devices, or None for the first devices of the best platform"):
        lowered.compile(["CPU:0", "CPU:1"])


def test_gpus_where_there_are_none(monkeypatch):
    """On a machine without GPUs."""
    with pytest.raises(DeviceError, match="No such device: GPU:0, GPU:1"):
        MirroredStrategy(["GPU:0", "GPU:1"])
    monkeypatch.setattr(thread_state, "started", lambda: False)
    with pytest.raises(DeviceError, match="This machine has no GPU device that could be divided into"):
        MirroredStrategy(logical_devices(2, "GPU"))


def test_devices_asked_for_too_late():
    """TensorFlow has started with 8 CPU devices."""
    x = tf.ones([4])
    with pytest.raises(DeviceError, match="16 logical CPU devices were requested, but TensorFlow has"):
        MirroredStrategy(logical_devices(16)).run(tf.square, args=(x,))
