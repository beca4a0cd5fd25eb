"""Calls of replicated functions: their arguments, and the place of the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replica_engine.errors.base import ReplicaEngineError, at, brief, warning

LOOP = (
    "    for batch in strategy.experimental_distribute_dataset(dataset):\n"
    "        strategy.run(step, args=(batch,))\n"
    "If its batches are tuples and the step takes their parts, step(x, y), write args=batch."
)
"""What to write where a dataset is given in place of a batch."""


class NotInBodyError(ReplicaEngineError, RuntimeError):
    """A cross-replica operation was used where no replicated body is being traced.

    Raised where the operation is called. Call it in the function that `xla.replicate` or `TPUStrategy.run` is given;
    the replicas of MirroredStrategy use `tf.distribute.get_replica_context()`.
    """


class NoMethodError(ReplicaEngineError, AttributeError):
    """A strategy or a context was asked for a method that another object has; `hasattr` is False.

    Raised by the use of the method. Write what the message shows, or, for a method of another strategy, use that one.
    """


_FUNCTIONS = {
    name: f"It is a function: write {call}."
    for name, call in (
        ("split_batch", "replica_engine.split_batch(strategy, batch)"),
        ("join_outputs", "replica_engine.join_outputs(strategy, outputs)"),
        ("timeline", 'with replica_engine.timeline("run.json"):'),
        ("replicate_model", "replica_engine.keras.replicate_model(model, strategy=strategy)"),
    )
}
_OF_REPLICA = {
    name: "Replicas have it, in the function that runs on them: write "
    f"tf.distribute.get_replica_context().{name}{'' if name == 'replica_id_in_sync_group' else '(...)'}."
    for name in ("merge_call", "all_reduce", "all_gather", "replica_id_in_sync_group")
}
ELSEWHERE = {
    "strategy": _FUNCTIONS | _OF_REPLICA,
    "replica": {
        "reduce": 'In a replica, write context.all_reduce("SUM", value). strategy.reduce is for outside.',
        "gather": "In a replica, write context.all_gather(value, axis=0). strategy.gather is for outside.",
    },
    "loop": _OF_REPLICA,
}
"""What to write for an attribute that a strategy, the context of a replica, or that of `run_steps` does not have."""


def elsewhere(owner: object, kind: str, name: str) -> Any:
    """Looks up an attribute that was not found, for the `__getattr__` of an object.

    Args:
        owner: the object.
        kind: what it is, a key of `ELSEWHERE`.
        name: the attribute.

    Raises:
        NoMethodError: another object has it.
        AttributeError: nothing is known of it; or a property of this name raised the error.
    """
    if name in ELSEWHERE[kind]:
        raise NoMethodError(f"{type(owner).__name__} has no {name}. {ELSEWHERE[kind][name]}")
    return object.__getattribute__(owner, name)


class InputsError(ReplicaEngineError, ValueError, TypeError):
    """A replicated function, compiled body or device loop was called with unusable arguments, or in the wrong place.

    Raised by the call, before any replica runs. The message names the argument, and shows how to write the call.
    """

    @classmethod
    def no_cache_dir(cls, path: object) -> InputsError:
        """The cache folder is not a path."""
        return cls(f"set_cache_dir takes the path of a folder, or None for no cache; got {brief(path)}.")

    @classmethod
    def distributed(cls, name: str, kind: str) -> InputsError:
        """`strategy.run` gets a distributed dataset, or an iterator over one."""
        return cls(
            f"{name} is a {kind}, and replicas take one batch of it at a time. Loop over it around the run:\n"
            "    for batch in distributed_dataset:\n"
            "        strategy.run(step, args=(batch,))\n"
            "If its batches are tuples and the step takes their parts, step(x, y), write args=batch. With an iterator, "
            "args=(next(iterator),)."
        )

    @classmethod
    def not_of_signature(cls, fn: str, name: str, given: str, wanted: str) -> InputsError:
        """An argument does not match the input signature."""
        return cls(f"{name} of `{fn}` is {given}, but the input_signature has {wanted}.")


class ReplicaMismatchError(ReplicaEngineError, ValueError):
    """The replicas were given tensors of different shapes or dtypes, or brought such tensors to a sync point.

    Raised before a program is compiled, or at the sync point. Replicas that meet need equal shapes and dtypes: divide
    batches evenly, pad the last one, or use `replica_engine.split_batch`.

    Attributes:
        by_replica: the shapes of an argument of a compiled program that differ, one for each replica; else empty.
    """

    by_replica: Sequence[tuple[int, ...]] = ()

    @classmethod
    def shapes(cls, name: str, replica: int, first: str, other: str, met: str = "") -> ReplicaMismatchError:
        """Two replicas have different shapes; `met` is where they meet, such as "all_reduce at file.py:3 in step"."""
        met = met or "cross-replica operations (sums of gradients, for example)"
        return cls(
            f"{name} has shape {first} on replica 0 and {other} on replica {replica}. The replicas meet in {met}, so "
            "one program runs on all of them, and their shapes must be equal. Use a batch size that is a multiple of "
            "the number of replicas. If only the last batch is smaller, leave it out, dataset.batch(n, "
            "drop_remainder=True), or give Keras fit a number of samples that is a multiple of the batch size. For "
            "batches of any size in your own loop, replica_engine.split_batch(strategy, batch) makes equal shares, "
            "with weights that are 0 for padding."
        )

    @classmethod
    def of_conditions(cls, what: str, where: str, values: Sequence[tuple[str, str]]) -> ReplicaMismatchError:
        """The replicas do not agree which way to go in an operator with merge calls; one row for each replica."""
        rows = "\n".join(f"  {replica}: {value}" for replica, value in values)
        return cls(
            f"The replicas do not agree on the condition of {what} at {where}:\n{rows}\n"
            "There is a merge call inside (all_reduce, optimizer.apply), so all replicas must go the same way. Make "
            "the condition of values that are equal on all replicas, or reduce it first: "
            'context.all_reduce("SUM", value).'
        )

    @classmethod
    def not_tensors(cls, name: str, value: object) -> ReplicaMismatchError:
        """A value differs by replica and is not a tensor."""
        return cls(
            f"{name} differs by replica and holds {brief(value)}. A value that differs by replica must be a tensor, "
            "because one program runs on all replicas. To tell the replicas apart, use the replica id."
        )


def warn_dataset_for_each(name: str, size: int, where: str) -> str:
    """The warning that a dataset is given to `run`, so that each replica goes through all of it."""
    return warning(
        "warn_dataset_for_each",
        f"{name} of strategy.run{at(where)} is a tf.data.Dataset: each of {size} replicas goes through all of it. "
        f"Distribute it, and run one batch at a time:\n{LOOP}",
    )
