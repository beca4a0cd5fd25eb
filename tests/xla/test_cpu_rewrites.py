"""Operations that XLA:CPU runs slowly, written another way: the same values and gradients."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.pjrt import rewrites as cpu_rewrites
from replica_engine.pjrt.jaxlib import ir
from replica_engine.pjrt.rewrites import convolutions
from replica_engine.pjrt.stablehlo import mlir
from replica_engine.pjrt.stablehlo.markers import expand_markers

CONVOLUTION, POOLING, PRODUCT = "stablehlo.convolution", "stablehlo.select_and_scatter", "stablehlo.reduce"

RANDOM = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    monkeypatch.setattr(cpu_rewrites, "_failed", set())


def random(*shape, dtype=np.float32):
    return RANDOM.standard_normal(shape).astype(dtype)


def with_gradients(op):
    """What an op makes of its operands, and the gradients of a sum of it in which each element counts differently."""

    def body(*operands):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            made = op(*operands)
            weights = tf.reshape(tf.cos(tf.range(tf.size(made), dtype=made.dtype)), made.shape)
            loss = tf.reduce_sum(made * weights)
        return [made, *tape.gradient(loss, operands)]

    return body


def rewrites(op, *operands):
    """Compares both forms, and returns how many operations of each kind were rewritten."""
    lowered = xla.lower(with_gradients(op), [list(map(tf.constant, operands))])
    inputs = [list(map(tf.constant, operands))]
    xla.set_cpu_rewrites(False)
    plain = lowered.compile()(inputs)[0]
    xla.set_cpu_rewrites(True)
    found = lowered.compile()(inputs)[0]
    for one, other in zip(found, plain, strict=True):
        tolerance = 2e-5 * max(1.0, float(tf.reduce_max(tf.abs(other))))
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=tolerance)
    return cpu_rewrites.rewrite(expand_markers(lowered.as_text(), "cpu"))


# The shapes of an input and a kernel, strides, padding and dilation.
CONVOLUTIONS = {
    "kernel larger than the image": ((4, 2, 2, 6), (3, 3, 6, 5), 1, "SAME", 1),
    "to fewer pixels": ((4, 4, 4, 6), (3, 3, 6, 5), 2, "SAME", 1),
    "image of one pixel": ((4, 1, 1, 6), (3, 3, 6, 5), 1, "SAME", 1),
    "image that is not square": ((4, 1, 5, 6), (3, 2, 6, 5), 1, "SAME", 1),
    "kernel of one pixel": ((4, 5, 6, 3), (1, 1, 3, 7), 1, "SAME", 1),
    "kernel of one pixel, strided": ((4, 5, 6, 3), (1, 1, 3, 7), 2, "VALID", 1),
    "kernel of one pixel, strided and padded": ((4, 5, 6, 3), (1, 1, 3, 7), 2, [[0, 0], [1, 2], [0, 1], [0, 0]], 1),
    "kernel of the image's size": ((4, 3, 3, 6), (3, 3, 6, 5), 1, "VALID", 1),
    "dilated kernel": ((4, 2, 2, 6), (3, 3, 6, 5), 1, "SAME", 2),
    "paddings that differ": ((4, 2, 2, 6), (3, 3, 6, 5), 1, [[0, 0], [2, 1], [1, 3], [0, 0]], 1),
    "strides that differ": ((4, 2, 2, 6), (3, 3, 6, 5), [1, 1, 2, 1], "SAME", 1),
}


def conv2d(*options, **more):
    return lambda x, w: tf.nn.conv2d(x, w, *options, **more)


SOME = {CONVOLUTION: ...}
SMALL, KERNEL, PIXEL = (4, 2, 2, 6), (3, 3, 6, 5), (1, 1, 6, 5)
max_pool2d = lambda *options: lambda x: tf.nn.max_pool2d(x, *options)  # noqa: E731

# An operation, the shapes of its operands, and what is rewritten of it and of its gradients.
COUNTS = {
    "the forward and the gradient of the image": (conv2d(1, "SAME"), [SMALL, KERNEL], {CONVOLUTION: 2}),
    "all of a kernel of one pixel": (conv2d(1, "SAME"), [(4, 5, 5, 6), PIXEL], {CONVOLUTION: 3}),
    "the gradients of a strided kernel of one pixel": (conv2d(2, "SAME"), [(4, 5, 5, 6), PIXEL], {CONVOLUTION: 2}),
    "no large images": (conv2d(1, "SAME"), [(2, 8, 8, 3), (3, 3, 3, 4)], {}),
    "no empty batch": (conv2d(1, "SAME"), [(0, 2, 2, 2), (3, 3, 2, 2)], {}),
    "no pools of an empty batch": (max_pool2d(2, 2, "VALID"), [(0, 8, 8, 4)], {}),
    "no products of an empty batch": (tf.matmul, [(0, 7, 6), (6, 5)], {}),
    "one dimension": (lambda x, w: tf.nn.conv1d(x, w, 1, "SAME"), [(4, 2, 6), (3, 6, 5)], SOME),
    "three dimensions": (lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), [(2, 2, 2, 2, 3), (3, 3, 3, 3, 4)], SOME),
    "transposed": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, [4, 4, 4, 6], 2, "SAME"),
        [(4, 2, 2, 5), (3, 3, 6, 5)],
        SOME,
    ),
    "channels first": (conv2d(1, "SAME", data_format="NCHW"), [(4, 6, 2, 2), KERNEL], SOME),
    "channels first, of one pixel": (conv2d(1, "SAME", data_format="NCHW"), [(4, 6, 5, 5), PIXEL], {CONVOLUTION: 3}),
    "no groups of several channels": (conv2d(1, "SAME"), [(3, 2, 2, 8), (3, 3, 4, 6)], {}),
    "pools of one dimension": (lambda x: tf.nn.max_pool1d(x, 2, 2, "VALID"), [(3, 8, 4)], {POOLING: 1}),
    "no large windows": (max_pool2d(8, 8, "VALID"), [(1, 16, 16, 2)], {}),
    "no windows that overlap much": (max_pool2d(3, 1, "SAME"), [(1, 5, 5, 2)], {}),
    "the gradient of a matrix": (tf.matmul, [(4, 7, 6), (6, 5)], {PRODUCT: 1}),
    "the gradient of a matrix, of four dimensions": (tf.matmul, [(2, 4, 7, 6), (6, 5)], {PRODUCT: 1}),
    "no sum over rows": (lambda x, y: tf.reduce_sum(tf.matmul(x, y), 1), [(4, 7, 6), (4, 6, 5)], {}),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_rewritten(name):
    op, shapes, expected = COUNTS[name]
    found = rewrites(op, *(random(*shape) for shape in shapes))
    assert found[CONVOLUTION] > 0 if expected is SOME else found == expected


class TestConvolutions:
    @pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
    def test_values_and_gradients_are_equal(self, case):
        image, kernel, strides, padding, dilation = case
        op = conv2d(strides, padding, dilations=dilation)
        assert rewrites(op, random(*image), random(*kernel))[CONVOLUTION] > 0

    def test_double_precision(self):
        operands = [random(*shape, dtype=np.float64) for shape in (SMALL, KERNEL)]
        assert rewrites(conv2d(1, "SAME"), *operands) == {CONVOLUTION: 2}

    def test_half_precision_stays_as_it_is(self):
        for op, *operands in (
            (conv2d(1, "SAME"), random(2, 2, 2, 2), random(3, 3, 2, 2)),
            (max_pool2d(2, 2, "VALID"), random(3, 8, 8, 4)),
            (tf.matmul, random(4, 7, 6), random(6, 5)),
        ):
            half = lambda *args, op=op: tf.cast(op(*(tf.cast(each, tf.bfloat16) for each in args)), tf.float32)  # noqa: E731
            assert rewrites(op, *operands) != {} == rewrites(half, *operands)

    @pytest.mark.parametrize(("strides", "dilation"), [(1, 1), (2, 1), (1, 2)])  # TensorFlow refuses (2, 2)
    @pytest.mark.parametrize("padding", ["SAME", "VALID"])
    def test_depthwise(self, strides, padding, dilation):
        op = lambda x, w: tf.nn.depthwise_conv2d(  # noqa: E731
            x, w, [1, strides, strides, 1], padding, dilations=[dilation] * 2
        )
        assert rewrites(op, random(3, 7, 6, 4), random(3, 3, 4, 1))[CONVOLUTION] >= 2

    def test_depthwise_with_several_results_for_each_channel(self):
        rewrites(lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), random(3, 5, 5, 4), random(3, 3, 4, 2))


# What a program needs beside its arguments.
MEMORY = {
    # The first transposed convolution of a DCGAN: patches would be 25 times as large as the dilated image.
    "patches that would be much larger than the image": (
        lambda x, w: tf.nn.conv2d_transpose(x, w, [128, 8, 8, 256], 2, "SAME"),
        (128, 4, 4, 512),
        (5, 5, 256, 512),
    ),
    "patches of many images": (conv2d(1, "SAME"), (64, 6, 6, 128), (7, 7, 128, 32)),
    "a depthwise input that is mostly padding": (
        lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 512, 512, 1], [[0, 0], [700, 700], [700, 700], [0, 0]]),
        (2, 9, 9, 8),
        (3, 3, 8, 1),
    ),
    "the last stage of ResNet": (conv2d(1, "SAME"), (16, 2, 2, 512), (3, 3, 512, 512)),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory(name):
    op, *shapes = MEMORY[name]
    lowered = xla.lower(op, [[np.zeros(shape, np.float32) for shape in shapes]])
    needed = []
    for enabled in (True, False):
        xla.set_cpu_rewrites(enabled)
        needed.append(lowered.compile().executable.bytes_needed)
    rewritten, plain = needed
    assert (rewritten != plain) == (name == "the last stage of ResNet")
    assert rewritten <= plain + convolutions.MOST_BYTES


class TestPooling:
    @pytest.mark.parametrize(
        ("size", "strides", "padding"),
        [(2, 2, "VALID"), (3, 2, "VALID"), (3, 2, "SAME"), (2, 3, "VALID"), ((1, 3), (2, 1), "SAME")],
    )
    def test_the_gradient_is_equal(self, size, strides, padding):
        assert rewrites(max_pool2d(size, strides, padding), random(3, 8, 7, 4)) == {POOLING: 1}

    @pytest.mark.parametrize("value", [0.0, -np.inf, np.inf, np.nan])
    def test_equal_elements_in_a_window(self, value):
        """The first of them gets the gradient, and never the padding."""
        image = random(2, 5, 5, 3)
        image[0] = value
        image[1, :3, :3] = value

        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                pooled = tf.nn.max_pool2d(x, 3, 2, "SAME")
            return tape.gradient(pooled, x, tf.reshape(tf.range(1.0, 55.0), [2, 3, 3, 3]))

        lowered = xla.lower(gradient, [[image]])
        xla.set_cpu_rewrites(False)
        plain = lowered.compile()([[image]])[0]
        xla.set_cpu_rewrites(True)
        found = lowered.compile()([[image]])[0]
        if np.isnan(value):  # another element of the window may be chosen, but never the padding
            assert float(tf.reduce_sum(found)) == float(tf.reduce_sum(plain)) == sum(range(1, 55))
        else:
            np.testing.assert_allclose(found, plain, rtol=1e-6)


class TestProducts:
    def test_a_product_that_is_used_elsewhere_too_stays_as_it_is(self):
        def both(x, y):
            made = tf.matmul(x, y)
            return tf.reduce_sum(made, 0) * tf.reduce_max(made)

        assert PRODUCT not in rewrites(both, random(4, 7, 6), random(4, 6, 5))

    def test_sums_of_other_dtypes_stay_as_they_are(self):
        def body(x):
            return tf.reduce_sum(tf.cast(x, tf.int32)), tf.reduce_any(x > 0), tf.reduce_sum(tf.cast(x, tf.bfloat16))

        lowered = xla.lower(body, [[random(3, 4)]])
        assert cpu_rewrites.rewrite(expand_markers(lowered.as_text(), "cpu")) == {}

    @pytest.mark.parametrize(
        "dtype",
        ["complex64", "complex128", "float16", "bfloat16", "float32", "float64", "int8", "uint8", "int64", "uint64"],
    )
    def test_sums_of_each_dtype(self, dtype):
        ones = tf.cast(tf.ones([2, 3]), dtype)
        made = xla.replicate(lambda x: (tf.reduce_sum(x), tf.reduce_prod(x)), [[ones], [ones]])
        assert [[complex(each) for each in replica] for replica in made] == [[6, 1]] * 2
        assert not cpu_rewrites._failed


class TestRulesThatFail:
    def test_the_operation_stays_as_it_is(self, monkeypatch, caplog):
        """After the rule has made a sum without an end, which would be no program."""

        def failing(operation):
            number = mlir.element_type(operation.lhs)
            half = ir.Operation.create(
                "stablehlo.reduce",
                results=[ir.RankedTensorType.get([], number)],
                operands=[mlir.pad(operation.lhs, [1] * 4, [0] * 4), mlir.scalar(0.0, number)],
                regions=1,
            )
            half.regions[0].blocks.append()
            raise IndexError("a shape that no rule thought of")

        monkeypatch.setitem(cpu_rewrites._RULES["cpu"], CONVOLUTION, failing)
        assert rewrites(conv2d(1, "SAME"), random(2, 2, 2, 3), random(3, 3, 3, 4)) == {}
        assert caplog.text.count("IndexError: a shape that no rule thought of") == 1

    def test_a_value_of_another_shape_is_not_taken(self, monkeypatch):
        monkeypatch.setitem(cpu_rewrites._RULES["cpu"], CONVOLUTION, lambda operation: operation.lhs)
        assert rewrites(conv2d(1, "SAME"), random(2, 2, 2, 3), random(3, 3, 3, 4)) == {}
        assert cpu_rewrites._failed == {CONVOLUTION}


class TestSwitch:
    def test_the_environment_turns_them_off(self, monkeypatch):
        assert cpu_rewrites.enabled()
        monkeypatch.setenv("REPLICA_ENGINE_CPU_REWRITES", "0")
        assert not cpu_rewrites.enabled()
        xla.set_cpu_rewrites(True)  # wins
        assert cpu_rewrites.enabled()

    def test_no_program_is_rewritten_without_them(self, monkeypatch):
        calls = collections.Counter()
        plain = cpu_rewrites.rewrite
        monkeypatch.setattr(cpu_rewrites, "rewrite", lambda module, platform: calls.update(n=1) or plain(module))
        body = lambda x: tf.nn.conv2d(x, tf.ones([3, 3, 2, 2]), 1, "SAME")  # noqa: E731
        inputs = [[random(1, 2, 2, 2)]]
        xla.set_cpu_rewrites(False)
        xla.lower(body, inputs).compile()
        assert not calls
        xla.set_cpu_rewrites(True)
        xla.lower(body, inputs).compile()
        assert calls["n"] == 1
