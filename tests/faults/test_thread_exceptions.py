"""Exceptions that another thread raises in this one (PyThreadState_SetAsyncExc): a launch or an update is whole.

Python raises them where a function begins and where the call of a function in C ends. The tests below raise one at each
such instant of an operation, one after the other, with the help of Python's profiler, which is called there.
"""

import copy
import ctypes
import itertools
import pickle
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.versions import HAS_XLA
from tensorflow.python.distribute.values import MirroredVariable

import replica_engine
from replica_engine.process import interrupts
from replica_engine.watch import watchdog


class Killed(BaseException):
    """What the other thread raises."""


def raised_at(number, files, block):
    """Runs `block`, with an exception at the `number`-th such instant in the files. Returns whether there is one.

    Python ignores the exception in a generator that is thrown away.
    """
    seen = 0

    def profile(frame, event, _):
        nonlocal seen
        if event in ("call", "c_return") and frame.f_code.co_filename.endswith(files):
            seen += 1
            if seen == number:
                sys.setprofile(None)
                raise Killed

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        block()
    except Killed:
        assert seen == number
    finally:
        sys.setprofile(before)
    return seen >= number


def check_nothing_is_left(strategy):
    """Another thread can run, nothing is watched, and signals have their handlers."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(strategy.run, lambda: tf.constant(1.0)).result(60)
    assert not watchdog._watchdog._watches
    assert not interrupts._held
    assert not tf.distribute.has_strategy()
    with tf.init_scope():
        assert tf.constant(1.0).device.endswith("CPU:0")


def values(strategy, variables):
    return [[float(each) for each in strategy.experimental_local_results(variable)] for variable in variables]


LAUNCH = (
    "pjrt/executable.py",
    "pjrt/device_group.py",
    "xla/stages/launch.py",
    "xla/stages/compiled.py",
    "xla/state/device_value.py",
    "watch/watchdog.py",
    "strategies/compiled_backend.py",
)


@pytest.mark.skipif(not HAS_XLA, reason="TPUStrategy needs jax")
@pytest.mark.parametrize("outside", [False, True], ids=["of the strategy", "one from outside"])
def test_a_launch_is_whole_at_each_instant(outside):
    strategy = replica_engine.TPUStrategy(num_cores=2)
    with strategy.scope():
        variables = [tf.Variable(0.0), tf.Variable(0.0)]
    if outside:
        variables.append(tf.Variable(0.0))

    def step():
        for variable in variables:
            variable.assign_add(1.0)

    strategy.run(step)
    made, number = 1.0, 1
    while raised_at(number, LAUNCH, lambda: strategy.run(step)):
        found = {value for row in values(strategy, variables) for value in row}
        assert found in ({made}, {made + 1.0}), f"instant {number}: {found}, {made} before"
        (made,) = found
        strategy.run(step)
        made += 1.0
        assert values(strategy, variables[:2]) == [[made] * 2] * 2
        check_nothing_is_left(strategy)
        number += 1
    assert number > 50


@pytest.mark.skipif(not HAS_XLA, reason="TPUStrategy needs jax")
def test_a_loop_on_one_device_is_whole_at_each_instant():
    """XLA runs the program on the thread that launches it, and a host call of the program with it."""
    strategy = replica_engine.TPUStrategy(num_cores=1)
    with strategy.scope():
        variable = tf.Variable(0.0)

    def step(context):
        variable.assign_add(1.0)
        context.set_last_step_output("x", tf.constant(0.0))

    def loop():
        strategy.run_steps(step, itertools.repeat(()), 3)

    files = (
        *LAUNCH,
        "xla/calls/device_loop.py",
        "xla/calls/chunk_launches.py",
        "xla/host_calls/session.py",
        "xla/calls/prefetch.py",
    )
    loop()
    made, number = 3.0, 1
    while raised_at(number, files, loop):
        found = float(variable)
        assert found in (made, made + 3.0), f"instant {number}: {found}, {made} before"
        loop()
        made = found + 3.0
        number += 1
    check_nothing_is_left(strategy)
    assert number > 25


UPDATE = (
    "strategies/on_backend.py",
    "strategies/mirrored.py",
    "process/interrupts.py",
    "upstream/eager.py",
    __file__,
)


def test_an_update_is_whole_at_each_instant():
    """As of an optimizer: the update changes a slot too, and the gradient of each replica has the same value."""
    strategy = replica_engine.MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        weight, slot = tf.Variable(0.0), tf.Variable(0.0)
    gradient = strategy.run(lambda: tf.constant(1.0))

    def update(component, gradient):
        slot.assign_add(gradient)
        component.assign_add(gradient)

    def block():
        with strategy.scope():
            strategy.extended.update(weight, update, args=(gradient,))

    made, number = 0.0, 1
    while raised_at(number, UPDATE, block):
        found = {value for row in values(strategy, [weight, slot]) for value in row}
        assert found in ({made}, {made + 1.0}), f"instant {number}: {values(strategy, [weight, slot])}, {made} before"
        (made,) = found
        check_nothing_is_left(strategy)
        number += 1
    assert number > 25


def test_a_variable_whose_updates_are_whole_is_of_the_class_of_tensorflow():
    with replica_engine.MirroredStrategy(DEVICES[:2]).scope():
        variable = tf.Variable(1.0)
        copied = copy.deepcopy(variable)
    for each in (variable, copied):
        assert type(each) is MirroredVariable
        assert "_update" in vars(each)
    assert pickle.loads(pickle.dumps(type(variable))) is MirroredVariable
    copied.assign(2.0)
    assert [part.numpy() for each in (variable, copied) for part in each.values] == [1.0, 1.0, 2.0, 2.0]


def test_an_error_of_the_update_is_no_half_update():
    strategy = replica_engine.MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        weight, other = tf.Variable(0.0), tf.Variable(0.0)
    strategy.experimental_local_results(other)[0].assign(5.0)  # by hand, and no part of the update

    def update(component, fails_at):
        component.assign_add(1.0)
        if component.device.endswith(fails_at):
            raise ValueError("not this one")

    for fails_at, expected in (("CPU:0", 0.0), ("CPU:1", 1.0)):
        with pytest.raises(ValueError, match="not this one"), strategy.scope():
            strategy.extended.update(weight, update, args=(fails_at,))
        assert values(strategy, [weight]) == [[expected] * 2]
    assert values(strategy, [other]) == [[5.0, 0.0]]


def test_equal_texts_on_the_replicas_are_equal_arguments_of_an_update():
    strategy = replica_engine.MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        weight = tf.Variable(0.0)
    texts = strategy.experimental_distribute_values_from_function(lambda _: tf.constant(["CPU", "CPU:1"]))

    def update(component, texts):
        component.assign_add(1.0)
        if component.device.endswith(texts[1].numpy().decode()):
            raise ValueError("not this one")

    with pytest.raises(ValueError, match="not this one"), strategy.scope():
        strategy.extended.update(weight, update, args=(texts,))
    assert values(strategy, [weight]) == [[1.0, 1.0]]


def test_an_update_that_leaves_a_device_entered_is_left_without_it():
    """As where an exception comes between entering a device and the block that leaves it."""
    strategy = replica_engine.MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        weight = tf.Variable(0.0)

    def update(component):
        tf.device("CPU:1").__enter__()
        raise Killed

    with strategy.scope():
        with pytest.raises((Killed, RuntimeError)):  # TensorFlow raises where devices are left in another order
            strategy.extended.update(weight, update)
        assert tf.constant(1.0).device.endswith("CPU:0")
    check_nothing_is_left(strategy)


def test_components_become_equal_when_no_other_thread_updates_them():
    """Thread A adds to component 0 and is broken off while thread B has added to component 0 only."""
    strategy = replica_engine.MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        weight = tf.Variable(0.0)
    half, broken = threading.Event(), threading.Event()

    def add_ten(component):
        component.assign_add(10.0)
        half.set()
        assert broken.wait(60)

    def add_one(component):
        if component.device.endswith("1"):
            raise Killed
        component.assign_add(1.0)

    def update(fn):
        with strategy.scope():
            strategy.extended.update(weight, fn)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(update, add_ten)
        assert half.wait(60)
        with pytest.raises(Killed):
            update(add_one)
        broken.set()
        other.result(60)
    assert values(strategy, [weight]) == [[11.0, 11.0]]


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_XLA, reason="jax"))])
def test_exceptions_of_a_thread_at_random_instants(compiled):
    """Between two of them the other thread counts to a number that was drawn."""
    strategy = replica_engine.TPUStrategy(num_cores=2) if compiled else replica_engine.MirroredStrategy(DEVICES[:2])
    with strategy.scope():
        weight = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
    step = lambda: weight.assign_add(1.0)  # noqa: E731
    strategy.run(step)
    made, draw, ident = 1.0, random.Random(0), threading.get_ident()

    def kill(count):
        for _ in range(count):
            pass
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(Killed))

    for number in range(30):
        thread = threading.Thread(target=kill, args=(draw.randrange(1_000_000),))
        done = []
        try:
            thread.start()
            while True:
                strategy.run(step)
                done.append(None)
        except Killed:
            thread.join()
        found = {value for row in values(strategy, [weight]) for value in row}
        assert found in ({made + len(done)}, {made + len(done) + 1.0}), f"interrupt {number}"
        (made,) = found
    check_nothing_is_left(strategy)
