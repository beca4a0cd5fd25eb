"""Compares weights: between replicas bit by bit, and between N replicas and one device by distance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

# N replicas add the same numbers as one device, but in another order, so float32 sums differ in the last bits. With the
# default flags the weights differ by less than 1e-6. Leaving one sample out of every batch moves them by 3e-2.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class UnequalWeight:
    """A weight whose value on one replica differs from that on replica 0 in at least one bit."""

    variable: str
    replica: int
    elements: int

    def __str__(self) -> str:
        return f"{self.variable} on replica {self.replica} differs from replica 0 in {self.elements} elements"


@dataclass(frozen=True)
class Comparison:
    """A training on N replicas, compared with the same training on one device.

    Attributes:
        replicas: the number of replicas.
        weights: how many numbers each replica holds.
        differences: the weights that differ between replicas.
        distance: the largest absolute difference between a weight after one training and after the other.
    """

    replicas: int
    weights: int
    differences: tuple[UnequalWeight, ...]
    distance: float

    def failures(self) -> list[str]:
        """The failures, one line each; empty if the replicas are equal and near the one device."""
        lines = [str(difference) for difference in self.differences]
        if not self.distance <= TOLERANCE:  # not `>`: a distance of nan is also a failure
            lines.append(
                f"weights are {self.distance:.1e} from one device, more than the tolerance {TOLERANCE:.0e}. "
                "If the default flags pass, rounding was amplified: try a smaller learning rate or fewer epochs"
            )
        return lines


def compare(
    strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable], on_one_device: Sequence[tf.Variable]
) -> Comparison:
    """Compares weights that a strategy trained with each other, and with the weights that one device trained.

    Args:
        strategy: the strategy whose replicas hold `variables`.
        variables: the weights, made in the scope of `strategy`.
        on_one_device: the same weights after the training on one device, in the same order.

    Returns:
        The comparison.
    """
    return Comparison(
        replicas=strategy.num_replicas_in_sync,
        weights=sum(int(np.prod(variable.shape)) for variable in variables),
        differences=tuple(replica_differences(strategy, variables)),
        distance=largest_distance(
            [variable.numpy() for variable in variables], [variable.numpy() for variable in on_one_device]
        ),
    )


def replica_differences(strategy: tf.distribute.Strategy, variables: Sequence[tf.Variable]) -> list[UnequalWeight]:
    """Compares the bytes of every replica's copy of every variable with those of replica 0."""
    differences = []
    for index, variable in enumerate(variables):
        first, *others = [copy.numpy() for copy in strategy.experimental_local_results(variable)]
        for replica, other in enumerate(others, start=1):
            if other.tobytes() != first.tobytes():
                name = f"weight {index} ({variable.name})"
                differences.append(UnequalWeight(name, replica, _elements_that_differ(first, other)))
    return differences


def largest_distance(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    """The largest absolute difference between two lists of arrays; nan if any array contains nan."""
    return max(float(np.max(np.abs(one - other))) for one, other in zip(some, others, strict=True))


def _elements_that_differ(one: np.ndarray, other: np.ndarray) -> int:
    """Counts elements with different bytes: 0.0 and -0.0 differ, and a nan equals itself."""

    def as_bytes(array: np.ndarray) -> np.ndarray:
        return np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.itemsize)

    return int(np.any(as_bytes(one) != as_bytes(other), axis=1).sum())
