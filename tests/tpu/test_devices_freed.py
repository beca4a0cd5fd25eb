"""Devices that were replaced because a program on them did not end are freed when it has."""

import gc
import threading
import weakref

import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.pjrt.devices import device_group

SIZE = 5  # no other test has so many devices, whose strategies would keep them


def test_devices_are_freed_once_the_program_that_was_given_up_has_ended():
    goes_on = threading.Event()

    def use():
        strategy = TPUStrategy(num_cores=SIZE, timeout=0.5)
        sizes = strategy.experimental_distribute_values_from_function(
            lambda context: tf.ones([context.replica_id_in_sync_group + 1])
        )
        strategy.run(lambda x: x + 1.0, args=(sizes,))
        xla.replicate(xla.replica_id, num_replicas=SIZE)

        @xla.returns(tf.TensorSpec([], tf.float32))
        def save(x):
            goes_on.wait(60)
            return x

        def step(x):
            return xla.cross_replica_sum(xla.outside_compilation(save, x))

        with pytest.raises(TimeoutError):
            strategy.run(step, args=(tf.constant(1.0),))
        return weakref.ref(device_group_of(strategy))

    replaced = use()
    assert device_group("cpu", SIZE) is not replaced()
    running = replaced()
    goes_on.set()
    assert running.ends_within(60.0)
    del running
    device_group("cpu", SIZE)
    for _ in range(3):
        gc.collect()
    assert replaced() is None


def device_group_of(strategy):
    return strategy.extended.own_programs().devices
