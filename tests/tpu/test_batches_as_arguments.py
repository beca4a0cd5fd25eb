"""Device loops whose batches are arguments of the launches, as on TPUs and GPUs: the same numbers, bit for bit."""

import itertools
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import xla
from replica_engine.errors import ReplicaTimeoutError
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.xla.loop import chunks, device_loop, prefetch
from replica_engine.xla.stages.compiled import Compiled

SOON = 200  # seconds until a thread that should have gone on by then is stuck

ROWS = np.random.default_rng(0).normal(size=[40, 6]).astype("float32")


@pytest.fixture
def always(monkeypatch):
    def set_(value):
        monkeypatch.setattr(chunks, "always", value)

    return set_


@pytest.fixture
def no_host_calls(monkeypatch):
    """`no_host_calls()`: from now on no program may call the host for its batches."""

    def refuse(*_):
        raise AssertionError("the program calls the host for its batches")

    return lambda: monkeypatch.setattr(device_loop._Feed, "emit", refuse)


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


def test_a_chunk_is_a_launch_and_the_numbers_are_those_of_a_loop_that_calls_the_host(always, no_host_calls):
    """All steps in one chunk, each alone, and chunks of three."""
    always(False)
    expected = trained()
    assert expected[2] == 40
    always(True)
    no_host_calls()
    for ahead, launches in ((None, 1), (1, 10), (6, 4)):
        before = xla.counts()
        assert trained(ahead) == expected, ahead
        made = xla.counts() - before
        assert (made.launches, made.compiles) == (launches, 1)


def fitted():
    keras.utils.set_random_seed(1)
    with replica_engine.TPUStrategy(num_cores=2).scope():
        model = keras.Sequential([keras.Input([6]), keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.3)])
        model.compile("adam", "mse", metrics=["mae"], steps_per_execution=5)
    history = model.fit(ROWS, ROWS[:, :4], batch_size=4, epochs=2, verbose=0, shuffle=False).history
    return history, [weight.numpy().tobytes() for weight in model.weights]


def test_steps_of_keras(always, no_host_calls):
    always(False)
    expected = fitted()
    always(True)
    no_host_calls()
    assert fitted() == expected


def test_an_iterator_that_ends_early_keeps_the_steps_before(always):
    always(True)
    with pytest.raises(tf.errors.OutOfRangeError, match="after 10 of 12 steps") as caught:
        trained(6, iterations=12)
    assert caught.value.context.steps == 10


def test_a_step_that_calls_the_host_fetches_its_batches_by_a_call_too(always):
    always(True)
    strategy = replica_engine.TPUStrategy(num_cores=2)
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    seen = []

    def step(context, x):
        xla.outside_compilation(lambda x: seen.append(float(x)), x)
        total.assign_add(x)

    for _ in range(2):
        strategy.run_steps(step, [np.float32(1), np.float32(2)], 2)
    before = xla.counts()
    strategy.run_steps(step, [np.float32(1), np.float32(2)], 2)
    assert (xla.counts() - before).traces == 0
    assert total.numpy() == 18.0
    assert sorted(seen) == [1.0] * 6 + [2.0] * 6


def test_on_several_cpus_the_host_is_called_unless_it_is_planned_for_other_chips(monkeypatch):
    devices = xla.PjrtClusterResolver("cpu").devices
    assert devices.size > 1
    assert not chunks.are_arguments(devices, timed=False)
    monkeypatch.setattr(devices, "platform", "tpu")
    assert chunks.are_arguments(devices, timed=False)


def test_batches_of_a_dtype_that_tensorflow_cannot_fill(always):
    always(True)
    strategy = replica_engine.TPUStrategy(num_cores=2)
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    batches = [tf.cast(tf.constant([1.0, 2.0]), tf.dtypes.experimental.float8_e5m2)] * 3
    strategy.run_steps(lambda context, x: total.assign_add(tf.reduce_sum(tf.cast(x, tf.float32))), iter(batches), 3)
    assert float(total) == 18.0


def test_a_loop_that_waits_for_a_batch_is_watched(always, caplog):
    always(True)
    strategy = replica_engine.TPUStrategy(num_cores=2, warn_after=0.01)
    warned = threading.Event()
    caplog.handler.addFilter(lambda record: warned.set() if "waiting for its next batch" in record.message else True)

    def batches():
        yield np.float32(1)
        assert warned.wait(300), "no warning"
        yield np.float32(2)

    def step(context, x):
        context.set_last_step_output("x", x, "MEAN")

    context = strategy.run_steps(step, batches(), 2, prefetch=1)
    assert float(context.last_step_outputs["x"]) == 2.0


def passes_on(context, x):
    context.set_last_step_output("x", x, "MEAN")


def test_with_a_limit_each_step_is_a_launch_of_its_own(always):
    """No sign of life comes out of a launch, so a healthy loop of many steps in one would be ended."""
    always(True)
    strategy = replica_engine.TPUStrategy(num_cores=2, timeout=60)
    before = xla.counts()
    strategy.run_steps(passes_on, map(np.float32, range(10)), 10)
    made = xla.counts() - before
    assert (made.launches, made.compiles) == (10, 1)


def test_an_iterator_that_gives_no_batch_within_the_limit_is_an_error(always, monkeypatch):
    always(True)
    monkeypatch.setattr(prefetch, "_JOIN", 0.0)
    strategy = replica_engine.TPUStrategy(num_cores=2, timeout=5)
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
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
def test_no_more_batches_are_ahead_of_a_step_than_asked_for(always, monkeypatch, queue, ahead):
    always(True)
    monkeypatch.setattr(DeviceGroup, "has_queue", queue)
    fetched, more, seen = threading.Semaphore(0), [], []

    def batches():
        for number in itertools.count():
            fetched.release()
            yield np.float32(number)

    def launch(compiled, slots, captured=None, feed=None, as_arrays=False):
        """The program runs as late as it may: when its end is awaited."""
        seen.append(int(slots[0][0]))

        def end():
            if not more:  # now the first step runs
                for _ in range(1 + ahead):
                    assert fetched.acquire(timeout=SOON)
                more.append(fetched.acquire(timeout=0.2))
            return at_once(compiled, slots, captured, feed, as_arrays)()

        return end

    at_once = Compiled.launch
    monkeypatch.setattr(Compiled, "launch", launch)
    strategy = replica_engine.TPUStrategy(num_cores=2)
    context = strategy.run_steps(passes_on, batches(), 100, prefetch=ahead)
    assert more == [False]
    assert float(context.last_step_outputs["x"]) == 99.0
    assert max(seen) == max(1, (ahead + 1) // (3 if queue else 2))
    assert sum(seen) == 100
