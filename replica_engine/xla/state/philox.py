"""Random numbers as TensorFlow's kernels draw them: from Philox' integers, by TensorFlow's own formulas.

XLA and TensorFlow draw the same integers for the same key and counter. XLA turns them into floats in another way, so
compiled code would draw other numbers than eager code. Here each stateless op of floats becomes Philox and the formula
of TensorFlow's kernel (`random_distributions.h` and `random_op_cpu.h` in its sources):

- uniform: the low bits of an integer are the mantissa of a number from 1 to 2; minus 1. A double takes two integers.
- normal: two numbers from two uniform ones (Box and Muller, 1958).
- truncated normal: each group of four results (two of doubles) has 256 (128) blocks of four integers for itself. It
  takes normal numbers from them until four lie within two standard deviations.

Uniform numbers are TensorFlow's bit for bit; the others to the last bits of a logarithm, a sine and a cosine. A uniform
number that is scaled to another range may differ in its last bit, since XLA:CPU multiplies and adds in one step.

XLA's own Philox would give the same integers. XLA:CPU computes its ten rounds again for each of its results, which
takes a second for a million numbers. The loop here takes some milliseconds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import xla_ops

_PHILOX, _AUTO_SELECT = 1, 3  # tf.random.Algorithm; "auto_select" is Philox on CPUs and GPUs
_ROUNDS, _MULTIPLIERS, _STEPS = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # Salmon et al., 2011
_KEY_OF_SEEDS = 0x02461E293EC8F720  # of the block that scrambles a seed
_MOST = 1 << 30  # results; for more, XLA's own numbers, since TensorFlow counts in 32 bits
_RESERVED = 256  # integers for each truncated number
_TRUNCATED = 2.0  # standard deviations
_SMALLEST = 1e-7  # of a uniform number whose logarithm is taken

# The integer that has the bits of a float, its bits of mantissa, and the bits of the number 1.
_FORMATS = {
    tf.float16: (tf.uint16, 10, 15),
    tf.bfloat16: (tf.uint16, 7, 127),
    tf.float32: (tf.uint32, 23, 127),
    tf.float64: (tf.uint64, 52, 1023),
}


def replacement(kind: str, inputs: Sequence[Any], attribute: Callable[[str], Any]) -> list[tf.Tensor] | None:
    """What TensorFlow computes for a stateless random op; None if XLA's own is right.

    Args:
        kind: the type of the op.
        inputs: its inputs: the shape, the key (uint64 [1]), the counter (uint64 [2]) and the algorithm.
        attribute: returns one of its attributes.
    """
    if kind == _KEY:
        return list(_key_and_counter(inputs[0]))
    if kind not in _DRAWS or tf.get_static_value(inputs[3]) not in (_PHILOX, _AUTO_SELECT):
        return None
    shape, key, counter, _ = inputs
    return [_drawn(kind, shape, key, counter, attribute("dtype"))]


def drawn(kind: str, shape: tf.Tensor, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What the stateless op of a type draws for a seed of two numbers."""
    return _drawn(kind, shape, *_key_and_counter(seed), dtype)


def _key_and_counter(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The key and the counter of a seed of two numbers. XLA's would take the low halves of the two only."""
    numbers = tf.cast(tf.cast(seed, tf.int64), tf.uint64)
    mixed = _function()(tf.constant([_KEY_OF_SEEDS], tf.uint64), numbers, tf.constant([0], tf.int64))
    low, high = tf.unstack(tf.cast(tf.reshape(mixed, [2, 2]), tf.uint64), num=2, axis=1)
    joined = tf.bitwise.bitwise_or(low, tf.bitwise.left_shift(high, tf.constant(32, tf.uint64)))
    return joined[:1], tf.concat([tf.zeros([1], tf.uint64), joined[1:]], 0)


def _drawn(kind: str, shape: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    size = tf.get_static_value(shape)
    count = tf.reduce_prod(shape) if size is None else math.prod(map(int, size))
    if size is not None and count > _MOST:
        return getattr(tf.raw_ops, kind)(shape=shape, key=key, counter=counter, alg=_PHILOX, dtype=dtype)
    return tf.cast(tf.reshape(_DRAWS[kind](count, key, counter, dtype), shape), dtype)


def _uniform(count: Any, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return _as_uniform(_integers(count, 2 if dtype == tf.float64 else 1, key, counter), dtype)


def _normal(count: Any, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    dtype = _computed_in(dtype)
    pairs = (count + 1) // 2
    integers = _integers(pairs, 4 if dtype == tf.float64 else 2, key, counter)
    return tf.reshape(tf.stack(_box_muller(integers, dtype), -1), [-1])[:count]


def _truncated_normal(count: Any, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    dtype = _computed_in(dtype)
    size = 2 if dtype == tf.float64 else 4
    groups = (count + size - 1) // size
    first = tf.range(tf.cast(groups, tf.int64)) * (size * _RESERVED // 4)

    def unfinished(_: tf.Tensor, taken: tf.Tensor, results: tf.Tensor) -> tf.Tensor:
        return tf.reduce_any(taken < size)

    def take(block: tf.Tensor, taken: tf.Tensor, results: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        integers = _function()(key, counter, first + block)
        pairs = _box_muller(tf.reshape(integers, [groups, size // 2, 8 // size]), dtype)
        for number in tf.unstack(tf.reshape(tf.stack(pairs, -1), [groups, size]), num=size, axis=1):
            accepted = tf.abs(number) < _TRUNCATED
            here = accepted[:, tf.newaxis] & (taken[:, tf.newaxis] == tf.range(size))
            results = tf.where(here, number[:, tf.newaxis], results)
            taken += tf.cast(accepted, tf.int32)
        return block + 1, taken, results

    start = (tf.constant(0, tf.int64), tf.zeros([groups], tf.int32), tf.zeros([groups, size], dtype))
    return tf.reshape(tf.while_loop(unfinished, take, start)[2], [-1])[:count]


def _computed_in(dtype: tf.DType) -> tf.DType:
    return tf.float64 if dtype == tf.float64 else tf.float32


def _integers(count: Any, each: int, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """The integers for `count` results: uint32 [count, each]."""
    blocks = (count * each + 3) // 4
    integers = _function()(key, counter, tf.range(tf.cast(blocks, tf.int64)))
    return tf.reshape(tf.reshape(integers, [-1])[: count * each], [count, each])


def _as_uniform(integers: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Uniform numbers from 0 to 1, without 1: [...] from uint32 [..., 1], or [..., 2] for doubles."""
    kind, bits, exponent = _FORMATS[dtype]
    if dtype == tf.float64:
        high, low = (tf.cast(each, kind) for each in tf.unstack(integers, num=2, axis=-1))
        numbers = tf.bitwise.bitwise_or(tf.bitwise.left_shift(high, tf.constant(32, kind)), low)
    else:
        numbers = tf.cast(integers[..., 0], kind)
    mantissa = tf.bitwise.bitwise_and(numbers, tf.constant((1 << bits) - 1, kind))
    one = tf.constant(exponent << bits, kind)
    number = tf.bitcast(tf.bitwise.bitwise_or(mantissa, one), dtype) - tf.ones([], dtype)
    # Of (x - 1) + minval, XLA would make x + (minval - 1), which rounds in another way.
    return tf.maximum(number, tf.zeros([], dtype))


def _box_muller(integers: tf.Tensor, dtype: tf.DType) -> tuple[tf.Tensor, tf.Tensor]:
    """Two normal numbers from two uniform ones: [...] each, from uint32 [..., 2], or [..., 4] for doubles."""
    one, other = (_as_uniform(each, dtype) for each in tf.split(integers, 2, axis=-1))
    # TensorFlow multiplies by 2 pi in double precision, for floats too.
    angle = tf.cast(tf.constant(2 * math.pi, tf.float64) * tf.cast(other, tf.float64), dtype)
    radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(one, tf.constant(_SMALLEST, dtype))))
    return tf.sin(angle) * radius, tf.cos(angle) * radius


@functools.cache
def _function() -> Any:
    """`_blocks` as a function that all graphs call, since to trace its loop takes longer than most layers do."""
    specs = [tf.TensorSpec([1], tf.uint64), tf.TensorSpec([2], tf.uint64), tf.TensorSpec([None], tf.int64)]
    with tf.init_scope(), xla_ops.xla_context():
        return tf.function(_blocks, autograph=False).get_concrete_function(*specs)


def _blocks(key: tf.Tensor, counter: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """The four integers of blocks, by their numbers after the counter: uint32 [n, 4] from int64 [n]."""
    after = tf.cast(numbers, tf.uint64)
    begin = counter[0] + after
    high = tf.broadcast_to(counter[1] + tf.cast(begin < after, tf.uint64), tf.shape(begin))
    low, high = _halves(tf.stack([begin, high]))
    keys = tf.stack(_halves(key[0]))
    multipliers = tf.constant(_MULTIPLIERS, tf.uint64)[:, tf.newaxis]
    steps = tf.constant(_STEPS, tf.uint32)

    def mixed(step: tf.Tensor, evens: tf.Tensor, odds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        low, high = _halves(tf.cast(evens, tf.uint64) * multipliers)
        mask = tf.bitwise.bitwise_xor(odds, (keys + steps * step)[:, tf.newaxis])
        return step + 1, tf.bitwise.bitwise_xor(tf.reverse(high, [0]), mask), tf.reverse(low, [0])

    # A loop, because XLA computes one long expression again for each of its results, and compiles it for seconds.
    rounds = tf.constant(_ROUNDS, tf.uint32)
    state = (tf.constant(0, tf.uint32), low, high)
    _, evens, odds = tf.while_loop(lambda step, *_: step < rounds, mixed, state)
    return tf.stack([evens[0], odds[0], evens[1], odds[1]], -1)


def _halves(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The low and the high half of 64-bit integers."""
    return tf.cast(value, tf.uint32), tf.cast(tf.bitwise.right_shift(value, tf.constant(32, tf.uint64)), tf.uint32)


UNIFORM, NORMAL, TRUNCATED_NORMAL = (
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessTruncatedNormalV2",
)
"""The types of the ops."""

_KEY = "StatelessRandomGetKeyCounter"

_DRAWS: dict[str, Callable[[Any, tf.Tensor, tf.Tensor, tf.DType], tf.Tensor]] = {
    UNIFORM: _uniform,
    NORMAL: _normal,
    TRUNCATED_NORMAL: _truncated_normal,
}
