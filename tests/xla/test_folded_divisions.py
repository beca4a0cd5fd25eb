"""Divisions of integers that are known before a program runs; none is by 0, which ends the process in old jaxlib."""

import re

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.pjrt.jaxlib import ir, program_context
from replica_engine.pjrt.stablehlo import mlir

DIVIDED = """
module {
  func.func private @half(%n: tensor<i32>) -> tensor<i32> {
    %two = stablehlo.constant dense<2> : tensor<i32>
    %q = stablehlo.divide %n, %two : tensor<i32>
    return %q : tensor<i32>
  }
  func.func @main(%x: tensor<i32>, %f: tensor<f32>) -> (tensor<i32>, tensor<i32>, tensor<i32>, tensor<f32>) {
    %a = stablehlo.constant dense<7> : tensor<i32>
    %b = stablehlo.add %a, %a : tensor<i32>
    %known = stablehlo.remainder %b, %a : tensor<i32>
    %called = func.call @half(%b) : (tensor<i32>) -> tensor<i32>
    %y = stablehlo.multiply %x, %a : tensor<i32>
    %of_argument = stablehlo.divide %y, %a : tensor<i32>
    %g = stablehlo.constant dense<7.0> : tensor<f32>
    %of_floats = stablehlo.divide %g, %g : tensor<f32>
    return %known, %called, %of_argument, %of_floats : tensor<i32>, tensor<i32>, tensor<i32>, tensor<f32>
  }
}
"""


@pytest.mark.parametrize(("folds", "kept"), [(False, {"remainder i32": True, "divide i32": True}), (True, {})])
def test_only_divisions_of_known_integers_wait_for_the_run(monkeypatch, folds, kept):
    monkeypatch.setattr(mlir, "FOLDS_DIVISIONS", folds)
    with program_context():
        module = ir.Module.parse(DIVIDED)
        mlir.keep(module)
        assert module.operation.verify()
        text = str(module)
    barriers = re.findall(r"(%\S+) = stablehlo.optimization_barrier", text)
    divided = re.findall(r"stablehlo.(divide|remainder) %\S+, (%\S+) : tensor<(\w+)>", text)
    assert len(divided) == 4
    assert {f"{name} {kind}": True for name, divisor, kind in divided if divisor in barriers} == kept
    assert len(barriers) == len(kept)


def test_they_give_what_they_give_at_once():
    def body(x):
        known = tf.fill([3], 7) + tf.range(3)
        return x + known // tf.constant([2, -2, 3]), tf.math.floormod(known, -4), -known // tf.constant(2)

    zeros = tf.zeros([3], tf.int32)
    for results in xla.replicate(body, [[zeros], [zeros]]):
        for found, expected in zip(results, body(zeros), strict=True):
            np.testing.assert_array_equal(found, expected)
