"""Random numbers in a body: TensorFlow's own, with a stream for each replica.

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

Stateful random ops draw from a `RandomState`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.pjrt.device_group import Array, DeviceGroup
from replica_engine.process import interrupts
from replica_engine.upstream import eager
from replica_engine.upstream.graphs import function_graphs, graph_walk, xla_ops
from replica_engine.values import replica_weights
from replica_engine.xla.corrected_ops import Attribute
from replica_engine.xla.state.device_value import DeviceValue, find_device_value

Along = tuple[str, ...] | None
"""The axes along which a dimension is divided; None if each device has all of it."""

_PHILOX, _AUTO_SELECT = 1, 3  # tf.random.Algorithm; "auto_select" is Philox on CPUs and GPUs
_ROUNDS, _MULTIPLIERS, _STEPS = 10, (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # Salmon et al., 2011
_KEY_OF_SEEDS = 0x02461E293EC8F720  # of the block that scrambles a seed
_MOST = 1 << 30  # results; for more, XLA's own numbers, since TensorFlow counts in 32 bits
_RESERVED = 256  # integers for each truncated number
_TRUNCATED = 2.0  # standard deviations
_SMALLEST = 1e-7  # of a uniform number whose logarithm is taken
_GROUP = 4  # results that one block gives
_PIECE = 1 << 19  # results that all devices together draw at a time, in pieces
_MANY = 16  # pieces; with fewer, what it takes to draw one is much beside a device's part
_thread = threading.local()

# The integer that has the bits of a float, its bits of mantissa, and the bits of the number 1.
_FORMATS = {
    tf.float16: (tf.uint16, 10, 15),
    tf.bfloat16: (tf.uint16, 7, 127),
    tf.float32: (tf.uint32, 23, 127),
    tf.float64: (tf.uint64, 52, 1023),
}


def replacement(kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor] | None:
    """What TensorFlow computes for a stateless random op; None if XLA's own is right.

    Args:
        kind: the type of the op.
        inputs: its inputs: the shape, the key (uint64 [1]), the counter (uint64 [2]) and the algorithm.
        attribute: returns one of its attributes.
    """
    if kind == _KEY:
        return list(_key_and_counter(inputs[0]))
    if kind not in _OF_GROUPS or tf.get_static_value(inputs[3]) not in (_PHILOX, _AUTO_SELECT):
        return None
    shape, key, counter, _ = inputs
    return [_drawn(kind, shape, key, counter, attribute("dtype"))]


def drawn(kind: str, shape: tf.Tensor, seed: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """What the stateless op of a type draws for a seed of two numbers."""
    return _drawn(kind, shape, *_key_and_counter(seed), dtype)


class Pieces(NamedTuple):
    """A value that is drawn in pieces.

    Attributes:
        shape: its shape.
        parts: into how many parts each dimension is divided over devices.
        names: for each dimension, the axes of the mesh that divide it.
    """

    shape: tuple[int, ...]
    parts: tuple[int, ...]
    names: tuple[tuple[str, ...], ...]

    def can_draw(self, shape: Iterable[int] | None) -> bool:
        """Whether values of a shape (or None) can be drawn so: a device has each block whole or not at all."""
        if shape is None or self.shape != tuple(map(int, shape)):
            return False
        divides = all(size % count == 0 for size, count in zip(self.shape, self.parts, strict=True))
        return divides and self.split()[0][-1] % _GROUP == 0

    def split(self) -> tuple[list[int], list[Along]]:
        """The shape with each divided dimension as two, the devices and what each has, and the axes of its dimensions.

        Dimensions between those of devices are one: [before, devices, own] for one that is divided.
        """
        shape = [1]
        axes: list[Along] = [None]
        for size, count, by in zip(self.shape, self.parts, self.names, strict=True):
            if count > 1:
                shape += [count, 1]
                axes += [by, None]
            shape[-1] *= size // count
        return shape, axes


def in_pieces(pieces: Pieces) -> contextlib.AbstractContextManager[object]:
    """Inside, values of this shape are drawn in pieces.

    The loop that draws needs several times the memory of its results. So a large value that is divided over devices is
    drawn piece by piece: each device draws a piece of its part in each turn of a loop.
    """
    return interrupts.set_for_block(_thread, "pieces", pieces)


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
    pieces: Pieces | None = getattr(_thread, "pieces", None)
    if pieces is not None and pieces.can_draw(size) and dtype != tf.float64:
        return tf.cast(_piecewise(kind, pieces, key, counter, dtype), dtype)
    computed = _computed(kind, dtype)
    groups = tf.range(tf.cast((count + _size(computed) - 1) // _size(computed), tf.int64))
    numbers = tf.reshape(_OF_GROUPS[kind](groups, key, counter, computed), [-1])[:count]
    return tf.cast(tf.reshape(numbers, shape), dtype)


def _piecewise(kind: str, pieces: Pieces, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Draws in pieces: each turn of a loop draws `width` indices of one dimension."""
    whole, axes, along, width = _cut(pieces)
    sharding = json.dumps({"axes": axes})
    piece = [*whole[:along], width, *whole[along + 1 :]]

    def draw(turn: tf.Tensor, drawn: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        begin = tf.minimum(turn * width, whole[along] - width)  # the last piece may draw some numbers once more
        groups = tf.zeros([], tf.int64)
        for axis, size in enumerate(piece):
            unit = _unit(whole, axis)
            places = tf.range(size // unit, dtype=tf.int64)
            if axis == along:
                places += tf.cast(begin // unit, tf.int64)
            places *= math.prod(whole[axis + 1 :]) * unit // _GROUP
            groups += tf.reshape(places, [-1, *[1] * (len(whole) - 1 - axis)])
        groups = xla_ops.same_shape_marker(groups, sharding)
        numbers = tf.reshape(_OF_GROUPS[kind](groups, key, counter, _computed(kind, dtype)), piece)
        place = [begin if axis == along else 0 for axis in range(len(whole))]
        drawn = xla_ops.update_slice(drawn, tf.cast(numbers, dtype), tf.stack(place))
        return turn + 1, xla_ops.same_shape_marker(drawn, sharding)

    start = xla_ops.same_shape_marker(tf.zeros(whole, dtype), sharding)
    drawn = tf.while_loop(lambda turn, _: turn * width < whole[along], draw, (tf.constant(0), start))[1]
    return tf.reshape(drawn, pieces.shape)


def _cut(pieces: Pieces) -> tuple[list[int], list[Along], int, int]:
    """How a value is drawn: its shape, its axes, its dimension that is cut, and how many indices of that a piece has.

    If it is drawn in its own shape, XLA scales the numbers where they are. That takes a long dimension that is not
    divided. Otherwise it is split, and to scale it takes its memory once more.
    """
    whole, axes = list(pieces.shape), [by or None for by in pieces.names]
    along, length = _longest(whole, axes)
    if whole[-1] % (_GROUP * pieces.parts[-1]) or length < _MANY:
        whole, axes = pieces.split()
        along, length = _longest(whole, axes)
    count = max(_MANY, math.prod(whole) // _PIECE)
    return whole, axes, along, max(1, length // count) * _unit(whole, along)


def _longest(whole: Sequence[int], axes: Sequence[Along]) -> tuple[int, int]:
    """The dimension that can be cut into the most pieces, and into how many."""
    counts = [size // _unit(whole, axis) if axes[axis] is None else 0 for axis, size in enumerate(whole)]
    return counts.index(max(counts)), max(counts)


def _unit(whole: Sequence[int], axis: int) -> int:
    """The indices of a dimension that are drawn together: a group lies along the last one."""
    return _GROUP if axis == len(whole) - 1 else 1


def _computed(kind: str, dtype: tf.DType) -> tf.DType:
    """The dtype that numbers are computed in, before they are rounded to their own."""
    return dtype if kind == UNIFORM or dtype == tf.float64 else tf.float32


def _size(dtype: tf.DType) -> int:
    """How many numbers a group has."""
    return 2 if dtype == tf.float64 else _GROUP


def _uniform(groups: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    size = _size(dtype)
    integers = _integers(key, counter, groups)
    return _as_uniform(tf.reshape(integers, [*_shape(groups), size, 4 // size]), dtype)


def _normal(groups: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return _make_normal_numbers(_integers(key, counter, groups), groups, dtype)


def _make_normal_numbers(integers: tf.Tensor, groups: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Normal numbers from the four integers of each group: [..., 4], of doubles [..., 2]."""
    size, shape = _size(dtype), _shape(groups)
    pairs = _box_muller(tf.reshape(integers, [*shape, size // 2, 8 // size]), dtype)
    return tf.reshape(tf.stack(pairs, -1), [*shape, size])


def _shape(groups: tf.Tensor) -> list[int]:
    return [-1 if each is None else each for each in groups.shape.as_list()]


def _truncated_normal(groups: tf.Tensor, key: tf.Tensor, counter: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The numbers of groups, by the numbers of the groups: [..., 4], of doubles [..., 2]."""
    size = _size(dtype)
    first = groups * (size * _RESERVED // 4)

    def unfinished(_: tf.Tensor, taken: tf.Tensor, results: tf.Tensor) -> tf.Tensor:
        return tf.reduce_any(taken < size)

    def take(block: tf.Tensor, taken: tf.Tensor, results: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        integers = _integers(key, counter, first + block)
        for number in tf.unstack(_make_normal_numbers(integers, groups, dtype), num=size, axis=-1):
            accepted = tf.abs(number) < _TRUNCATED
            here = accepted[..., tf.newaxis] & (taken[..., tf.newaxis] == tf.range(size))
            results = tf.where(here, number[..., tf.newaxis], results)
            taken += tf.cast(accepted, tf.int32)
        return block + 1, taken, results

    nothing = tf.zeros(tf.concat([tf.shape(groups), [size]], 0), dtype)
    start = tf.constant(0, tf.int64), tf.zeros_like(groups, tf.int32), nothing
    return tf.while_loop(unfinished, take, start)[2]


def _integers(key: tf.Tensor, counter: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """As `_blocks`."""
    # Only numbers of values that are drawn in pieces have more dimensions.
    return (_function() if numbers.shape.rank == 1 else _blocks)(key, counter, numbers)


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
def _function() -> tf.types.experimental.ConcreteFunction:
    """`_blocks` as a function that all graphs call, since to trace its loop takes longer than most layers do."""
    specs = [tf.TensorSpec([1], tf.uint64), tf.TensorSpec([2], tf.uint64), tf.TensorSpec([None], tf.int64)]
    with tf.init_scope(), xla_ops.xla_context():
        return tf.function(_blocks, autograph=False).get_concrete_function(*specs)


def _blocks(key: tf.Tensor, counter: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """The four integers of blocks, by their numbers after the counter: uint32 [..., 4] from int64 [...]."""
    after = tf.cast(numbers, tf.uint64)
    begin = counter[0] + after
    high = tf.broadcast_to(counter[1] + tf.cast(begin < after, tf.uint64), tf.shape(begin))
    low, high = _halves(tf.stack([begin, high]))
    each = [2, *[1] * numbers.shape.rank]
    keys = tf.stack(_halves(key[0]))
    multipliers = tf.reshape(tf.constant(_MULTIPLIERS, tf.uint64), each)
    steps = tf.constant(_STEPS, tf.uint32)

    def mixed(step: tf.Tensor, evens: tf.Tensor, odds: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        low, high = _halves(tf.cast(evens, tf.uint64) * multipliers)
        mask = tf.bitwise.bitwise_xor(odds, tf.reshape(keys + steps * step, each))
        return step + 1, tf.bitwise.bitwise_xor(tf.reverse(high, [0]), mask), tf.reverse(low, [0])

    # A loop, because XLA computes one long expression again for each of its results, and compiles it for seconds.
    rounds = tf.constant(_ROUNDS, tf.uint32)
    state = (tf.constant(0, tf.uint32), low, high)
    _, evens, odds = tf.while_loop(lambda step, *_: step < rounds, mixed, state)
    return tf.stack([evens[0], odds[0], evens[1], odds[1]], -1)


def _halves(value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The low and the high half of 64-bit integers."""
    return tf.cast(value, tf.uint32), tf.cast(tf.bitwise.right_shift(value, tf.constant(32, tf.uint64)), tf.uint32)


UNIFORM, NORMAL, TRUNCATED_NORMAL = "StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2"
"""The types of the ops."""

_KEY = "StatelessRandomGetKeyCounter"
_OF_GROUPS = {UNIFORM: _uniform, NORMAL: _normal, TRUNCATED_NORMAL: _truncated_normal}


_MIX = 0xBF58476D1CE4E5B9  # not the step from replica to replica: an op's seed and a replica's key must not cancel out
_keys_of_job = itertools.count()
_KEYS = functools.partial(replica_weights.states, bits=64)


class RandomState(DeviceValue):
    """The key and the count that the random ops of a strategy draw from.

    Each replica has a stream of its own, with the same numbers for the same seed. XLA's own generator does not use
    TensorFlow's seed. So each stateful random op (`tf.random.normal`, `tf.nn.dropout`, ...) is replaced by its
    stateless form when it is made. The seed of that form combines a key, a number that counts up with each draw, and
    the seed that the op was made with. Key and count are a variable on the devices, like any other. The key comes from
    `tf.random.set_seed`, which also resets the count, and differs by replica.

    Args:
        devices: where the replicas run.
        same: whether all replicas draw the same numbers.
    """

    def __init__(self, devices: DeviceGroup, same: bool = False):
        with tf.init_scope(), tf.device("CPU:0"):
            self._variable = eager.ResourceVariable([0, 0], dtype=tf.int64, trainable=False, name="random_state")
        super().__init__([eager.raw_handle(self._variable)], devices, None if same else _KEYS)
        self._seeded: object = self  # the object that `tf.random.set_seed` last made; `self` before the first seeding
        self._key = 0
        self._initial: tf.Variable | None = None
        self._initial_seeded: object = self

    def array(self) -> Array:
        """The value on the devices; seeds it first if `tf.random.set_seed` was called since the last time."""
        seeding, seed = function_graphs.seeding()
        if seeding is not self._seeded:
            self._seeded = seeding
            self._key = _signed(self._random_key() if seed is None else seed)
            with self.host_writes():
                eager.write(self.handles[0], np.array([self._key, 0], np.int64))
        return super().array()

    def state(self) -> list[int] | None:
        """The key that all replicas' keys follow from, and the count; None before the first draw."""
        if self._seeded is self:
            return None
        return [self._key, int(self.each_value()[0].flat[1])]

    def restore(self, state: list[int]) -> None:
        """Continues with the numbers of a `state`, until `tf.random.set_seed` is called."""
        self._seeded, self._key = function_graphs.seeding()[0], state[0]
        with self.host_writes(whole=True):
            eager.write(self.handles[0], np.array(state, np.int64))

    def _random_key(self) -> int:
        """A key that nobody can know; with several workers, the chief's."""
        key, member = random.SystemRandom().getrandbits(62), self._devices.member
        if member is not None:
            name = f"random numbers {next(_keys_of_job)}"
            if member.worker:
                return int(member.get(name))
            member.put(name, key)
        return key

    def make_initial_values_handle(self) -> tf.Tensor:
        """The handle of a separate state on the host, for initial values of variables to draw from.

        Initial values must not advance the replicas' streams: the host knows only where these began.
        """
        seeding, seed = function_graphs.seeding()
        with tf.init_scope(), tf.device("CPU:0"):
            if self._initial is None:
                self._initial = eager.ResourceVariable([0, 0], dtype=tf.int64, trainable=False, name="initial")
            if seeding is not self._initial_seeded:
                self._initial_seeded = seeding
                key = random.SystemRandom().getrandbits(62) if seed is None else seed * _MIX
                self._initial.assign(np.array([_signed(key), 0], np.int64))
        return eager.raw_handle(self._initial)

    def replacement(self, kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor] | None:
        """The results of a new random op, drawn from this state; None if the op's own are right."""
        make = _STATELESS.get(kind)
        if make is None:
            return replacement(kind, inputs, attribute)
        handle = self.handles[0]
        state = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
        tf.raw_ops.AssignAddVariableOp(resource=handle, value=tf.constant([0, 1], tf.int64))
        own = tf.constant([_signed(attribute("seed2") * _MIX), 0], tf.int64)
        return [make(state + own, inputs, attribute)]

    def drawn_by_each(self, inputs: Sequence[tf.Tensor], first: tf.Tensor, size: int) -> list[tf.Tensor] | None:
        """What each replica reads of the state of a `tf.random.Generator` of the user's; None if all read the same.

        A generator of the scope has a state that TensorFlow divides among the replicas. Any other has one state for
        all, and replica threads draw from it one after the other: so each replica gets the next part of its numbers.

        Args:
            inputs: the handle of the state, the algorithm, and how far a draw moves the state on.
            first: the state before the first draw, which replica 0 reads.
            size: the number of replicas.
        """
        handle = inputs[0]
        while tf.is_symbolic_tensor(handle):
            handle = graph_walk.captured(handle)
        if size == 1 or self.spread is None or handle is None or find_device_value(handle) is not None:
            return None
        states = [first]
        for _ in range(size - 1):
            states.append(tf.raw_ops.RngReadAndSkip(resource=inputs[0], alg=inputs[1], delta=inputs[2]))
        return [tf.gather(tf.stack(states), xla_ops.replica_id())]


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _shuffled(seed: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Shuffles by sorting random keys: XLA has no kernel for the stateless shuffle."""
    keys = tf.random.stateless_uniform([tf.shape(values)[0]], seed, None, None, dtype=tf.int32)
    return tf.gather(values, tf.argsort(keys, stable=True))


def _categorical(seed: tf.Tensor, logits: tf.Tensor, count: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Draws by the Gumbel-max trick: XLA has no kernel for the stateless op. (Gumbel, 1954.)"""
    batch, classes = tf.shape(logits)[0], tf.shape(logits)[1]
    uniform = tf.random.stateless_uniform([batch, count, classes], seed, 1e-20, 1.0)
    noise = -tf.math.log(-tf.math.log(uniform))
    return tf.argmax(tf.cast(logits, tf.float32)[:, tf.newaxis] + noise, axis=-1, output_type=dtype)


_Make = Callable[[tf.Tensor, Sequence[tf.Tensor], Attribute], tf.Tensor]


def _philox(kind: str) -> _Make:
    return lambda seed, inputs, attribute: drawn(kind, inputs[0], seed, attribute("dtype"))


_STATELESS: dict[str, _Make] = {
    "RandomStandardNormal": _philox(NORMAL),
    "RandomUniform": _philox(UNIFORM),
    "TruncatedNormal": _philox(TRUNCATED_NORMAL),
    "RandomUniformInt": lambda seed, inputs, attribute: tf.random.stateless_uniform(
        inputs[0], seed, inputs[1], inputs[2], dtype=inputs[1].dtype
    ),
    "RandomShuffle": lambda seed, inputs, attribute: _shuffled(seed, inputs[0]),
    "Multinomial": lambda seed, inputs, attribute: _categorical(seed, inputs[0], inputs[1], attribute("output_dtype")),
    # XLA has no kernels for the stateless forms of these ops either. The host computes them, from the replica's seed.
    "RandomGamma": lambda seed, inputs, attribute: tf.random.stateless_gamma(
        tf.concat([inputs[0], tf.shape(inputs[1])], 0), seed, inputs[1], dtype=inputs[1].dtype
    ),
    "RandomPoissonV2": lambda seed, inputs, attribute: tf.random.stateless_poisson(
        tf.concat([inputs[0], tf.shape(inputs[1])], 0), seed, inputs[1], dtype=attribute("dtype")
    ),
}
