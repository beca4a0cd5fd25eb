"""Collectives of values whose size is not known while the body is traced."""

import re

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import CollectiveError, LoweringError
from replica_engine.upstream.graphs import xla_ops

INTEGERS = [tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64]
DTYPES = [tf.bool, *INTEGERS, tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128]


def run_with_any_size(fn, size=2):
    """`fn` on replicas, in a function that is traced once for all sizes of its argument: replica i has (i + 1) * x."""

    body = lambda x: fn(x * tf.cast(xla.replica_id() + 1, x.dtype))  # noqa: E731

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32)])
    def step(x):
        return xla.replicate(body, [[x]] * size)

    return step


def test_values_of_all_dtypes_are_gathered():
    gather = lambda x: {dtype.name: xla.all_gather(tf.cast(x, dtype)) for dtype in DTYPES}  # noqa: E731
    for rows in (0, 3):
        x = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        for found in run_with_any_size(gather)(x):
            for dtype in DTYPES:
                expected = tf.cast(np.concatenate([x, 2.0 * x]), dtype)
                np.testing.assert_array_equal(found[dtype.name].numpy(), expected.numpy())


def test_nothing_is_lost_of_unusual_numbers():
    def gather(x):
        odd = tf.constant([[float("nan"), -0.0]]) + 0.0 * x[:1] * float("inf") * 0.0
        return xla.all_gather(tf.where(tf.math.is_nan(odd) & (tf.range(2) == 1), -0.0, odd))

    for found in run_with_any_size(gather)(tf.ones([1, 2])):
        assert np.isnan(found[:, 0]).all()
        assert np.signbit(found[:, 1]).all()


def test_groups_and_gradients():
    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = xla.all_gather(x, axis=0, groups=[[0, 2], [3, 1]])
            loss = tf.reduce_sum(gathered**2)
        return gathered, tape.gradient(loss, x)

    x = np.float32([[1.0, 2.0]])
    own = [(replica + 1) * x for replica in range(4)]
    for replica, (gathered, gradient) in enumerate(run_with_any_size(fn, 4)(x)):
        group = (0, 2) if replica in (0, 2) else (3, 1)
        np.testing.assert_array_equal(gathered, np.concatenate([own[each] for each in group]))
        np.testing.assert_allclose(gradient, 2 * 2.0 * own[replica])  # of the objectives of both in the group


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX"])
def test_reductions_of_what_xlas_own_op_does_not_take(op):
    expected = {"SUM": 3.0, "MEAN": 1.5, "MIN": 1.0, "MAX": 2.0}[op]
    for result in run_with_any_size(lambda x: xla.all_reduce(tf.cast(x, tf.float64), op))(tf.ones([3, 2])):
        assert result.numpy().tolist() == [[expected] * 2] * 3


def test_other_operations_say_which_argument_it_is(two):
    def swap(pixels):
        return xla.all_to_all(2.0 * pixels, 0, 0)

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        return two.run(swap, args=(x,))

    with pytest.raises(CollectiveError) as caught:
        step(tf.ones([2, 2]))
    text = str(caught.value)
    assert text.startswith(f"all_to_all at {__file__}:{swap.__code__.co_firstlineno + 1} in swap needs a shape")
    assert "(None, 2), which comes from the argument `pixels` of `swap`" in text


def test_a_size_that_depends_on_data_is_refused_when_the_body_is_lowered():
    def fn(x):
        return tf.reduce_sum(xla.all_reduce(tf.boolean_mask(x, x > 1.0)))

    with pytest.raises(CollectiveError, match=r"all_reduce at .* in fn needs .* \(None,\), which depends on data"):
        xla.replicate(fn, [[tf.range(4.0)]] * 2)
    with pytest.raises(CollectiveError, match=r"all_gather at .* needs .* \(None,\), which depends on data"):
        run_with_any_size(lambda x: tf.reduce_sum(xla.all_gather(tf.boolean_mask(x, x > 1.0))))(tf.ones([3, 2]))


RESHAPES = {
    "a column": lambda kept: tf.reshape(kept, [-1, 1]),
    "a row": lambda kept: tf.reshape(kept, [1, tf.size(kept)]),
    "its own size": lambda kept: tf.reshape(kept, [tf.size(kept), 1]),
    "twice": lambda kept: tf.reshape(tf.reshape(kept, [-1, 1]), [1, -1]),
}


@pytest.mark.parametrize("reshape", RESHAPES.values(), ids=RESHAPES)
@pytest.mark.parametrize("where", ["plain", "in a branch", "in a loop"])
def test_values_that_a_mask_leaves_are_reshaped(reshape, where):
    def fn(x):
        def value():
            kept = reshape(tf.boolean_mask(x, x > 1.0))
            return tf.reduce_sum(kept * kept) + 10.0 * tf.cast(tf.size(kept), tf.float32)

        if where == "in a branch":
            return tf.cond(x[0] < 5.0, value, lambda: 0.0)
        if where == "in a loop":
            return tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total + value()), [0, 0.0])[1]
        return value()

    shards = [[tf.constant([0.0, 2.0, 3.0, 1.0])], [tf.constant([4.0, 2.0, 3.0, 5.0])]]
    assert [float(each) for each in xla.replicate(fn, shards)] == [float(fn(*each)) for each in shards]


@pytest.mark.parametrize("sizes", [lambda count: [count, -1], lambda count: [-1, count], lambda count: [count, 1]])
def test_a_fixed_number_of_values_has_no_size_that_depends_on_data(sizes):
    def fn(x):
        count = tf.size(tf.where(x > 1.0)[:, 0])
        return tf.reduce_sum(tf.reshape(x, sizes(count)), 0)

    with pytest.raises(
        LoweringError, match=r"a shape or an axis of Reshape depends on data at .*test_unknown_sizes.py:"
    ):
        xla.replicate(fn, [[tf.range(4.0)]] * 2)
    with pytest.raises(LoweringError, match=r"a shape or an axis of Reshape depends on data at "):
        run_with_any_size(lambda x: fn(tf.reshape(x, [6])))(tf.ones([3, 2]))


UNREADABLE = {
    "without a form in StableHLO": (
        r'"mhlo.unknown"(\1) : (tensor<4xf32>) -> tensor<4xf32>',
        "`fn` uses Sin at {}, which XLA cannot compile. Run it on the host",
    ),
    "of a newer StableHLO": (r"stablehlo.no_such_operation \1 : tensor<4xf32>", "XLA cannot compile `fn` at {}: "),
}


@pytest.mark.parametrize(("operation", "words"), UNREADABLE.values(), ids=UNREADABLE)
def test_an_operation_that_cannot_be_read_is_named_with_its_line(operation, words, monkeypatch):
    lowered = xla_ops.stablehlo

    def fn(x):
        return tf.reduce_sum(tf.sin(x))

    def other(*args):
        text, count = re.subn(r"stablehlo.sine (%\w+) : tensor<4xf32>", operation, lowered(*args))
        assert count == 1
        return text

    monkeypatch.setattr(xla_ops, "stablehlo", other)
    where = f"{__file__}:{fn.__code__.co_firstlineno + 1} in fn"
    with pytest.raises(LoweringError, match=re.escape(words.format(where))):
        xla.replicate(fn, [[tf.range(4.0)]] * 2)
