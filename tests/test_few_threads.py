"""Distributed datasets and steps do not starve each other, with one thread in TensorFlow's inter-op pool.

The pool is as large as the machine has cores, and `replica_engine.process.setup` says when it is made larger. A dataset
that waited on its threads for something that needs one of them would hang with one.
"""

import os
import textwrap

import pytest
from helpers.versions import HAS_XLA, WHY_NO_XLA

BEGIN = """
    import faulthandler, threading
    faulthandler.dump_traceback_later(280, exit=True)
    import keras
    import numpy as np
    import tensorflow as tf
    import replica_engine
    from replica_engine import logical_devices

    devices = logical_devices(8)
"""

SETTING = """
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
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2, jit_compile=False)
    x, y = np.ones([64, 4], np.float32), np.ones([64, 1], np.float32)
    samples = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(64).repeat().batch(16)
    model.fit(samples, steps_per_epoch=4, epochs=2, validation_data=(x, y), verbose=0)
    print(model.predict(x, batch_size=16, verbose=0).shape == (64, 1))
"""

ONLY_ONE_THREAD = """
    def meet():
        try:
            barrier.wait()
        except threading.BrokenBarrierError:
            return False
        return True

    barrier = threading.Barrier(2, timeout=1)
    both = tf.function(lambda: [tf.numpy_function(meet, [], tf.bool, stateful=False) for _ in range(2)])
    print(not any(both()))
"""
PROGRAMS = {
    "loop in a function": LOOP_IN_A_FUNCTION,
    "iterator in a function": ITERATOR_IN_A_FUNCTION,
    "loop in Python": LOOP_IN_PYTHON,
    "Keras fit": KERAS_FIT,
    "ops that wait for each other": ONLY_ONE_THREAD,
}
MIRRORED, TPU = "MirroredStrategy(devices[:N])", "TPUStrategy(num_cores=N)"
UNDER_MIRRORED = [
    ("ops that wait for each other", 1),  # which shows that there is but one
    ("loop in a function", 2),
    ("loop in a function", 8),
    ("iterator in a function", 4),
    ("loop in Python", 2),
    ("Keras fit", 2),
]
UNDER_TPU = [("iterator in a function", 2), ("loop in Python", 2), ("Keras fit", 2)]
NEEDS_JAX = pytest.mark.skipif(not HAS_XLA, reason=WHY_NO_XLA)


@pytest.mark.parametrize(
    ("under", "cases"),
    [pytest.param(MIRRORED, UNDER_MIRRORED, id="mirrored"), pytest.param(TPU, UNDER_TPU, id="tpu", marks=NEEDS_JAX)],
)
def test_distributed_datasets_need_no_more_than_one_thread(programs, under, cases):
    """One after the other, in one process. The first line that is missing is of the one that hangs."""
    source, said = BEGIN, []
    for program, n in cases:
        source += SETTING.replace("{n}", str(n)).replace("{strategy}", under)
        source += PROGRAMS[program].replace("print(", f"print('{program}', N, ")
        said.append(f"{program} {n} True")
    source = textwrap.dedent(source)
    result = programs.run(source, env={**os.environ, "TF_NUM_INTEROP_THREADS": "1"}, timeout=300)
    assert result.stdout.splitlines() == said, result.stderr[-2000:]
