"""A signal handler that raises, or an exception of another thread, at every instant of the code that changes state.

State is whole after each: all variables readable, all from before the step or all from after it, on all replicas alike.
"""

from __future__ import annotations

import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.keras import replicate_model
from soak import instants


class Stopped(Exception):
    """What the handler raises."""


def _stop(number, frame):
    raise Stopped


@pytest.fixture(params=["SIGTERM", "SIGALRM", "SIGUSR1", "another thread"])
def request_stop(request):
    """Asks for an interrupt at the next instant at which Python looks for one."""
    if request.param == "another thread":
        yield instants.of_exception(Stopped)
        return
    number = getattr(signal, request.param)
    before = signal.signal(number, _stop)
    yield instants.of_signal(number)
    signal.signal(number, before)


def in_files(*names):
    """Whether code is of one of these files."""
    return lambda code: code.co_filename.endswith(names)


def can_be_taken(lock):
    """Whether another thread can take a lock."""
    taken = []

    def take():
        taken.append(lock.acquire(False))
        if taken[0]:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return taken[0]


LAUNCH = ("stages/launch.py", "stages/compiled.py", "pjrt/group.py", "pjrt/executable.py", "state/device_value.py")


@pytest.mark.parametrize("cores", [1, 2])
def test_a_launch_is_made_whole_or_not_at_all(request_stop, cores):
    strategy = TPUStrategy(num_cores=cores)
    with strategy.scope():
        one, two = tf.Variable(0.0), tf.Variable(tf.zeros(3))
    plain = tf.Variable(0.0)  # not on the devices: it is sent and fetched

    def step():
        one.assign_add(1.0)
        two.assign_add([2.0, 2.0, 2.0])
        plain.assign_add(3.0)

    def run():
        strategy.run(step)

    run()
    run()
    made, count = 2, 0
    for number, error in instants.interrupted(run, request_stop, in_files(*LAUNCH)):
        assert isinstance(error, Stopped), number
        values = float(one.numpy()), two.numpy().tolist(), float(plain.numpy())
        assert values in [(done, [2 * done] * 3, 3 * done) for done in (made, made + 1)], number
        assert can_be_taken(strategy.extended.device_group.in_flight), number
        run()
        made, count = int(values[0]) + 1, count + 1
    assert count > 100


def test_a_write_of_the_host_is_never_lost(request_stop):
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable(0.0)

    def write():
        variable.assign_add(10.0)

    def step():
        variable.assign_add(1.0)

    strategy.run(step)
    value = float(variable.numpy())
    for number, error in instants.interrupted(write, request_stop, in_files("device_value.py", "host_variable.py")):
        assert isinstance(error, Stopped), number
        read = float(variable.numpy())
        assert read in (value, value + 10.0), number
        strategy.run(step)
        value = float(variable.numpy())
        assert value == read + 1.0, number


UPDATE = ("strategies/updates.py", "strategies/mirrored.py", "mirrored_strategy.py", "resource_variable_ops.py")


def test_an_update_reaches_all_components_or_none(request_stop):
    strategy = MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])
    with strategy.scope():
        weight, momentum = tf.Variable(0.0), tf.Variable(0.0)

    def update(component, gradient):
        momentum.assign_add(gradient)  # as an optimizer writes its own variables
        component.assign_add(gradient)

    def merge(strategy, gradient):
        strategy.extended.update(weight, update, args=(gradient,))

    def run():
        strategy.run(lambda: tf.distribute.get_replica_context().merge_call(merge, args=(tf.ones([]),)))

    run()
    made, count = 1, 0
    for number, error in instants.interrupted(run, request_stop, in_files(*UPDATE), step=5):
        assert isinstance(error, Stopped), number
        values = [float(each.numpy()) for variable in (weight, momentum) for each in variable.values]
        assert values in ([made] * 6, [made + 1] * 6), number
        made, count = int(values[0]), count + 1
    assert count > 30


FIT = ("replica_engine/keras/replicas.py", "replica_engine/keras/model.py", "process/interrupts.py")


@pytest.mark.parametrize("request_stop", ["SIGTERM", "SIGALRM", "SIGUSR1"], indirect=True)
@pytest.mark.parametrize("make", [lambda: MirroredStrategy(["CPU:0", "CPU:1"]), lambda: TPUStrategy(num_cores=2)])
def test_the_original_has_its_variables_again(request_stop, make, tmp_path):
    """As `finally: model.save()` needs them."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
    model.compile("sgd", "mse", metrics=["mae"])
    twin = replicate_model(model, strategy=make())
    x, y = np.ones((4, 2), np.float32), np.zeros((4, 1), np.float32)

    def run():
        twin.train_on_batch(x, y)

    run()
    run()
    count = 0
    for number, error in instants.interrupted(run, request_stop, in_files(*FIT), step=4):
        assert isinstance(error, Stopped), number
        kept = [type(variable.value).__name__ for variable in model.variables]
        assert set(kept) == {"ResourceVariable"}, number
        assert all(np.isfinite(variable.numpy()).all() for variable in model.variables), number
        assert "apply" not in vars(model.optimizer), number
        count += 1
    model.save(tmp_path / "model.keras")
    assert count > 10
