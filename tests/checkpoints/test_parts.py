"""Variables in parts are saved and read in parts: no whole copy on the host, a file that plain TensorFlow reads."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine.checkpoints import checkpoint_files
from replica_engine.upstream import eager
from replica_engine.xla.state.device_value import DeviceValue

KEY = "weight/.ATTRIBUTES/VARIABLE_VALUE"
SIZES = [1030, 34]  # over three devices with zeros behind; large enough that the host frees it


def divided(cores, each=None, shape=SIZES, dtype="float32", seed=0):
    strategy = replica_engine.TPUStrategy(num_cores=cores, cores_per_replica=each, distribution="fsdp")
    numbers = np.random.default_rng(seed).integers(0, 100, shape)
    with strategy.scope():
        weight = tf.Variable(tf.cast(numbers, dtype), aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)
    strategy.run(lambda: weight.assign(weight + tf.cast(1, dtype)))
    return strategy, weight, numbers + 1


@pytest.fixture
def gathered(monkeypatch):
    """The values that were put together on the host."""
    whole, found = DeviceValue._bring_up_to_date, []

    def noted(self):
        found.append(self)
        whole(self)

    monkeypatch.setattr(DeviceValue, "_bring_up_to_date", noted)
    return found


@pytest.fixture
def rows(monkeypatch):
    """What was written of values with two dimensions: which part, and how many rows it has."""
    write, found = checkpoint_files.write, []

    def noted(rows, prefix):
        found.extend((row.part, row.value.shape[0]) for row in rows if row.value.ndim == 2)
        write(rows, prefix)

    monkeypatch.setattr(checkpoint_files, "write", noted)
    return found


PARTS = {
    3: [(f"1030 34 {first},{count}:-", count) for first, count in ((0, 344), (344, 344), (688, 342))],
    2: [(f"1030 34 {first},515:-", 515) for first in (0, 515)],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "float16"])
@pytest.mark.parametrize(("cores", "each"), [(3, 3), (4, 2)])
def test_a_save_gathers_nothing_and_leaves_nothing_on_the_host(cores, each, dtype, gathered, rows, tmp_path):
    strategy, weight, expected = divided(cores, each, dtype=dtype)
    handle = eager.raw_handle(weight._primary)
    checkpoint = tf.train.Checkpoint(weight=weight)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    gathered.clear()
    paths = checkpoint.write(tmp_path / "ckpt"), checkpoint.write(tmp_path / "later", options)
    strategy.run(lambda: weight.assign(weight + tf.cast(1, dtype)))
    checkpoint.sync()
    assert gathered == []
    assert eager.read(handle, weight.dtype).shape == [0]  # nothing is kept
    whole = [("", 1030)]  # TensorFlow does not put slices of float16 together
    assert rows == 2 * (whole if dtype == "float16" else PARTS[each])
    for path in paths:
        np.testing.assert_array_equal(tf.train.load_variable(path, KEY).astype("int64"), expected)
    np.testing.assert_array_equal(weight.numpy().astype("int64"), expected + 1)


def test_a_part_is_read_alone(tmp_path):
    _, weight, expected = divided(4)
    path = tf.train.Checkpoint(weight=weight).write(tmp_path / "ckpt")
    read = tf.raw_ops.RestoreV2(
        prefix=path, tensor_names=[KEY], shape_and_slices=["1030 34 30,500:-"], dtypes=[tf.float32]
    )
    np.testing.assert_array_equal(read[0], expected[30:530])
    assert tf.train.load_checkpoint(path).get_variable_to_shape_map()[KEY] == SIZES


def test_weights_and_optimizers_of_keras_are_saved_in_parts(gathered, rows, tmp_path):
    strategy = replica_engine.TPUStrategy(num_cores=2, distribution="fsdp")
    with strategy.scope():
        model = keras.Sequential([keras.Input([SIZES[0]]), keras.layers.Dense(SIZES[1], use_bias=False)])
        model.compile("adam", "mse")
    model.fit(np.ones([4, SIZES[0]], "f"), np.ones([4, SIZES[1]], "f"), verbose=0)
    gathered.clear()
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(tmp_path / "ckpt")
    assert not any(value.axes for value in gathered)
    assert rows == 3 * PARTS[2]  # the weight, and two that Adam keeps for it
