"""Variables stay on the devices: steps that nobody looks in between move none of them."""

import functools

import pytest
import tensorflow as tf

from replica_engine.pjrt.device_group import DeviceGroup

SUM = tf.VariableAggregation.SUM


@pytest.fixture
def traffic(monkeypatch):
    """Bytes that go to and come from devices, by direction; scalars included."""
    moved = {"put": 0, "fetched": 0}

    def counted(name, direction, size_of):
        original = getattr(DeviceGroup, name)

        @functools.wraps(original)
        def method(*args):
            moved[direction] += size_of(args)
            return original(*args)

        return method

    monkeypatch.setattr(DeviceGroup, "put", counted("put", "put", lambda args: sum(v.nbytes for v in args[1])))
    for name in ("fetch", "fetch_all"):
        monkeypatch.setattr(DeviceGroup, name, counted(name, "fetched", lambda args: args[1].nbytes))
    return moved


def test_steps_between_looks_move_no_variable(two, traffic):
    large = two.variable(tf.zeros([1000]))
    own = two.variable(tf.zeros([1000]), SUM, on_read=True)
    optimizer_like = {}

    def step(x):
        if not optimizer_like:
            optimizer_like["slot"] = tf.Variable(tf.zeros([1000]), name="slot")
        large.assign_add(x + optimizer_like["slot"])
        own.assign_add(tf.ones([1000]))
        optimizer_like["slot"].assign_add(tf.ones([1000]))
        return x

    scalar_bytes = lambda steps: {"put": 4 * steps, "fetched": 8 * steps}  # noqa: E731
    two.strategy.run(step, args=(tf.constant(1.0),))  # the values go to the devices
    traffic.update(put=0, fetched=0)
    for _ in range(10):
        two.strategy.run(step, args=(tf.constant(1.0),))
    assert traffic["fetched"] <= scalar_bytes(10)["fetched"]
    assert traffic["put"] <= scalar_bytes(10)["put"]

    traffic.update(put=0, fetched=0)
    for _ in range(5):
        large.numpy()
        float(tf.reduce_sum(large))
    assert traffic["fetched"] <= 2 * large.numpy().nbytes  # once, however often somebody looks
    for _ in range(3):
        two.strategy.run(step, args=(tf.constant(1.0),))
    assert traffic["put"] <= scalar_bytes(3)["put"]  # a look does not send it back
    assert two.components(own)[0][0] == 14.0


def test_a_host_function_of_steps_moves_no_variable(two, traffic):
    large = two.variable(tf.zeros([1000]))

    def step():
        large.assign_add(tf.ones([1000]))

    @tf.function
    def steps(n):
        for _ in tf.range(n):
            two.strategy.run(step)

    steps(1)
    traffic.update(put=0, fetched=0)
    steps(10)
    assert traffic == {"put": 0, "fetched": 0}
    assert large.numpy().tolist() == [11.0] * 1000


def test_a_function_that_calls_a_function_of_a_step_moves_no_variable(two, traffic):
    """As Keras' fit does. TensorFlow notes in the outer function which variables the inner one has read."""
    with two.strategy.scope():
        large = tf.Variable(tf.ones([1000]))

    @tf.function
    def one():
        return two.strategy.run(lambda: (large.assign_add(large), tf.reduce_sum(large))[1])

    @tf.function
    def several(n):
        for _ in tf.range(n):
            one()

    several(2)
    traffic.update(put=0, fetched=0)
    several(tf.constant(2))
    assert traffic["put"] + traffic["fetched"] < large.numpy().nbytes
    assert float(large[0]) == 16.0
