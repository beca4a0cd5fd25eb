"""Random ops in a replica body: a different stream on each replica, the same numbers for the same seed.

XLA's own generator does not use TensorFlow's seed. So each stateful random op (`tf.random.normal`,
`tf.nn.dropout`, ...) is replaced by its stateless form when it is made. The seed of that form combines a key, a number
that counts up with each draw, and the seed that the op was made with. Key and count are a variable on the devices,
like any other. The key comes from `tf.random.set_seed`, which also resets the count, and differs by replica.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from replica_engine._tf import variables
from replica_engine._tf.graphs import replaced_ops, subgraphs, xla_ops
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.values import seeds
from replica_engine.xla.corrected_ops import Attribute
from replica_engine.xla.state import philox
from replica_engine.xla.state.device_value import DeviceValue, home_of

_MIX = 0xBF58476D1CE4E5B9  # not the step from replica to replica: an op's seed and a replica's key must not cancel out
_keys_of_job = itertools.count()
_KEYS = functools.partial(seeds.states, bits=64)


class RandomState(DeviceValue):
    """The key and the count that the random ops of a strategy draw from.

    Args:
        devices: where the replicas run.
        same: whether all replicas draw the same numbers.
    """

    def __init__(self, devices: DeviceGroup, same: bool = False):
        with tf.init_scope(), tf.device("CPU:0"):
            self._variable = variables.ResourceVariable([0, 0], dtype=tf.int64, trainable=False, name="random_state")
        super().__init__([variables.raw_handle(self._variable)], devices, None if same else _KEYS)
        self._seeded: object = self  # the object that `tf.random.set_seed` last made; `self` before the first seeding
        self._key = 0
        self._initial: tf.Variable | None = None
        self._initial_seeded: object = self

    def array(self) -> Array:
        """The value on the devices; seeds it first if `tf.random.set_seed` was called since the last time."""
        seeding, seed = replaced_ops.seeding()
        if seeding is not self._seeded:
            self._seeded = seeding
            self._key = _signed(self._random_key() if seed is None else seed)
            with self.host_writes():
                variables.write(self.handles[0], np.array([self._key, 0], np.int64))
        return super().array()

    def state(self) -> list[int] | None:
        """The key that all replicas' keys follow from, and the count; None before the first draw."""
        if self._seeded is self:
            return None
        return [self._key, int(self.each_value()[0].flat[1])]

    def restore(self, state: list[int]) -> None:
        """Continues with the numbers of a `state`, until `tf.random.set_seed` is called."""
        self._seeded, self._key = replaced_ops.seeding()[0], state[0]
        with self.host_writes(whole=True):
            variables.write(self.handles[0], np.array(state, np.int64))

    def _random_key(self) -> int:
        """A key that nobody can know; with several workers, the chief's."""
        key, member = random.SystemRandom().getrandbits(62), self._devices.member
        if member is not None:
            name = f"random numbers {next(_keys_of_job)}"
            if member.worker:
                return int(member.get(name))
            member.put(name, key)
        return key

    def of_initial_values(self) -> tf.Tensor:
        """The handle of a separate state on the host, for initial values of variables to draw from.

        Initial values must not advance the replicas' streams, of which the host has only the beginning.
        """
        seeding, seed = replaced_ops.seeding()
        with tf.init_scope(), tf.device("CPU:0"):
            if self._initial is None:
                self._initial = variables.ResourceVariable([0, 0], dtype=tf.int64, trainable=False, name="initial")
            if seeding is not self._initial_seeded:
                self._initial_seeded = seeding
                key = random.SystemRandom().getrandbits(62) if seed is None else seed * _MIX
                self._initial.assign(np.array([_signed(key), 0], np.int64))
        return variables.raw_handle(self._initial)

    def replacement(self, kind: str, inputs: Sequence[tf.Tensor], attribute: Attribute) -> list[tf.Tensor] | None:
        """The results of a new random op, drawn from this state; None if the op's own are right."""
        make = _STATELESS.get(kind)
        if make is None:
            return philox.replacement(kind, inputs, attribute)
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
            handle = subgraphs.captured(handle)
        if size == 1 or self.spread is None or handle is None or home_of(handle) is not None:
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
    return lambda seed, inputs, attribute: philox.drawn(kind, inputs[0], seed, attribute("dtype"))


_STATELESS: dict[str, _Make] = {
    "RandomStandardNormal": _philox(philox.NORMAL),
    "RandomUniform": _philox(philox.UNIFORM),
    "TruncatedNormal": _philox(philox.TRUNCATED_NORMAL),
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
