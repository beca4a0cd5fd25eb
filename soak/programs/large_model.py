"""Trains a model whose replicas would need 30 GiB on four devices, in parts; run by `soak.load`.

Prints what was found as JSON: the bytes of the variables of four replicas and of one device, the losses, and the most
bytes that the process had.
"""

from __future__ import annotations

import json
import resource

import keras
import numpy as np
import tensorflow as tf

import replica_engine
from replica_engine import logical_devices

DEVICES, LAYERS, WIDTH, BATCH = 4, 10, 8192, 16


def main() -> None:
    """Trains for three steps."""
    logical_devices(DEVICES)
    strategy = replica_engine.TPUStrategy(num_cores=DEVICES, distribution="fsdp")
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input([WIDTH]), *(keras.layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(LAYERS))]
        )
        model.compile(keras.optimizers.Adam(1e-5), "mse")
    x = np.random.default_rng(0).normal(size=(BATCH, WIDTH)).astype("f")
    losses = [float(model.train_on_batch(x, x)) for _ in range(3)]
    variables = strategy.memory().variables
    found = {
        "replicas": DEVICES * sum(variables),
        "device": max(variables),
        "losses": losses,
        "most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    tf.get_logger().setLevel("ERROR")
    main()
