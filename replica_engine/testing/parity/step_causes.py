"""Known causes of differences of a custom training step, searched for in its numbers and in its ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from replica_engine.testing.parity.random_draws import draws
from replica_engine.testing.parity.report import Cause, Difference
from replica_engine.values import samples

_CLOSE = 1e-3


def found(
    differences: Sequence[Difference],
    expected: Any,
    runs: Mapping[str, Any],
    batches: Sequence[Any],
    replicas: int,
    alone: Callable[[int], Any],
) -> tuple[Cause, ...]:
    """Finds the known causes in the numbers of a step.

    Args:
        differences: all differences.
        expected: the run on one device.
        runs: the runs of the strategies, by name.
        batches: the batches of the runs.
        replicas: the number of replicas.
        alone: runs one device on the rows of one replica, from the first batch.
    """
    first = [each for each in differences if each.step == 1 and each.strategy in runs]
    weights = list(dict.fromkeys(each.name for each in first if each.kind == "weight"))
    others = list(dict.fromkeys(each.name for each in first if each.kind != "weight"))
    causes = [*_uneven(differences, batches, replicas)]
    if weights:
        changes = _changes(expected, weights)
        on_one = _changes(alone(0), weights)
        for run in runs.values():
            causes += _scaled(changes, _changes(run, weights), replicas, "The change of")
            causes += _first_only(changes, on_one, _changes(run, weights))
    for run in runs.values():
        if not run.results:  # compiled replicas cannot share out even the first batch
            continue
        one, other = ({name: of.results[0][name] for name in others if name in of.results[0]} for of in (expected, run))
        causes += _scaled(one, other, replicas, "The result")
    return tuple(dict.fromkeys(causes))


def random_numbers(step: str, graph: Any) -> tuple[Cause, ...]:
    """Finds the random numbers that a step draws."""
    return tuple(_random_numbers(step, graph))


def _random_numbers(step: str, graph: Any) -> Iterator[Cause]:
    for draw in draws(graph, []):
        if draw.is_stateless:
            yield Cause(
                "stateless algorithm",
                step,
                f"The step draws random numbers with {draw.op} from a fixed seed, so all replicas draw the "
                "same numbers, each for its own rows. One device draws other numbers for other rows.",
                "Pass the numbers as a part of the batch, or give them a shape that does not depend on the batch.",
            )
        else:
            yield Cause(
                "random numbers",
                step,
                f"The step draws random numbers ({draw.op}), and each replica draws its own.",
                "They have the same distribution, so training is equally good. To compare everything else, pass the "
                "numbers as a part of the batch.",
            )


def _uneven(differences: Sequence[Difference], batches: Sequence[Any], replicas: int) -> Iterator[Cause]:
    different = {each.step for each in differences if each.step is not None}
    uneven = [index + 1 for index, batch in enumerate(batches) if samples.count(batch) % replicas]
    if different and uneven and min(different) == uneven[0] > 1:
        total = samples.count(batches[uneven[0] - 1])
        yield Cause(
            "unequal shares",
            f"step {uneven[0]}",
            f"Batches whose size is a multiple of {replicas} agree, but the batch of {total} rows differs: a mean over "
            "replicas counts each replica once, however many rows it has.",
            "Divide the loss of each row by the size of the whole batch, and sum over replicas: give the step an "
            "argument named `weights` (replica_engine.split_batch makes them), or use tf.nn.compute_average_loss with "
            "the size of the whole batch. uneven=False leaves such batches out.",
        )


def _scaled(expected: Mapping[str, Any], run: Mapping[str, Any], replicas: int, subject: str) -> Iterator[Cause]:
    for factor, words, remedy in (
        (
            replicas,
            f"{replicas} times",
            'If each replica computes a mean over its rows, average over replicas: all_reduce("mean", ...) or '
            'CrossReplicaOptimizer(..., "mean"). Or divide each row\'s loss by the size of the whole batch, and sum.',
        ),
        (
            1 / replicas,
            f"1 / {replicas} of",
            'If each row\'s loss is divided by the size of the whole batch, sum over replicas: all_reduce("sum", ...) '
            'or CrossReplicaOptimizer(..., "sum"). For a result of the step: check_parity(..., reduction="sum").',
        ),
    ):
        names = [name for name, value in expected.items() if name in run and _is_close(value * factor, run[name])]
        if names and replicas > 1:
            yield Cause(
                "scaled by replicas",
                names[0],
                f"{subject} {names[0]!r} is {words} that on one device.",
                remedy,
            )


def _first_only(expected: Mapping[str, Any], alone: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[Cause]:
    for name, value in run.items():
        is_known = name in alone and name in expected
        if is_known and not _is_close(expected[name], value) and _is_close(alone[name], value):
            yield Cause(
                "not combined",
                name,
                f"{name!r} changes as if the rows of replica 0 were the whole batch: the step does not combine the "
                "gradients of the replicas.",
                'Call tf.distribute.get_replica_context().all_reduce("mean", gradients) before applying them, or use '
                "replica_engine.keras.CrossReplicaOptimizer.",
            )
            return


def _changes(run: Any, names: Sequence[str]) -> dict[str, Any]:
    """The change of each variable in the first step. Variables that this step made, such as momenta, start at zero."""
    if not run.weights:
        return {}
    return {
        name: np.asarray(run.weights[0][name], "float64") - np.asarray(run.start.get(name, 0.0), "float64")
        for name in names
        if name in run.weights[0]
    }


def _is_close(one: Any, other: Any) -> bool:
    one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
    if one.shape != other.shape or not one.size:
        return False
    largest = float(np.max(np.abs(one)))
    return largest > 0 and bool(np.max(np.abs(one - other)) <= _CLOSE * largest)
