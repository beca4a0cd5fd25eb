"""Variables in parts, and how much memory a process takes to make one."""

import pathlib

import keras
import numpy as np

import replica_engine


def made(strategy, shape, initializer):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return keras.Variable(keras.initializers.get(initializer), shape=shape)


def on_two_axes(*axes):
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], [f"cpu:{index}" for index in range(4)])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["variable.*"] = axes
    return replica_engine.TPUStrategy(
        distribution=keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    )


def peak_of_random_numbers(shape, two_axes):
    """The largest memory that the process takes for a variable while it is made, in sizes of the variable."""
    strategy = (
        on_two_axes("model", "batch") if two_axes else replica_engine.TPUStrategy(num_cores=4, distribution="fsdp")
    )
    made(strategy, (2048, 1024), "glorot_uniform")  # what is made once for all
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what there is
    before = _bytes("VmRSS")
    variable = made(strategy, shape, "glorot_uniform")
    return float((_bytes("VmHWM") - before) / (4 * np.prod(variable.shape)))


def _bytes(what):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(what))
