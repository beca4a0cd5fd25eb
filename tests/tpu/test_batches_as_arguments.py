"""The launches of device loops: how many steps each has, and the same numbers, bit for bit, however many they are."""

import itertools
import threading
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import xla
from replica_engine.errors import ReplicaTimeoutError
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.xla.calls import chunk_launches, device_loop, prefetch
from replica_engine.xla.stages.launch import Launch

SOON = 200  # seconds until a thread that should have gone on by then is stuck
SUM = tf.VariableAggregation.SUM

ROWS = np.random.default_rng(0).normal(size=[40, 6]).astype("float32")


def passes_on(context, x):
    context.set_last_step_output("x", x, "MEAN")


def trained(prefetch=None, iterations=10):
    """Weights, outputs and random numbers of a training loop."""
    strategy = replica_engine.TPUStrategy(num_cores=2)
    with strategy.scope():
        weights = tf.Variable(tf.ones([6, 3]) * 0.1)
        seen = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.SUM)
        generator = tf.random.Generator.from_seed(1)

    def step(context, x):
        noise = tf.random.normal([6, 3], seed=3) + generator.normal([6, 3])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.dropout(tf.tanh(x @ (weights + 0.01 * noise)), 0.3, seed=5) ** 2)
        replica = tf.distribute.get_replica_context()
        weights.assign_sub(0.1 * replica.all_reduce("MEAN", tape.gradient(loss, weights)))
        seen.assign_add(tf.cast(tf.shape(x)[0], tf.int64))
        context.set_last_step_output("loss", loss, "MEAN")

    tf.random.set_seed(7)
    data = tf.data.Dataset.from_tensor_slices(ROWS).batch(4, drop_remainder=True)
    batches = iter(strategy.experimental_distribute_dataset(data))
    context = strategy.run_steps(step, batches, iterations, prefetch=prefetch)
    return weights.numpy().tobytes(), context.last_step_outputs["loss"].numpy().tobytes(), int(seen.numpy())


def test_a_chunk_is_a_launch_and_the_numbers_are_the_same_for_each_size():
    """All steps in one chunk, each alone, and chunks of three."""
    expected = trained()
    assert expected[2] == 40
    for ahead, launches in ((None, 1), (1, 10), (5, 4)):
        before = xla.counts()
        assert trained(ahead) == expected, ahead
        made = xla.counts() - before
        assert (made.launches, made.compiles) == (launches, 1)


@pytest.fixture
def launched(monkeypatch):
    """How many steps each launch had."""
    steps, original = [], Launch.__call__

    def launch(each, slots, captured=None):
        steps.append(int(slots[0][0]))
        return original(each, slots, captured)

    monkeypatch.setattr(Launch, "__call__", launch)
    return steps


def test_a_launch_has_as_many_steps_as_its_time_allows(launched, monkeypatch):
    """The clock is a number that the test sets: a step takes a tenth of a second, then a hundredth, then longer."""
    strategy, clock, took = replica_engine.TPUStrategy(num_cores=2), [100.0], [0.1]
    original = chunk_launches.Chunks._end

    def end(each, launch, steps):
        clock[0] += steps * took[0]
        original(each, launch, steps)

    monkeypatch.setattr(chunk_launches, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(chunk_launches.Chunks, "_end", end)
    strategy.run_steps(passes_on, map(np.float32, range(30)), 30)
    assert launched[0] == 16  # nothing is known yet
    assert launched[1:] in ([9, 5], [10, 4])
    del launched[:]
    took[0] = 0.01
    strategy.run_steps(passes_on, map(np.float32, range(400)), 400)
    assert launched == sorted(launched[:-1]) + launched[-1:]
    assert max(launched) in (99, 100)
    del launched[:]
    took[0] = 2.0
    strategy.run_steps(passes_on, map(np.float32, range(104)), 104)
    assert launched[0] in (99, 100)
    assert set(launched[1:]) == {1}
    del launched[:]
    took[0] = 0.1
    strategy.run_steps(passes_on, iter(np.zeros([12, 1 << 15], np.float32)), 12)
    assert launched[0] == 2  # of 128 KiB each: steps with large batches may be slow
    assert launched[1:] in ([9, 1], [10])


def fitted():
    keras.utils.set_random_seed(1)
    with replica_engine.TPUStrategy(num_cores=2).scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.3)])
        model.compile("adam", "mse", metrics=["mae"], steps_per_execution=5)
    history = model.fit(ROWS, ROWS[:, :4], batch_size=4, epochs=2, verbose=0, shuffle=False).history
    return history, [weight.numpy().tobytes() for weight in model.weights]


def test_steps_of_keras(monkeypatch):
    expected = fitted()
    monkeypatch.setattr(device_loop, "_MOST_STEPS", 2)
    assert fitted() == expected


def test_an_iterator_that_ends_early_keeps_the_steps_before():
    with pytest.raises(tf.errors.OutOfRangeError, match="after 10 of 12 steps") as caught:
        trained(6, iterations=12)
    assert caught.value.context.steps == 10


def test_a_step_that_calls_the_host_is_a_launch(two):
    total, strategy, seen = two.variable(0.0, SUM), two.strategy, []

    def step(context, x):
        xla.outside_compilation(lambda x: seen.append(float(x)), x)
        total.assign_add(x)

    for _ in range(2):
        strategy.run_steps(step, [np.float32(1), np.float32(2)], 2)
    before = xla.counts()
    strategy.run_steps(step, [np.float32(1), np.float32(2)], 2)
    made = xla.counts() - before
    assert (made.traces, made.launches) == (0, 2)
    assert total.numpy() == 18.0
    assert sorted(seen) == [1.0] * 6 + [2.0] * 6


def test_batches_of_a_dtype_that_tensorflow_cannot_fill(two):
    total = two.variable(0.0, SUM)
    batches = [tf.cast(tf.constant([1.0, 2.0]), tf.dtypes.experimental.float8_e5m2)] * 3
    two.strategy.run_steps(lambda context, x: total.assign_add(tf.reduce_sum(tf.cast(x, tf.float32))), iter(batches), 3)
    assert float(total) == 18.0


def test_a_loop_that_waits_for_a_batch_is_watched(caplog):
    strategy = replica_engine.TPUStrategy(num_cores=2, warn_after=0.01)
    warned = threading.Event()
    caplog.handler.addFilter(lambda record: warned.set() if "waiting for its next batch" in record.message else True)

    def batches():
        yield np.float32(1)
        assert warned.wait(300), "no warning"
        yield np.float32(2)

    context = strategy.run_steps(passes_on, batches(), 2, prefetch=1)
    assert float(context.last_step_outputs["x"]) == 2.0


def test_with_a_limit_each_step_is_a_launch_of_its_own():
    """No sign of life comes out of a launch, so a healthy loop of many steps in one would be ended."""
    strategy = replica_engine.TPUStrategy(num_cores=2, timeout=60)
    before = xla.counts()
    strategy.run_steps(passes_on, map(np.float32, range(10)), 10)
    made = xla.counts() - before
    assert (made.launches, made.compiles) == (10, 1)


def test_an_iterator_that_gives_no_batch_within_the_limit_is_an_error(monkeypatch, replicas):
    monkeypatch.setattr(prefetch, "_JOIN", 0.0)
    some = replicas(2, timeout=5)
    strategy, total = some.strategy, some.variable(0.0, tf.VariableAggregation.ONLY_FIRST_REPLICA)
    over = threading.Event()

    def batches():
        yield np.float32(1)
        yield np.float32(2)
        over.wait(SOON)
        yield np.float32(4)

    try:
        with pytest.raises(ReplicaTimeoutError, match="gave no next batch in 5 s") as caught:
            strategy.run_steps(lambda context, x: total.assign_add(x), batches(), 3)
    finally:
        over.set()
    assert total.numpy() == 3.0
    rows = caught.value.rows
    assert [(row.state, row.merge_calls, row.points) for row in rows] == [("waiting for the next batch", 2, "step")] * 2
    assert "updates of the steps that ran stay" in str(caught.value)
    strategy.run_steps(lambda context, x: total.assign_add(x), [np.float32(8)], 1)
    assert total.numpy() == 11.0


@pytest.mark.parametrize("queue", [False, True], ids=["launch waits", "launch is queued"])
@pytest.mark.parametrize("ahead", [1, 2, 6, 8])
def test_no_more_batches_are_ahead_of_a_step_than_asked_for(two, monkeypatch, queue, ahead):
    monkeypatch.setattr(DeviceGroup, "has_queue", queue)
    fetched, more, seen = threading.Semaphore(0), [], []

    def batches():
        for number in itertools.count():
            fetched.release()
            yield np.float32(number)

    def launch(each, slots, captured=None):
        """The program runs as late as it may: when its end is awaited."""
        seen.append(int(slots[0][0]))

        def columns(as_arrays=False):
            if not more:  # now the first step runs
                for _ in range(1 + ahead):
                    assert fetched.acquire(timeout=SOON)
                more.append(fetched.acquire(timeout=0.2))
            return at_once(each, slots, captured).columns(as_arrays)

        return types.SimpleNamespace(columns=columns)

    at_once = Launch.__call__
    monkeypatch.setattr(Launch, "__call__", launch)
    context = two.strategy.run_steps(passes_on, batches(), 100, prefetch=ahead)
    assert more == [False]
    assert float(context.last_step_outputs["x"]) == 99.0
    assert max(seen) == max(1, (ahead + 1) // (3 if queue else 2))
    assert sum(seen) == 100
