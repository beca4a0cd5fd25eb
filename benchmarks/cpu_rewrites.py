"""Operations that XLA:CPU runs slowly, in the form that `replica_engine.pjrt.rewrites` gives them, and as they are.

A figure is the processor time of one launch, on all cores, so that other programs on the machine change little. The
operands are on the devices. The rules, at which shapes an operation is rewritten, come from this table: shapes that no
rule fits are in it too, with `--all-shapes 1`, which turns the rules' limits off.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

from benchmarks import command
from benchmarks.measure import Row, interleaved, same
from replica_engine import xla
from replica_engine.pjrt import rewrites
from replica_engine.pjrt.rewrites import convolutions
from replica_engine.pjrt.stablehlo.markers import expand_markers

REWRITTEN, PLAIN = "rewritten", "plain"

# Pixels, features, features of the result, pixels of the kernel, strides.
CONVOLUTIONS = (
    (1, 512, 512, 3, 1),
    (2, 512, 512, 3, 1),
    (3, 512, 512, 3, 1),
    (4, 512, 512, 3, 2),
    (4, 256, 256, 3, 1),
    (4, 256, 256, 5, 1),
    (2, 2048, 512, 1, 1),
    (4, 1024, 512, 1, 2),
    (8, 128, 512, 1, 1),
    (16, 64, 256, 1, 1),
    (16, 256, 512, 1, 2),
    (32, 16, 64, 1, 1),
)
SLOWER = ((8, 128, 128, 3, 1), (16, 64, 64, 3, 1), (32, 32, 32, 3, 1))  # what no rule fits
DEPTHWISE = ((32, 32, 3, 1), (32, 96, 3, 2), (16, 144, 3, 1), (8, 192, 3, 1), (4, 384, 5, 1), (2, 960, 3, 1))
POOLS = ((32, 64, 3, 2, "SAME"), (33, 64, 3, 2, "VALID"), (32, 64, 2, 2, "VALID"), (8, 256, 2, 2, "VALID"))
PRODUCTS = ((64, 128, 512), (128, 256, 256), (32, 768, 768))


def measure(flags: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each operation, and for each of its gradients."""
    few = 1 if flags.quick else None
    for pixels, features, results, kernel, strides in (*CONVOLUTIONS[:few], *(SLOWER if flags.all_shapes else ())):
        name = f"conv {kernel}x{kernel}/{strides} of {pixels}x{pixels}x{features} to {results}"
        image, weights = (flags.batch, pixels, pixels, features), (kernel, kernel, features, results)
        op = functools.partial(tf.nn.conv2d, strides=strides, padding="SAME")
        yield from _rows(flags, name, op, image, weights)
    for pixels, features, kernel, strides in DEPTHWISE[:few]:
        name = f"depthwise {kernel}x{kernel}/{strides} of {pixels}x{pixels}x{features}"
        image, weights = (flags.batch, pixels, pixels, features), (kernel, kernel, features, 1)
        op = functools.partial(tf.nn.depthwise_conv2d, strides=[1, strides, strides, 1], padding="SAME")
        yield from _rows(flags, name, op, image, weights)
    for pixels, features, size, strides, padding in POOLS[:few]:
        name = f"max-pool {size}x{size}/{strides} {padding} of {pixels}x{pixels}x{features}"
        op = functools.partial(tf.nn.max_pool2d, ksize=size, strides=strides, padding=padding)
        yield from _rows(flags, name, op, (flags.batch, pixels, pixels, features))
    for rows, features, results in PRODUCTS[:few]:
        name = f"product {rows}x{features} @ {features}x{results}"
        yield from _rows(flags, name, tf.matmul, (flags.batch, rows, features), (features, results))


def _rows(flags: argparse.Namespace, name: str, op: Callable[..., Any], *shapes: tuple[int, ...]) -> Iterator[Row]:
    """Rows for an operation and for the gradient of each operand; without those that no rule fits."""
    random = np.random.default_rng(1)
    operands = [tf.Variable(random.standard_normal(shape, np.float32)) for shape in shapes]
    after = tf.Variable(random.standard_normal(op(*operands).shape, np.float32))

    def gradient(index: int) -> Any:
        with tf.GradientTape() as tape:
            made = op(*operands)
        return tape.gradient(made, operands[index], after)

    bodies = {"": lambda: op(*operands)}
    for index, of in enumerate(("x", "w")[: len(operands)]):
        bodies[f", gradient of {of}"] = functools.partial(gradient, index)
    for what, body in bodies.items():
        if row := _row(flags, name + what, body):
            yield row


def _row(flags: argparse.Namespace, name: str, body: Callable[[], Any]) -> Row | None:
    lowered = xla.lower(lambda: body(), num_replicas=1)
    rule = (lambda each: True) if flags.all_shapes else convolutions.is_slow
    with mock.patch.object(convolutions, "is_slow", rule):
        if not rewrites.rewrite(expand_markers(lowered.as_text(), "cpu")):
            return None
        programs = {}
        for who in (REWRITTEN, PLAIN):
            xla.set_cpu_rewrites(who == REWRITTEN)
            programs[who] = lowered.compile()
    sums = {who: float(np.abs(program()[0].numpy()).sum()) for who, program in programs.items()}
    check = same("sum of the absolute values", sums, 1e-4)
    figures = interleaved(programs, flags.repeats, lambda program: _processor(program, flags.launches))
    return Row("cpu_rewrites", name, figures, replicas=1, check=check, note="processor time")


def _processor(program: Callable[[], Any], times: int) -> float:
    """Milliseconds of processor time for a call."""
    begin = time.process_time()
    for _ in range(times):
        program()
    return (time.process_time() - begin) / times * 1e3


if __name__ == "__main__":
    command.main(
        __doc__,
        measure,
        command.Option("batch", "16", "2", "samples in a batch"),
        command.Option("launches", "5", "1", "launches per repeat"),
        command.Option("all_shapes", "0", "0", "1: convolutions that no rule fits too", command.switch),
    )
