"""The gain of `MirroredStrategy(concurrent=True)`: large eager matrix products on two replicas, at once and in turn.

TensorFlow's own threads spread one matrix product over all cores, so concurrent replicas cannot be faster. Therefore
this process sets `tf.config.threading.set_intra_op_parallelism_threads(1)`: each product takes one core, like an op
that TensorFlow cannot spread.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

import replica_engine
from benchmarks import command
from benchmarks.eager_run import check_same
from benchmarks.measure import Row, interleaved, milliseconds

OURS, PEER = "concurrent=True", "concurrent=False"

TARGET = {PEER: 0.6}


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Measures one row."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    devices = replica_engine.logical_devices(flags.replicas)
    both = {
        OURS: replica_engine.MirroredStrategy(devices, concurrent=True),
        PEER: replica_engine.MirroredStrategy(devices),
    }
    random = np.random.default_rng(0)
    matrices = []
    for device in devices:
        with tf.device(device):
            # Scaled so that products of products stay near 1.
            scaled = random.standard_normal((flags.size, flags.size), dtype=np.float32) / np.sqrt(flags.size)
            matrices.append(tf.identity(scaled))

    def products(_: Any = None) -> Any:
        matrix = value = matrices[tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group)]
        for _ in range(flags.products):
            value = value @ matrix
        return value

    check = check_same(*both.values(), products)
    figures = interleaved(both, flags.repeats, lambda strategy: milliseconds(lambda: strategy.run(products)))
    name = f"{flags.products} products of {flags.size} x {flags.size}"
    note = "one thread for each op (intra_op_parallelism_threads = 1)"
    yield Row("concurrency", name, figures, replicas=flags.replicas, targets=TARGET, check=check, note=note)


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("replicas", "2", "2", "number of replicas"),
        command.Option("size", "1000", "500", "rows and columns of a matrix"),
        command.Option("products", "5", "2", "matrix products in a run"),
    )
