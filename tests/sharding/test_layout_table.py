"""`strategy.layouts()`: which variable is divided how; and the devices' names in `strategy.memory()`."""

import gc

import keras
import pytest
import tensorflow as tf
from helpers.divided import model_parallel

import replica_engine


@pytest.fixture(scope="module")
def divided():
    distribution = model_parallel({"up/kernel": (None, "model"), "table": ("model",)}, batch=None)
    return replica_engine.TPUStrategy(distribution=distribution)


def test_the_table_names_each_variable_that_there_is(divided):
    strategy = divided
    with strategy.scope():
        up = keras.layers.Dense(50, name="up")
        up.build([None, 13])
        table = tf.Variable(tf.zeros([13, 3]), name="table")
        adam = keras.optimizers.Adam(name="adam")
        adam.build([up.kernel])
    layouts = strategy.layouts()
    assert layouts.mesh == (("batch", 2), ("model", 2))
    rows = {row.path: row[1:] for row in layouts.rows}
    assert rows["up/kernel"] == rows["adam/up_kernel_velocity"] == ((13, 50), "float32", (None, "model"), 1300, 2600)
    assert rows["table"] == ((13, 3), "float32", ("model", None), 7 * 3 * 4, 13 * 3 * 4)  # 13 rows are stored as 14
    assert str(layouts).split("\n")[:2] == [
        "variable                 shape     dtype    axes             bytes on a device",
        "up/kernel                (13, 50)  float32  (None, 'model')  1,300 of 2,600",
    ]
    part, whole = (sum(row[column] for row in layouts.rows) for column in (4, 5))
    assert str(layouts).endswith(f"mesh: 'batch'=2 x 'model'=2; a device has {part:,} of {whole:,} bytes")
    assert "<td>up/kernel</td><td>(13, 50)</td>" in layouts._repr_html_()
    assert strategy.memory().variables == [part] * 4
    assert str(strategy.memory()).startswith(f"CPU:0: variables {part / 1024:.4g} KiB\nCPU:1: ")
    del table, adam
    for _ in range(2):  # what the first frees may hold more
        gc.collect()
    assert {row.path for row in strategy.layouts().rows} == {"up/kernel", "up/bias"}


def test_replicas_of_one_device_have_whole_variables():
    strategy = replica_engine.TPUStrategy(num_cores=2)
    with strategy.scope():
        words = tf.Variable(["a", "b"], name="words")
    assert strategy.layouts() == ((), (("words", (2,), "string", (None,), 0, 0),))
    assert str(strategy.layouts()).endswith("mesh: one device; a device has 0 bytes")
    del words
