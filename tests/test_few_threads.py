"""TensorFlow may have as few threads for ops that wait as it likes: datasets and steps do not starve each other.

TensorFlow makes its inter-op pool as large as the machine has cores. This library leaves that as it is: on few cores
more threads make small graph steps slower. What would hang for want of a thread hangs with one, on any machine.
"""

import os
import subprocess
import sys
import textwrap

import pytest

THREADS = "TF_NUM_INTEROP_THREADS"  # read by TensorFlow when it starts

SETTING = """
    import numpy as np
    import tensorflow as tf
    import replica_engine
    from replica_engine.testing import logical_devices

    N = {n}
    strategy = replica_engine.{strategy}
    numbers = tf.data.Dataset.range(N * 100).map(lambda x: tf.cast(x, tf.float32), num_parallel_calls=tf.data.AUTOTUNE)
    TOTAL = float(sum(range(N * 100)))

    def step(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.reduce_sum(x))

    def one(batch):
        return strategy.experimental_local_results(strategy.run(step, args=(batch,)))[0]
"""

LOOP_IN_A_FUNCTION = """
    distributed = strategy.experimental_distribute_dataset(numbers.batch(4 * N).prefetch(2))

    @tf.function
    def epoch():
        total = 0.0
        for batch in distributed:
            total += one(batch)
        return total

    print(all(float(epoch()) == TOTAL for _ in range(3)))
"""

ITERATOR_IN_A_FUNCTION = """
    def of_a_worker(context):
        return numbers.interleave(lambda x: tf.data.Dataset.from_tensors(x), num_parallel_calls=2).repeat().batch(4)

    iterator = iter(strategy.distribute_datasets_from_function(of_a_worker))

    @tf.function
    def steps():
        total = 0.0
        for _ in tf.range(25):
            total += one(next(iterator))
        return total

    print(all(float(steps()) == TOTAL for _ in range(3)))
"""

LOOP_IN_PYTHON = """
    def slow():
        for x in range(N * 20):
            yield np.float32(x)

    signature = tf.TensorSpec([], tf.float32)
    fed_by_python = tf.data.Dataset.from_generator(slow, output_signature=signature).batch(4 * N, drop_remainder=True)
    one = tf.function(one)
    total = sum(float(one(batch)) for batch in strategy.experimental_distribute_dataset(fed_by_python))
    print(total == sum(range(N * 20)))
"""

KERAS_FIT = """
    import keras

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2, jit_compile=False)
    x, y = np.ones([64, 4], np.float32), np.ones([64, 1], np.float32)
    samples = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).repeat().batch(16)
    model.fit(samples, steps_per_epoch=4, epochs=2, validation_data=(x, y), verbose=0)
    print(model.predict(x, batch_size=16, verbose=0).shape == (64, 1))
"""

PROGRAMS = {
    "loop in a function": LOOP_IN_A_FUNCTION,
    "iterator in a function": ITERATOR_IN_A_FUNCTION,
    "loop in Python": LOOP_IN_PYTHON,
    "Keras fit": KERAS_FIT,
}
MIRRORED, TPU = "MirroredStrategy(logical_devices(N))", "TPUStrategy(num_cores=N)"


@pytest.fixture
def run(programs):
    """Runs a program with some number of threads, in a process of its own."""

    def run(source, threads):
        return programs.run(textwrap.dedent(source), env={**os.environ, THREADS: str(threads)}, timeout=100)

    return run


@pytest.mark.parametrize(
    ("program", "n", "under"),
    [
        ("loop in a function", 2, MIRRORED),
        ("loop in a function", 8, MIRRORED),
        ("iterator in a function", 4, MIRRORED),
        ("iterator in a function", 2, TPU),
        ("loop in Python", 2, MIRRORED),
        ("loop in Python", 2, TPU),
        ("Keras fit", 2, MIRRORED),
        ("Keras fit", 2, TPU),
    ],
)
def test_distributed_datasets_need_no_more_than_one_thread(run, program, n, under):
    setting = SETTING.replace("{n}", str(n)).replace("{strategy}", under)
    result = run(setting + PROGRAMS[program], 1)
    assert result.stdout == "True\n", result.stderr[-2000:]


def test_importing_the_library_leaves_the_environment_alone():
    source = "import os; before = dict(os.environ); import replica_engine; print(os.environ == before)"
    result = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=100, check=False)
    assert result.stdout == "True\n", result.stderr[-2000:]
