"""What differs between replicas by their id or their shard: seeds, and the weights of their gradients."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import tensorflow as tf

from replica_engine.process import interrupts
from replica_engine.upstream.graphs import operators
from replica_engine.values import linear

_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio


def make_replica_seed(replica: int, seed: int | tf.Tensor, bits: int = 32) -> int | tf.Tensor:
    """The seed of one replica, which follows from the seed that the user sets.

    Replicas with the same seed would drop the same units and add the same noise, each for its own samples. So replica 0
    keeps the user's seed, and the seed of replica r is r steps further. The step is 2**bits / golden ratio: multiples
    of it spread evenly over the range, so that the seeds of any number of replicas are far apart.

    Args:
        replica: the replica.
        seed: the user's seed; an int, or for 32 bits a tensor of int64.
        bits: the size of the range of seeds: 32 or 64.
    """
    return (seed + replica * (_STEP >> 64 - bits)) % 2**bits


def states(state: np.ndarray, size: int, bits: int = 32) -> list[np.ndarray]:
    """The state of a random number generator for each of `size` replicas. A state begins with the seed."""
    found = [state.copy() for _ in range(size)]
    for replica, own in enumerate(found):
        own.flat[0] = np.uint64(make_replica_seed(replica, int(state.flat[0]), bits)).astype(state.dtype)
    return found


T = TypeVar("T")
Weight = Callable[[tf.DType], tf.Tensor]
"""Takes a dtype, and returns the weight of the replica's gradients as a scalar."""

_weight: contextvars.ContextVar[Weight | None] = contextvars.ContextVar("replica_engine_late_weight", default=None)


def weighted_late(weight: Weight | None) -> contextlib.AbstractContextManager[object]:
    """Inside, on this replica, gradients get their weight later; None says that they do not."""
    return interrupts.variable_for_block(_weight, weight)


_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_alone", default=False)


def alone(is_alone: bool) -> contextlib.AbstractContextManager[object]:
    """Inside, a reduction over replicas gives each replica its own value, as on one device, if `is_alone`."""
    return interrupts.variable_for_block(_alone, is_alone)


def reduced(value: object, reduce: Callable[[object], T]) -> T:
    """What a reduction over replicas makes of a structure of tensors, where gradients may get their weight late.

    A replicated model runs the user's own `train_step` on each replica, and the gradient of replica r counts with its
    fraction w_r of the batch only when the optimizer adds the gradients up. A reduction over replicas inside the step
    (a synchronized batch normalization) is differentiated before that. Its gradient on replica r is the sum of the
    upstream gradients of all replicas j, and they count with w_j, not with w_r. So inside such a step (`weighted_late`)
    a reduction has the gradient `sum(w_j * upstream_j) / w_r`: what comes back to it is multiplied by the replica's
    weight before the sum over the replicas, and divided by it after.
    """
    if _alone.get():
        own: T = tf.nest.map_structure(tf.identity, value)
        return own
    weight = _weight.get()
    if weight is None:
        return reduce(value)
    if operators.has_tape():  # without a tape, as in an optimizer, it is work for nothing
        before = tf.nest.map_structure(lambda leaf: _with_gradient_times(leaf, lambda dtype: 1 / weight(dtype)), value)
        result = tf.nest.map_structure(lambda leaf: _with_gradient_times(leaf, weight), reduce(before))
    else:
        result = reduce(value)
    linear.tag(tf.nest.flatten(result), linear.COMMON)
    return result


def _with_gradient_times(leaf: object, factor: Weight) -> object:
    """The value itself, whose gradient is multiplied by a factor."""
    if isinstance(leaf, tf.IndexedSlices):
        return leaf  # it has no gradient
    tensor = tf.convert_to_tensor(leaf)
    if not tensor.dtype.is_floating:
        return leaf
    wide = tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor  # the product must not overflow
    scaled = wide * factor(wide.dtype)
    nothing = tf.where(tf.math.is_finite(scaled), scaled - tf.stop_gradient(scaled), tf.zeros_like(scaled))
    return tf.stop_gradient(tensor) + tf.cast(nothing, tensor.dtype)
