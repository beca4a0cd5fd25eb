"""What debug mode says of a step: the replica, the variable or op, the user's line, and what to write instead."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from replica_engine.debugging.trails import Op, Reduction
from replica_engine.errors import DebugError
from replica_engine.errors.base import at, plural, warning

_logger = logging.getLogger("replica_engine")
_told: set[Hashable] = set()


def forget() -> None:
    """Warns again of what has been told."""
    _told.clear()


def warn_once(key: Hashable, text: str) -> None:
    """Logs a warning of debug mode, once for each key."""
    if key not in _told:
        _told.add(key)
        _logger.warning(warning("may_be_meant", text))


def tape_around(name: str, where: str) -> DebugError:
    """The error of a tape that is open around a run."""
    return DebugError(
        f"A tf.GradientTape is open around strategy.run of `{name}`{at(where)}. It does not record what replicas "
        "compute: its gradients would be None or wrong. Open the tape in the function that the replicas run."
    )


def unequal_mean(name: str, rows: Sequence[int], where: str) -> DebugError:
    """The error of a mean over replicas of shards of unequal size."""
    return DebugError(
        f"The replicas of `{name}` have shards of {', '.join(map(str, rows))} samples, and a mean over replicas is "
        f"taken{at(where)}, in which each shard counts the same. The mean of all samples is a sum over replicas, "
        f"divided by the {sum(rows)} samples: add up in the step, and divide by the size of the whole batch. Or let "
        "replica_engine.split_batch(strategy, batch) make equal shards with weights."
    )


class Step:
    """A step, and what is wrong in it.

    Args:
        name: the name of its function.
        devices: the names of the replicas' devices.
    """

    def __init__(self, name: str, devices: Sequence[str]):
        self.name, self.devices = name, list(devices)

    def _replica(self, index: int) -> str:
        return f"replica {index} of {len(self.devices)} ({self.devices[index]})"

    def check_finite(self, makers: Sequence[Op | None]) -> None:
        """Checks, for each replica, which op made the first number that is not finite, and is used.

        Raises:
            DebugError: there is one.
        """
        found = [(op.crosses, index, op) for index, op in enumerate(makers) if op is not None]
        if found:
            _, index, op = min(found)  # a sum over replicas has it from another one
            raise DebugError(
                f"The first NaN or infinity of `{self.name}` is made by {op.kind}{at(op.where)}, on "
                f"{self._replica(index)}, out of finite numbers. It reaches a result or a variable. Look at what goes "
                "into this op: a logarithm, a root or a division of 0, or numbers that are too large. A gradient of "
                "tf.where is NaN too where the branch that is not taken is: mask what goes into the op."
            )

    def check_copies(self, copies: Sequence[tuple[str, str, Sequence[int]]]) -> None:
        """Checks that the copies of variables are equal, by their digests.

        Raises:
            DebugError: those of one are not.
        """
        for name, where, digests in copies:
            written = f"It was last written{at(where)}."
            if not where:
                written = (
                    "This step has not written it: another one did, or strategy.extended.update did outside of runs."
                )
            other = next((index for index, each in enumerate(digests) if each != digests[0]), None)
            if other is not None:
                raise DebugError(
                    f"The copies of the variable {name!r} have become unequal in `{self.name}`: {self._replica(other)} "
                    f"has another value than replica 0. {written} What replicas write to a "
                    "variable that they share must be equal on all of them: reduce first what differs, "
                    'context.all_reduce("MEAN", gradient). For a variable of each replica\'s own, make it with '
                    "synchronization=tf.VariableSynchronization.ON_READ and an aggregation."
                )

    def check_rows(self, sizes: Sequence[Mapping[int, int]], reductions: Sequence[Reduction]) -> None:
        """Checks that no mean over replicas is taken of shards of unequal size.

        Raises:
            DebugError: one is.
        """
        means = list(dict.fromkeys(each.where for each in reductions if each.kind == "MEAN"))
        for place, first in sizes[0].items():
            rows = [each.get(place, first) for each in sizes]
            if means and len(set(rows)) > 1:
                raise unequal_mean(self.name, rows, " and at ".join(means))

    def check_reductions(self, reductions: Sequence[Reduction], digests: Sequence[Sequence[int]]) -> None:
        """Checks that nothing is summed twice, and that each result is used; with digests of what each replica gave.

        Raises:
            DebugError: something is summed twice.
        """
        for index, each in enumerate(reductions):
            # What a replica has made a value of its own is not the same on all of them.
            if each.again is not None and len({of[index] for of in digests if len(of) > index}) == 1:
                raise DebugError(
                    f"A value is summed over replicas{at(each.where)} that is a sum or mean over "
                    f"replicas already{at(each.again.where)}: it comes out {len(self.devices)} times as large. Reduce "
                    "once. Optimizers of Keras sum the gradients of the replicas themselves."
                )
            if not each.is_used:
                warn_once(
                    ("unused", self.name, each.where),
                    f"The result of the reduction over replicas{at(each.where)} is not used. It does "
                    f'not change its argument: gradient = context.all_reduce("{each.kind}", gradient).',
                )

    def check_batches(self, digests: Sequence[int], writes: bool, where: str) -> None:
        """Warns of a step that writes variables where all replicas have the same batch, and reduce the same."""
        if writes and len(digests) > 1 and len(set(digests)) == 1 and digests[0]:
            warn_once(
                ("batch", self.name),
                f"All {plural(len(digests), 'replica')} of `{self.name}`, run{at(where)}, have the same batch: each "
                "computes what one device would. Deal the batch out: a dataset with "
                "strategy.experimental_distribute_dataset(dataset), a tensor with "
                "replica_engine.split_batch(strategy, batch).",
            )

    def check_drawn(self, kinds: Sequence[tuple[str, str, Any]], drawn: Sequence[Sequence[int]]) -> None:
        """Warns of random numbers that are the same on all replicas, and of which a mask is made."""
        for index, (kind, where, _) in enumerate(kinds):
            every = [each[index] for each in drawn if len(each) > index]
            if len(every) == len(drawn) > 1 and len(set(every)) == 1:
                warn_once(
                    ("drawn", self.name, where),
                    f"{kind}{at(where)} draws the same numbers on all {len(drawn)} replicas of `{self.name}`, and a "
                    "mask is made of them: dropout drops the same units in each shard. Give each replica a seed of its "
                    "own: tf.random.experimental.stateless_fold_in(seed, context.replica_id_in_sync_group). Keras' "
                    "layers draw so in a model made in the scope of MirroredStrategy, and not under replicate_model.",
                )
