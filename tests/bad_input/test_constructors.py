"""Strategies and devices made of anything: made as asked, or refused."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.bad_inputs import PYTHON
from helpers.bad_values import examples, garbage, values_from
from helpers.outcomes import attempt
from helpers.versions import HAS_XLA, WHY_NO_XLA
from hypothesis import given
from hypothesis import strategies as st

from replica_engine import MirroredStrategy, logical_devices
from replica_engine.errors import DeviceError, ReplicaEngineError

NAMES = st.sampled_from(["CPU:0", "CPU:1", "/cpu:0", "/device:CPU:1", "CPU:99", "GPU:0", "CPU", "CPU:*", "", "x", ":"])
NUMBERS = st.sampled_from([None, 0, -1, 1, 2, True, 1.5, 2.0, "2", 10**9, 2**80, float("nan"), [2]])


@examples(40)
@given(devices=garbage() | st.lists(NAMES, max_size=3) | st.lists(NAMES | values_from(PYTHON), max_size=2) | NAMES)
def test_mirrored_strategies_of_devices(devices):
    strategy, error = attempt(MirroredStrategy, devices)
    if error is None:
        assert tf.nest.flatten(strategy.experimental_local_results(strategy.run(lambda: 1))) == [1]


@examples(20)
@given(ops=garbage(), timeout=garbage() | NUMBERS, concurrent=garbage())
def test_mirrored_strategies_of_options(ops, timeout, concurrent):
    devices = logical_devices(2)
    attempt(MirroredStrategy, devices, ops)
    attempt(MirroredStrategy, devices, timeout=timeout)
    attempt(MirroredStrategy, devices, warn_after=timeout)
    attempt(MirroredStrategy, devices, concurrent=concurrent)


@examples(30)
@given(n=garbage() | NUMBERS, kind=garbage() | st.sampled_from(["CPU", "GPU", "cpu", "TPU", ""]))
def test_logical_devices(n, kind):
    attempt(logical_devices, n)
    attempt(logical_devices, 1, kind)
    assert logical_devices(2) == ["CPU:0", "CPU:1"]


@pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)
class TestCompiled:
    @examples(25)
    @given(number=(garbage() | NUMBERS).filter(lambda number: number is not None))
    def test_tpu_strategies_of_numbers(self, number):
        from replica_engine import TPUStrategy

        strategy, error = attempt(TPUStrategy, num_cores=number)
        if error is None:
            assert strategy.num_replicas_in_sync == int(number) <= 1024
        strategy, error = attempt(TPUStrategy, steps_per_run=number, num_cores=2)
        if error is None:
            assert strategy.steps_per_run == number

    @examples(25)
    @given(value=garbage(), platform=garbage() | st.sampled_from(["cpu", "CPU", "gpu", "tpu", "npu", ""]))
    def test_tpu_strategies_of_options(self, value, platform):
        from replica_engine import TPUStrategy, xla

        if value is not None:
            attempt(TPUStrategy, value, num_cores=2)
        attempt(TPUStrategy, num_cores=2, same_random_numbers=value)
        attempt(TPUStrategy, num_cores=2, timeout=value)
        attempt(TPUStrategy, num_cores=2, warn_after=value)
        attempt(xla.PjrtClusterResolver, platform)


@pytest.mark.parametrize(
    "devices", [3, ..., "CPU:nought", "", [" "], b"CPU:0", [None], [["CPU:0"]], tf.constant(["CPU:0"])], ids=repr
)
def test_what_is_no_list_of_devices(devices):
    with pytest.raises(DeviceError, match="Not a device"):
        MirroredStrategy(devices)


@pytest.mark.parametrize("devices", [np.array(["CPU:0"]), np.array(["CPU:0", "CPU:1"]), ("CPU:1",)])
def test_any_list_of_devices(devices):
    logical_devices(2)
    assert MirroredStrategy(devices).num_replicas_in_sync == len(devices)


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2", None, tf.constant("a")], ids=repr)
def test_a_number_of_logical_devices_is_a_positive_int(n):
    with pytest.raises(ReplicaEngineError, match="positive int"):
        logical_devices(n)


@pytest.mark.parametrize("kind", ["", "cpu!", 3, None, ["CPU"]])
def test_a_kind_of_logical_devices_is_a_name(kind):
    with pytest.raises(DeviceError):
        logical_devices(1, kind)


@pytest.mark.parametrize("ops", [3, "nccl", ..., tf.distribute.ReductionToOneDevice], ids=repr)
def test_cross_device_operations_are_some(ops):
    with pytest.raises(DeviceError, match="CrossDeviceOps"):
        MirroredStrategy(logical_devices(2), ops)
