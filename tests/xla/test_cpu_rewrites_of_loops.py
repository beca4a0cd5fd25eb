"""Loops that keep a variable once a step: on CPU the gradient's loop gets the variable itself."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.pjrt import rewrites as cpu_rewrites
from replica_engine.pjrt.stablehlo.markers import expand_markers

WHILE = "stablehlo.while"
STEPS = 5


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(cpu_rewrites, "_failed", set())


def rewrites(step, steps=STEPS):
    """Trains both forms of a loop of `tanh(step(h, w))`, compares them, and returns how many arrays were rewritten."""
    random = np.random.default_rng(3)
    w = tf.Variable(random.standard_normal((4, 4)).astype(np.float32) / 2)

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, h = tf.while_loop(
                lambda i, h: i < steps, lambda i, h: (i + 1, tf.tanh(step(i, h, w))), (0, x), maximum_iterations=STEPS
            )
            loss = tf.reduce_sum(h * tf.reshape(tf.range(12.0), [3, 4]))
        return [loss, *tape.gradient(loss, [x, w])]

    inputs = [[tf.constant(random.standard_normal((3, 4)).astype(np.float32))]]
    lowered = xla.lower(body, inputs)
    results = []
    for enabled in (False, True):
        xla.set_cpu_rewrites(enabled)
        results.append(lowered.compile()(inputs)[0])
    for plain, found in zip(*results, strict=True):
        assert np.abs(plain).max() > 0
        np.testing.assert_allclose(found, plain, rtol=1e-6)
    assert not cpu_rewrites._failed
    return cpu_rewrites.rewrite(expand_markers(lowered.as_text(), "cpu"))


KEPT_OR_NOT = {
    "a variable is not kept": (lambda i, h, w: tf.matmul(h, w), STEPS, {WHILE: 1}),
    "what changes in the loop is kept": (lambda i, h, w: h * h + w[0], STEPS, {}),
    "a loop that may end before the last row": (lambda i, h, w: tf.matmul(h, w), STEPS - 2, {}),
}
for dtype in (tf.bfloat16, tf.float64):  # as in a step with mixed_bfloat16, and in one with float64
    KEPT_OR_NOT[f"a variable in {dtype.name} is not kept"] = (
        lambda i, h, w, dtype=dtype: tf.cast(tf.matmul(tf.cast(h, dtype), tf.cast(w, dtype)), tf.float32),
        STEPS,
        {WHILE: 1},
    )


@pytest.mark.parametrize("name", KEPT_OR_NOT)
def test_what_is_kept(name):
    step, steps, expected = KEPT_OR_NOT[name]
    assert rewrites(step, steps) == expected


def test_an_lstm_of_keras():
    keras = pytest.importorskip("keras")
    layer = keras.layers.LSTM(6, use_cudnn=False)
    x = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    layer.build(x.shape)

    def body(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) ** 2)
        return [loss, *tape.gradient(loss, [each.value for each in layer.trainable_variables])]

    lowered = xla.lower(body, [[x]])
    results = []
    for enabled in (False, True):
        xla.set_cpu_rewrites(enabled)
        results.append(lowered.compile()([[x]])[0])
    for plain, found in zip(*results, strict=True):
        np.testing.assert_allclose(found, plain, rtol=1e-6)
    assert cpu_rewrites.rewrite(expand_markers(lowered.as_text(), "cpu"))[WHILE] == 2
    assert cpu_rewrites.rewrite(expand_markers(lowered.as_text(), "tpu"), "tpu") == {WHILE: 2}


PROGRAM = """
func.func @main(%w: tensor<3xf32>, %x: tensor<3xf32>) -> (tensor<3xf32>, tensor<{results}xf32>) {{
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %start = stablehlo.constant dense<{start}> : tensor<i32>
  %zeros = stablehlo.constant dense<0.0> : tensor<4x3xf32>
  %one = stablehlo.constant dense<{by}> : tensor<i32>
  %limit = stablehlo.constant dense<{limit}> : tensor<i32>
  %kept:3 = stablehlo.while(%i = %start, %a = %zeros, %v = %w) : tensor<i32>, tensor<4x3xf32>, tensor<3xf32>
  cond {{
    %go = stablehlo.compare LT, %i, %limit : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %go : tensor<i1>
  }} do {{
    %step = stablehlo.constant dense<{by}> : tensor<i32>
    %origin = stablehlo.constant dense<{column}> : tensor<i32>
    %row = stablehlo.reshape %v : (tensor<3xf32>) -> tensor<1x3xf32>
    %b = stablehlo.dynamic_update_slice %a, %row, %i, %origin : (tensor<4x3xf32>, tensor<1x3xf32>, tensor<i32>, tensor<i32>) -> tensor<4x3xf32>
    %j = stablehlo.add %i, %step : tensor<i32>
    %u = stablehlo.{change} %v, %v : tensor<3xf32>
    stablehlo.return %j, %b, %{next} : tensor<i32>, tensor<4x3xf32>, tensor<3xf32>
  }}
  %read:3 = stablehlo.while(%i = %zero, %a = %kept#1, %s = %x) : tensor<i32>, tensor<4x3xf32>, tensor<3xf32>
  cond {{
    %go = stablehlo.compare LT, %i, %limit : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %go : tensor<i1>
  }} do {{
    %step = stablehlo.constant dense<1> : tensor<i32>
    %origin = stablehlo.constant dense<0> : tensor<i32>
    %row = stablehlo.dynamic_slice %a, %i, %origin, sizes = [1, 3] : (tensor<4x3xf32>, tensor<i32>, tensor<i32>) -> tensor<1x3xf32>
    %flat = stablehlo.reshape %row : (tensor<1x3xf32>) -> tensor<3xf32>
    %t = stablehlo.add %s, %flat : tensor<3xf32>
    %j = stablehlo.add %i, %step : tensor<i32>
    stablehlo.return %j, %a, %t : tensor<i32>, tensor<4x3xf32>, tensor<3xf32>
  }}
  return %read#2, %{result} : tensor<3xf32>, tensor<{results}xf32>
}}
"""  # noqa: E501
FITS = {
    "start": 0, "by": 1, "limit": 4, "column": 0, "change": "add", "next": "v", "result": "read#2", "results": "3",
}  # fmt: skip
UNFIT = {
    "begins at a later row": {"start": 1},
    "leaves rows out": {"by": 2},
    "ends before the last row": {"limit": 3},
    "changes the value": {"next": "u"},
    "another reader": {"result": "kept#1", "results": "4x3"},
    "rows begin elsewhere": {"column": 1},
}


def arrays(**changes):
    return cpu_rewrites.rewrite(expand_markers(PROGRAM.format(**(FITS | changes)), "cpu")).get(WHILE, 0)


def test_the_program_fits():
    assert arrays() == 1
    assert arrays(limit=6) == 1


@pytest.mark.parametrize("changes", UNFIT.values(), ids=UNFIT)
def test_a_program_that_differs_stays_as_it_is(changes):
    assert arrays(**changes) == 0


def test_a_rule_that_fails_leaves_the_program(monkeypatch):
    def failing(*_):
        raise IndexError("a loop that the rule did not think of")

    monkeypatch.setattr(cpu_rewrites.filled_loops, "_steps", failing)
    assert arrays() == 0
    assert cpu_rewrites._failed == {WHILE}
