"""Seeds of replicas: how the seed of each replica follows from the seed that the user sets.

Replicas with the same seed would drop the same units and add the same noise, each for its own samples. So replica 0
keeps the user's seed, and the seed of replica r is r steps further. The step is 2**bits / golden ratio: multiples of it
spread evenly over the range, so that the seeds of any number of replicas are far apart.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio


def seed_of(replica: int, seed: int | tf.Tensor, bits: int = 32) -> int | tf.Tensor:
    """The seed of one replica.

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
        own.flat[0] = np.uint64(seed_of(replica, int(state.flat[0]), bits)).astype(state.dtype)
    return found
