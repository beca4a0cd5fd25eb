"""Layouts that fit neither the devices nor the variables, and distributions that would be ignored."""

import keras
import pytest
import tensorflow as tf
from helpers.golden import shows
from keras.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, TensorLayout

from replica_engine import MirroredStrategy, TPUStrategy
from replica_engine.errors import DeviceError, DistributionError
from replica_engine.keras import replicate_model
from replica_engine.strategies import device_variables

DEVICES = [f"cpu:{index}" for index in range(4)]


@shows(DistributionError, "unmatched_layout")
def test_layout_that_matches_no_variable():
    """Before the first step is traced."""
    layout_map = LayoutMap(DeviceMesh((2, 2), ["batch", "model"], DEVICES))
    layout_map["up/kernel"] = (None, "model")
    strategy = TPUStrategy(distribution=ModelParallel(layout_map=layout_map))
    with strategy.scope():
        up = keras.layers.Dense(16, name="up")
        layers = [keras.Input([8]), up, keras.layers.Dense(1, name="out")]
        model = keras.Sequential(layers, name="net")
        model.compile(keras.optimizers.SGD(name="sgd"), "mse")
    model.fit(tf.ones([4, 8]), tf.ones([4, 1]), verbose=0)


@shows(DistributionError, "not_shared_out")
def test_fewer_devices_than_a_replica_needs():
    TPUStrategy(num_cores=2, cores_per_replica=4)


@pytest.fixture
def small_devices(monkeypatch):
    """Devices with 1 MiB of memory each."""
    monkeypatch.setattr(device_variables, "chip_memory", lambda devices: 1 << 20)


@shows(DistributionError, "too_large")
def test_variable_larger_than_a_device(small_devices):
    """Of 1 MiB."""
    strategy = TPUStrategy(num_cores=4, distribution="zero1")
    with strategy.scope():
        tf.Variable(lambda: tf.zeros([50257, 32]), shape=[50257, 32], dtype="float32", name="table")


def test_too_large_though_it_is_divided(small_devices):
    with (
        TPUStrategy(num_cores=4, distribution="fsdp").scope(),
        pytest.raises(DistributionError, match=r"1\.221 MiB on each device, which has 1 MiB, though it is divided"),
    ):
        tf.Variable(tf.zeros([1280, 1000]))


@shows(DistributionError, "set_for_all")
def test_distribution_of_keras_that_the_strategy_does_not_have():
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    with DataParallel(devices=["cpu:0", "cpu:1"]).scope(), strategy.scope():
        keras.layers.Dense(1).build([None, 2])


def test_a_distribution_of_keras_is_never_ignored():
    """Around `fit` of a model that was built before, and of a replicated one; the strategy's own one may be set."""
    given = DataParallel(devices=DEVICES)
    x, y = tf.ones([4, 8]), tf.ones([4, 1])
    for strategy, known in ((TPUStrategy(num_cores=2), False), (TPUStrategy(distribution=given), True)):
        plain = keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])
        with strategy.scope():
            model = keras.Sequential([keras.Input([8]), keras.layers.Dense(1)])
        for each in (model, plain):
            each.compile("sgd", "mse")
        for each in (model, replicate_model(plain, strategy=strategy)):
            with given.scope():
                if known:
                    each.fit(x, y, verbose=0)
                    continue
                with pytest.raises(DistributionError, match=r"the strategy, TPUStrategy\(distribution=\.\.\.\)"):
                    each.fit(x, y, verbose=0)


@shows("unmatched_outputs")
def test_layout_that_matches_no_output():
    """It may be of a layer that a later step calls: a warning."""
    layout_map = LayoutMap(DeviceMesh((2, 2), ["batch", "model"], DEVICES))
    layout_map["ip/output"] = ("batch", "model")
    strategy = TPUStrategy(distribution=ModelParallel(layout_map=layout_map))
    with strategy.scope():
        up = keras.layers.Dense(16, name="up")
        layers = [keras.Input([8]), up, keras.layers.Dense(1, name="out")]
        model = keras.Sequential(layers, name="net")
    model.predict(tf.ones([4, 8]), verbose=0)


def test_layout_of_an_output_that_has_fewer_dimensions():
    layout_map = LayoutMap(DeviceMesh((2, 2), ["batch", "model"], DEVICES))
    layout_map["dense/output"] = ("batch", None, "model")
    strategy = TPUStrategy(distribution=ModelParallel(layout_map=layout_map))
    with strategy.scope():
        layer = keras.layers.Dense(16, name="dense")
    with pytest.raises(DistributionError, match=r"for 'dense/output' has 3 axes, but a value there has the shape"):
        strategy.run(layer, args=(tf.ones([4, 8]),))


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ({"table": ("model", None, "batch")}, r"has 3 axes, but the variable 'table' has the shape \(8, 4\)"),
        ({"table": ("model", "model")}, "'table' names the axis 'model' twice"),
        ({"*table": ("model",)}, r"The key '\*table' of the LayoutMap is no regular expression: nothing to repeat"),
        ({"t.*": ("model",), ".*e": ("batch",)}, "Several layouts of the LayoutMap match 'table'"),
        (
            {"table": TensorLayout(("rows",), DeviceMesh((4,), ["rows"], DEVICES))},
            "'table' names the axis 'rows', but the axes of the mesh are 'batch', 'model'",
        ),
    ],
)
def test_layouts_that_do_not_fit(layouts, words):
    layout_map = LayoutMap(DeviceMesh((2, 2), ["batch", "model"], DEVICES))
    for key, layout in layouts.items():
        layout_map[key] = layout
    with (
        pytest.raises(DistributionError, match=words),
        TPUStrategy(distribution=ModelParallel(layout_map=layout_map)).scope(),
    ):
        tf.Variable(tf.zeros([8, 4]), name="table")


def test_layouts_are_checked_when_a_loop_of_ones_own_has_built_the_model():
    layout_map = LayoutMap(DeviceMesh((2, 2), ["batch", "model"], DEVICES))
    layout_map[".*wrong/kernel"] = (None, "model")
    strategy = TPUStrategy(distribution=ModelParallel(layout_map=layout_map))
    strategy.run(lambda: tf.constant(1.0))  # a program without the model may run before
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(16)])
    with pytest.raises(DistributionError, match=r"'\.\*wrong/kernel' of the LayoutMap matches none of the 2 variables"):
        strategy.run(model, args=(tf.ones([4, 8]),))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"distribution": "fdsp"}, "must be one of 'fsdp', 'zero1', a keras.distribution.DataParallel"),
        ({"num_cores": 6, "cores_per_replica": 4}, "6 devices cannot be shared out among replicas of 4"),
        ({"cores_per_replica": 0}, "must be a positive int or None; got 0"),
        ({"distribution": DataParallel(devices=DEVICES), "cores_per_replica": 2}, "the mesh .* has 'batch'=4"),
    ],
)
def test_arguments_that_do_not_fit(how, words):
    with pytest.raises(DistributionError, match=words):
        TPUStrategy(**how)


@pytest.mark.parametrize("count", [0, "4", 4.0])
@pytest.mark.parametrize("how", [{"distribution": "fsdp"}, {"cores_per_replica": 2}])
def test_the_number_of_devices_is_checked(count, how):
    with pytest.raises(DeviceError, match="must be a positive int"):
        TPUStrategy(num_cores=count, **how)
