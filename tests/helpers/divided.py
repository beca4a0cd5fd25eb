"""Variables in parts, and how much memory a process takes to make one."""

import math
import pathlib

import keras
import numpy as np

import replica_engine


def made(strategy, shape, initializer):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        return keras.Variable(keras.initializers.get(initializer), shape=shape)


def model_parallel(layouts, shape=(2, 2), names=("batch", "model"), batch="batch"):
    """Layouts of variables, by their names, on a mesh of CPU devices."""
    devices = [f"cpu:{index}" for index in range(math.prod(shape))]
    layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, list(names), devices))
    for name, axes in layouts.items():
        layout_map[name] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


def on_two_axes(*axes):
    return replica_engine.TPUStrategy(distribution=model_parallel({"variable.*": axes}))


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
