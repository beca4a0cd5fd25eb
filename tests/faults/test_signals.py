"""Handlers of signals that raise, as a preempted job's: each launch and each update is made whole or not at all."""

import signal
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.devices import DEVICES
from helpers.versions import HAS_XLA

import replica_engine

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1]


class Preempted(Exception):
    """What the program's handler raises; no KeyboardInterrupt, but an exception like any other."""


@pytest.fixture(params=SIGNALS, ids=lambda each: each.name)
def number(request):
    """A signal with a handler that raises."""

    def handler(number, frame):
        raise Preempted

    before = signal.signal(request.param, handler)
    yield request.param
    assert signal.getsignal(request.param) is handler
    signal.signal(request.param, before)


def counting(strategy):
    """A variable, and a step that adds one to it on each replica."""
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
    return total, lambda: total.assign_add(1.0)


@pytest.mark.skipif(not HAS_XLA, reason="TPUStrategy needs jax")
def test_a_compiled_launch_is_whole(number, monkeypatch):
    """The signal comes as the launch returns: the old values are gone, and the new ones not yet stored."""
    from replica_engine.pjrt.executable import Executable

    strategy = replica_engine.TPUStrategy(num_cores=2)
    total, step = counting(strategy)
    strategy.run(step)
    original = Executable.launch

    def launch(*args, **kwargs):
        result = original(*args, **kwargs)
        signal.raise_signal(number)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Executable, "launch", launch)
        with pytest.raises(Preempted):
            strategy.run(step)
    assert [float(each) for each in strategy.experimental_local_results(total)] == [2.0, 2.0]
    strategy.run(step)
    assert float(total) == 3.0


def test_an_update_is_made_on_all_replicas(number):
    strategy = replica_engine.MirroredStrategy(DEVICES[:2])
    total, _ = counting(strategy)
    updated = []

    def update(component):
        if not updated:
            signal.raise_signal(number)
        updated.append(component.device)
        component.assign_add(1.0)

    with pytest.raises(Preempted), strategy.scope():
        strategy.extended.update(total, update)
    assert len(updated) == 2
    assert [float(each) for each in strategy.experimental_local_results(total)] == [1.0, 1.0]


def test_handlers_run_in_the_order_of_their_signals_when_the_update_is_over():
    strategy = replica_engine.MirroredStrategy(DEVICES[:2])
    total, _ = counting(strategy)
    came = []
    two = (signal.SIGUSR1, signal.SIGALRM)
    before = [signal.signal(each, lambda number, frame: came.append(number)) for each in two]

    def update(component):
        if component.device.endswith("0"):
            signal.raise_signal(two[0])
        assert not came
        component.assign_add(1.0)

    try:
        with strategy.scope():
            strategy.extended.update(total, update)
        assert came == [two[0]]
    finally:
        for each, handler in zip(two, before, strict=True):
            signal.signal(each, handler)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_XLA, reason="jax"))])
def test_fit_leaves_a_model_that_can_be_saved(number, compiled, tmp_path):
    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                signal.raise_signal(number)

    strategy = replica_engine.TPUStrategy(num_cores=2) if compiled else replica_engine.MirroredStrategy(DEVICES[:2])
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    replicated = replica_engine.keras.replicate_model(model, strategy=strategy)
    x, y = np.ones([8, 2], "float32"), np.ones([8, 1], "float32")
    try:
        with pytest.raises(Preempted):
            replicated.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[Interrupts()])
    finally:
        model.save(tmp_path / "model.keras")
    assert int(model.optimizer.iterations.numpy()) == 2
    for saved, weight in zip(
        keras.saving.load_model(tmp_path / "model.keras").get_weights(), model.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(saved, weight)
    replicated.fit(x, y, batch_size=2, verbose=0)


INTERRUPTED_ITERATORS = """
    import random, signal
    import tensorflow as tf
    import replica_engine

    class Preempted(Exception):
        pass

    def handler(number, frame):
        raise Preempted

    strategy = replica_engine.MirroredStrategy(["CPU:0"])
    element = {str(each): tf.zeros([4] * 6) for each in range(20)}  # many shapes take time
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(element))
    next(iter(dataset))
    signal.signal(signal.SIGALRM, handler)
    for _ in range(300):
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 4e-3))
            while True:
                iter(dataset)
        except Preempted:
            pass
    print("done")
"""


def test_a_handler_that_raises_cannot_break_memory_while_an_iterator_is_made(programs):
    # Without protection, TensorFlow writes beyond an array: "free(): invalid pointer", a segmentation fault.
    assert programs.run(textwrap.dedent(INTERRUPTED_ITERATORS)).stdout == "done\n"
