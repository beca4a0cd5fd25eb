"""Programs of compiled replicas on a GPU: `python programs.py NAME`, each in a process of its own.

Where numbers are compared, a CPU device of the same process has the others. GPUs multiply matrices and convolve in
TF32 unless they are told otherwise, so the tolerances are wide.
"""

import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import TPUStrategy, xla
from replica_engine.errors import DeviceError, ProgramError, ReplicaTimeoutError

random = np.random.default_rng(0)
X = random.normal(size=(100, 12, 12, 3)).astype("float32")
Y = random.integers(10, size=100)


def on(platform="gpu", **options):
    return TPUStrategy(xla.PjrtClusterResolver(platform), num_cores=1, **options)


def model(strategy, **options):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        layers = keras.layers
        convolution = [layers.Conv2D(8, 3, activation="relu"), layers.BatchNormalization()]
        made = keras.Sequential(
            [keras.Input((12, 12, 3)), *convolution, layers.GlobalAveragePooling2D(), layers.Dense(10)]
        )
        made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return made


def losses(fitted, epochs=3, **options):
    return fitted.fit(X, Y, batch_size=20, epochs=epochs, shuffle=False, verbose=0, **options).history["loss"]


def close(ours, others, tolerance=1e-2):
    for one, other in zip(tf.nest.flatten(ours), tf.nest.flatten(others), strict=True):
        one, other = np.asarray(one), np.asarray(other)
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance * (1e-6 + np.abs(other).max()))


def long(x, times):
    """A program of so many matrix products."""

    def product(i, x):
        x = tf.linalg.matmul(x, x)
        return i + 1, x / tf.norm(x)

    return tf.while_loop(lambda i, x: i < times, product, [0, x])[1]


def times_in(seconds, strategy, value):
    """How many products take about so long, on this GPU."""

    def took(times):
        began = time.perf_counter()
        strategy.run(lambda: value.assign(long(value, times)))
        value.numpy()
        return time.perf_counter() - began

    took(1000)  # compiles
    return int(1000 * seconds / took(1000))


def devices_by_default():
    assert TPUStrategy().num_replicas_in_sync >= 1
    assert "GPU" in repr(TPUStrategy()), TPUStrategy()
    with pytest.raises(DeviceError, match="1000 replicas need 1000 GPU devices"):
        TPUStrategy(num_cores=1000)


def operations():
    """Gradients of convolutions, linear algebra, sorting, indexing and control flow, as a CPU device has them."""

    def with_gradient(fn):
        def both(*args):
            with tf.GradientTape() as tape:
                tape.watch(args[0])
                y = fn(*args)
            return y, tf.convert_to_tensor(tape.gradient(y, args[0]))

        return both

    image, square = X[:8], random.normal(size=(12, 12)).astype("float32")
    positive = square @ square.T + 12 * np.eye(12, dtype="float32")
    table, places = random.normal(size=(50, 8)).astype("float32"), random.integers(50, size=(4, 7))
    bodies = {
        "conv2d": (with_gradient(lambda k, x: tf.nn.conv2d(x, k, 2, "SAME")), random.normal(size=(3, 3, 3, 8)), image),
        "depthwise": (
            with_gradient(lambda k, x: tf.nn.depthwise_conv2d(x, k, [1, 1, 1, 1], "SAME")),
            random.normal(size=(3, 3, 3, 2)),
            image,
        ),
        "transposed": (
            with_gradient(lambda k, x: tf.nn.conv2d_transpose(x, k, [8, 24, 24, 4], 2, "SAME")),
            random.normal(size=(3, 3, 4, 3)),
            image,
        ),
        "pooling": (with_gradient(lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME")), image),
        "resizing": (with_gradient(lambda x: tf.image.resize(x, [23, 9])), image),
        "cholesky": (with_gradient(tf.linalg.cholesky), positive),
        "eigenvalues": (lambda x: tf.linalg.eigh(x)[0], positive),
        "singular values": (lambda x: tf.linalg.svd(x, compute_uv=False), square),
        "qr": (lambda x: tf.abs(tf.linalg.qr(x)[1]), square),
        "solve": (tf.linalg.solve, positive, square),
        "fft": (lambda x: tf.abs(tf.signal.fft2d(tf.cast(x, tf.complex64))), square),
        "top_k": (lambda x: tf.math.top_k(x, 5), square),
        "sort": (lambda x: (tf.sort(x), tf.argsort(x)), square),
        "cumsum": (with_gradient(lambda x: tf.cumsum(x, 1)), square),
        "gather": (with_gradient(tf.gather), table, places),
        "batched gather": (with_gradient(lambda x, i: tf.gather(x, i, batch_dims=1)), table[:4], places % 8),
        "segments": (lambda x, i: tf.math.unsorted_segment_sum(x, i, 5), table, random.integers(5, size=50)),
        "loop": (lambda x: long(x, 3), square),
        "branch": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x - 1), square),
        "scan": (lambda x: tf.scan(lambda a, b: a * 0.5 + b, x), square),
        "float64": (tf.linalg.matmul, square.astype("float64"), square.astype("float64")),
        "int64": (lambda x: (x * 3 // 7, x % 11), random.integers(-(2**40), 2**40, size=20)),
        "random": (lambda s: (tf.random.stateless_normal([50], s), tf.random.stateless_uniform([50], s)), [1, 2]),
        "sum": (lambda x: tf.distribute.get_replica_context().all_reduce("SUM", x), square),
    }
    for name, (fn, *args) in bodies.items():
        given = [
            tf.constant(each, tf.float32 if getattr(each, "dtype", None) == np.float64 and name != "float64" else None)
            for each in args
        ]
        gpu, cpu = (on(platform).run(fn, args=tuple(given)) for platform in ("gpu", "cpu"))
        try:
            close(gpu, cpu)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def fit():
    of = {platform: model(on(platform), metrics=["accuracy"]) for platform in ("gpu", "cpu")}
    gpu, cpu = (losses(each, validation_data=(X, Y)) for each in of.values())
    close(gpu, cpu)
    gpu, cpu = (each.predict(X, verbose=0) for each in of.values())
    close(gpu, cpu, 5e-2)


def steps_per_execution():
    gpu, cpu = (losses(model(on(platform), steps_per_execution=5)) for platform in ("gpu", "cpu"))
    close(gpu, cpu)


def mixed_precision():
    for policy in ("mixed_float16", "mixed_bfloat16"):
        keras.mixed_precision.set_global_policy(policy)
        found = losses(model(on()))
        keras.mixed_precision.set_global_policy("float32")
        close(found, losses(model(on("cpu"))), 3e-2)


def own_loop():
    found = []
    for platform in ("gpu", "cpu"):
        strategy = on(platform)
        trained, optimizer = model(strategy), keras.optimizers.SGD(0.1)
        with strategy.scope():
            optimizer.build(trained.trainable_variables)

        def step(x, y, trained=trained, optimizer=optimizer):
            with tf.GradientTape() as tape:
                of_samples = keras.losses.sparse_categorical_crossentropy(y, trained(x, training=True), True)
                loss = tf.reduce_mean(of_samples)
            variables = trained.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return loss

        batches = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices((X, Y)).batch(20))

        def run(x, y, strategy=strategy, step=step):
            return strategy.run(step, args=(x, y))

        found.append([float(each(*batch)) for each in (run, tf.function(run)) for batch in batches])
    close(*found)


def saving():
    folder = tempfile.mkdtemp()
    trained = model(on())
    losses(trained, 1)
    before = trained.predict(X, verbose=0)
    trained.save(f"{folder}/model.keras")
    checkpoint = tf.train.Checkpoint(model=trained).save(f"{folder}/checkpoint")
    for platform in ("gpu", "cpu"):
        with on(platform).scope():
            close(keras.models.load_model(f"{folder}/model.keras").predict(X, verbose=0), before)
    losses(trained, 1)
    tf.train.Checkpoint(model=trained).restore(checkpoint)
    close(trained.predict(X, verbose=0), before, 1e-6)


def host_calls_with_gradients():
    @tf.custom_gradient
    def cube(x):
        call = xla.returns(tf.TensorSpec([3], tf.float32))(lambda x: np.asarray(x) ** 3)
        return xla.outside_compilation(call, x), lambda upstream: upstream * 3.0 * x * x

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = cube(x)
        return y, tape.gradient(y, x)

    found = on().run(step, args=(tf.constant([1.0, 2.0, 3.0]),))
    close(found, (np.array([1.0, 8.0, 27.0]), np.array([3.0, 12.0, 27.0])), 1e-6)


def a_host_call_that_fails():
    strategy = on()
    with strategy.scope():
        count = tf.Variable(1.0)

    @xla.returns(tf.TensorSpec([], tf.float32))
    def fails(_):
        raise ValueError("mine")

    def step():
        count.assign_add(1.0)
        return xla.outside_compilation(fails, count.read_value())

    with pytest.raises(ValueError, match="mine"):
        strategy.run(step)
    assert float(count) == 1.0, count
    strategy.run(lambda: count.assign_add(1.0))
    assert float(count) == 2.0, count


def ctrl_c():
    """It comes once the launch has returned: a loop whose length the GPU decides runs inside the launch."""
    strategy = on()
    with strategy.scope():
        value = tf.Variable(tf.random.normal([2048, 2048]))

    def step(times):
        value.assign(long(value, times))

    times = times_in(3.0, strategy, value)
    strategy.run(step, args=(tf.constant(1),))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        strategy.run(step, args=(tf.constant(times),))
        float(value[0, 0])
    strategy.run(step, args=(tf.constant(1),))
    assert np.isfinite(value.numpy()).all()


def a_limit():
    strategy, free = on(timeout=1.0), on()
    with strategy.scope():
        value = tf.Variable(tf.random.normal([2048, 2048]))
    with free.scope():
        like = tf.Variable(value.numpy())
    times = times_in(4.0, free, like)  # a second of the limit, and less than the exit of the process waits
    strategy.run(lambda: value.assign(long(value, 3)))
    before = value.numpy()
    with pytest.raises(ReplicaTimeoutError, match="GPU:0"):
        strategy.run(lambda: value.assign(long(value, times)))
    close(value, before, 0.0)


def too_large():
    strategy = on()
    with strategy.scope():
        total = tf.Variable(1.0)

    def step(x):
        total.assign_add(1.0)
        return tf.sort(tf.linalg.matmul(x, x, transpose_b=True), 0)[0]

    with pytest.raises(ProgramError, match=r"(?i)use a smaller batch"):
        strategy.run(step, args=(tf.ones([400_000, 1]),))
    strategy.run(lambda: total.assign_add(1.0))
    assert float(total) == 2.0, total


def timeline():
    trained, path = model(on()), pathlib.Path(tempfile.mkdtemp(), "timeline.json")
    losses(trained, 1)
    with replica_engine.timeline(str(path)):
        losses(trained, 1)
    events = json.loads(path.read_text())["traceEvents"]
    assert "replica 0 of 1 (GPU:0)" in {each["args"]["name"] for each in events if each["name"] == "thread_name"}
    assert sum(each.get("cat") == "launch" for each in events) >= 5, events


def plan():
    trained = model(on())
    found = trained.distribute_strategy.plan(lambda x: trained(x, training=True), (tf.constant(X),))
    assert found.fits, found
    assert found.memory.chip > 2**30, found
    assert found.memory.arguments >= X.nbytes, found


def random_numbers():
    found = []
    for platform in ("gpu", "cpu"):
        strategy = on(platform)
        with strategy.scope():
            generator = tf.random.Generator.from_seed(3)
        found.append(strategy.run(lambda generator=generator: (generator.normal([20]), generator.uniform([20]))))
    close(*found, 1e-4)


def several_threads():
    strategy = on()
    with strategy.scope():
        count = tf.Variable(0.0)

    def work():
        for _ in range(50):
            strategy.run(lambda: count.assign_add(1.0))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert float(count) == 200.0, count


def programs_kept():
    """A second strategy finds the programs of the first in the cache folder."""
    xla.set_cache_dir(tempfile.mkdtemp())
    first = losses(model(on()), 1)
    before = xla.counts()
    close(losses(model(on()), 1), first, 1e-3)
    found = xla.counts() - before
    assert found.cache_hits, found
    assert not found.compiles, found


def device_loop():
    """On all GPUs: each batch of a loop is given to the launch."""
    strategy = TPUStrategy(xla.PjrtClusterResolver("gpu"))
    size = strategy.num_replicas_in_sync
    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    dataset = tf.data.Dataset.range(8 * size).batch(size, drop_remainder=True)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    strategy.run_steps(
        lambda context, x: total.assign_add(tf.reduce_sum(tf.cast(x, tf.float32))), batches, iterations=8
    )
    assert float(total) == 4 * size * (8 * size - 1), total


def memory_shared_with_tensorflow():
    one = tf.random.normal([4096, 4096])  # TensorFlow's part of the card, if it has one
    strategy = on()
    with strategy.scope():
        weight = tf.Variable(tf.zeros([4096, 4096]))  # jaxlib's
    strategy.run(lambda x: weight.assign(tf.linalg.matmul(x, x)), args=(one,))
    close(weight, tf.linalg.matmul(one, one))


def soft_placement():
    found = on().run(lambda x: tf.strings.to_number(tf.strings.as_string(x)) * 2.0, args=(tf.constant([1.0, 2.0]),))
    close(found, np.array([2.0, 4.0]), 1e-6)


def cpu_replicas_beside():
    for strategy, size in ((on(), 1), (TPUStrategy(xla.PjrtClusterResolver("cpu"), num_cores=4), 4)):
        found = strategy.run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", 1.0))
        assert [float(each) for each in strategy.experimental_local_results(found)] == [float(size)] * size, found


PROGRAMS = [
    *(devices_by_default, operations, fit, steps_per_execution, mixed_precision, own_loop, saving),
    *(host_calls_with_gradients, a_host_call_that_fails, ctrl_c, a_limit, too_large, timeline, plan, random_numbers),
    *(several_threads, programs_kept, device_loop, memory_shared_with_tensorflow, soft_placement, cpu_replicas_beside),
]
PROGRAMS = {each.__name__: each for each in PROGRAMS}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
