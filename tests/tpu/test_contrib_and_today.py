"""On the contrib `TPUStrategy` of 2018 today's names work too, and the guide has every old one."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.towers import SUM, spread, variable

import replica_engine
from replica_engine import xla
from replica_engine.compat import contrib

METHODS = [
    *("batch_reduce", "broadcast", "call_for_each_tower", "colocate_vars_with", "configure", "distribute_dataset"),
    *("finalize", "get_host_cpu_device", "group", "initialize", "map", "non_slot_devices", "read_var", "reduce"),
    *("run_steps_on_dataset", "scope", "unwrap", "update", "update_non_slot", "value_container"),
]
PROPERTIES = [
    *("between_graph", "is_single_tower", "num_hosts", "num_towers", "num_towers_per_host", "parameter_devices"),
    *("should_checkpoint", "should_init", "should_save_summary", "worker_device_index", "worker_devices"),
    "steps_per_run",
]

GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "from_contrib.md"


# Today's names on the same object.


def test_today_s_reduce_is_still_there(distribution):
    value = spread(distribution, [1.0, 2.0], [3.0, 4.0])
    for reduce_op in ("SUM", tf.distribute.ReduceOp.SUM):
        assert distribution.reduce(reduce_op, value, axis=None).numpy().tolist() == [4.0, 6.0]
    assert distribution.reduce(tf.distribute.ReduceOp.SUM, value, axis=0) == 10.0
    assert distribution.reduce(tf.distribute.ReduceOp.MEAN, value, 0) == 2.5
    in_function = tf.function(lambda: distribution.reduce("SUM", distribution.run(lambda: tf.constant(1.0)), axis=None))
    assert in_function() == 2.0


@pytest.mark.parametrize("reduce_op", ["SUM", "MEAN"])
def test_today_s_reduce_by_name_reduces_over_an_axis(distribution, reduce_op):
    value = spread(distribution, [1.0, 2.0], [3.0, 4.0])
    expected = {"SUM": 10.0, "MEAN": 2.5}[reduce_op]
    assert distribution.reduce(reduce_op, value, axis=0).numpy().tolist() == expected
    assert distribution.reduce(reduce_op, value, 0).numpy().tolist() == expected


@pytest.mark.parametrize("reduce_op", ["SUM", tf.distribute.ReduceOp.SUM], ids=repr)
def test_today_s_reduce_works_in_a_step_of_run_steps(distribution, reduce_op):
    def step(context, x):
        context.set_last_step_output("sum", distribution.reduce(reduce_op, x, axis=None), "MEAN")

    context = distribution.run_steps(step, [np.float32(1.0)], 1)
    assert context.last_step_outputs["sum"] == 2.0


def test_today_s_run_and_run_steps_are_still_there(distribution, launched):
    total = variable(distribution, 0.0, SUM)

    def step(context, x):
        total.assign_add(x)
        context.set_last_step_output("x", x, "MEAN")

    context = distribution.run_steps(step, [np.float32(1.0), np.float32(2.0)], 2)
    distribution.run(lambda: total.assign_add(tf.constant(10.0)))
    assert launched() == 2
    assert context.last_step_outputs["x"] == 2.0
    assert total.numpy() == 2 * (1 + 2 + 10)
    assert isinstance(distribution, replica_engine.TPUStrategy)


def test_keras_fits(distribution):
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 2)).astype("float32")
    y = x.sum(1, keepdims=True)
    with distribution.scope():
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((2,)), layer])
        model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=2)
    found = model.fit(x, y, 8, 2, verbose=0, shuffle=False).history["loss"]

    kernel, expected = np.zeros((2, 1), "float32"), []
    for _ in range(2):
        losses = []
        for batch in (slice(0, 8), slice(8, 16)):
            error = x[batch] @ kernel - y[batch]
            losses.append(np.mean(error**2))
            kernel = kernel - 0.1 * 2 * x[batch].T @ error / 8
        expected.append(np.mean(losses))
    np.testing.assert_allclose(found, expected, rtol=2e-5)
    np.testing.assert_allclose(layer.kernel.numpy(), kernel, rtol=2e-5, atol=2e-6)


# The guide.


def old_names():
    """The old names of the guide's table: what is in backquotes in the left column, without arguments."""
    rows = [line.split("|")[1] for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    return [re.split(r"[(\s]", name)[0] for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def test_the_guide_has_every_name_of_the_class():
    assert set(METHODS + PROPERTIES) - set(old_names()) == set()


def test_every_old_name_in_the_guide_is_there():
    owners = {
        "tower_context": contrib.TowerContext,
        "context": contrib.MultiStepContext,
        "contrib.distribute": contrib,
        "tf.VariableAggregation": None,  # TensorFlow's: ONLY_FIRST_REPLICA today
        "tpu": xla,
        "tpu_ops": xla,
    }
    of_module = {
        *("TPUStrategy", "in_cross_tower_context", "has_distribution_strategy", "get_distribution_strategy"),
        "get_tpu_system_metadata",
    }
    names = old_names()
    assert of_module <= set(names)
    for name in names:
        owner, _, last = name.rpartition(".")
        there = contrib if name in of_module else owners.get(owner, contrib.TPUStrategy)
        assert there is None or hasattr(there, last), name


def test_names_of_2018_are_methods_and_properties():
    assert all(callable(getattr(contrib.TPUStrategy, name)) for name in METHODS)
    assert all(isinstance(getattr(contrib.TPUStrategy, name), property) for name in PROPERTIES)
