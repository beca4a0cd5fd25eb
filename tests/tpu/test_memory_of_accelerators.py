"""Accelerators that run out of memory, and what their runtime reports then. CPU devices stand in for them."""

import types

import pytest
import tensorflow as tf

import replica_engine
from replica_engine.errors import DeviceError, ProgramError
from replica_engine.pjrt import device_group
from replica_engine.pjrt.devices import chip_memory, memory_limit
from replica_engine.pjrt.jaxlib import RUNTIME_ERRORS
from replica_engine.xla.stages import lowered

FULL = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 13.43GiB"


def fails(*_, **__):
    raise RUNTIME_ERRORS[0](FULL)


@pytest.fixture
def compiled():
    return replica_engine.TPUStrategy(num_cores=2)


def test_a_compiler_that_finds_no_room(compiled, monkeypatch):
    """The compiler of GPUs tries kernels out, on the GPU."""
    with compiled.scope():
        total = tf.Variable(1.0)

    def step():
        return total.assign_add(1.0)

    with monkeypatch.context() as patched:
        patched.setattr(lowered, "found_or_compiled", fails)
        with pytest.raises(ProgramError) as caught:
            compiled.run(step)
    assert str(caught.value).splitlines() == [
        "`step` cannot be compiled for 2 replicas (CPU:0, CPU:1):",
        FULL,
        "Nothing was launched, so all variables keep their values. If memory is the cause, use a smaller batch.",
    ]
    assert total.numpy() == 1.0
    compiled.run(step)
    assert total.numpy() == 2.0


def test_a_program_that_is_too_large_is_not_launched(compiled, monkeypatch):
    """Once it is launched, its variables have been given to it, and are lost if memory runs out."""
    with compiled.scope():
        total = tf.Variable(1.0)
    monkeypatch.setattr(lowered, "memory_limit", lambda _: 100)
    with pytest.raises(ProgramError, match="only 100 bytes of memory are available"):
        compiled.run(lambda: total.assign_add(tf.reduce_sum(tf.sort(tf.range(100.0) * total))))
    assert total.numpy() == 1.0


def test_a_value_without_room(compiled, monkeypatch):
    monkeypatch.setattr(device_group.jaxlib, "batched_device_put", fails)
    with pytest.raises(DeviceError, match=r"(?s)A value of float32\[7\] cannot be put on .*13.43GiB.*fsdp"):
        compiled.run(lambda x: x + 1.0, args=(tf.zeros([7]),))


@pytest.mark.parametrize(("stats", "limit"), [({"bytes_limit": 7 << 30}, 7 << 30), ({}, None), (None, None)])
def test_the_memory_of_an_accelerator_is_what_its_runtime_may_take(stats, limit):
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    devices = types.SimpleNamespace(platform="gpu", devices=[device, device])
    assert memory_limit(devices) == chip_memory(devices) == limit
