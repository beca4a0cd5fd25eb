"""Values that cannot be passed to replicas, reduced or joined."""

from __future__ import annotations

from collections.abc import Sequence

from replica_engine.errors.base import ReplicaEngineError, brief


class ReplicaValueError(ReplicaEngineError, ValueError, TypeError):
    """A value, or a structure of values, cannot be passed to replicas, reduced, or joined."""

    @classmethod
    def other_size(cls, name: str, given: int, size: int) -> ReplicaValueError:
        """A distributed value belongs to another number of replicas."""
        return cls(
            f"{name} is a distributed value of {given} replica{'' if given == 1 else 's'}, but this strategy has "
            f"{size}. The values of a strategy are for its own replicas only: make the value again with "
            "strategy.experimental_distribute_values_from_function(fn)."
        )

    @classmethod
    def distributed(cls, name: str) -> ReplicaValueError:
        """A distributed value contains another distributed value."""
        return cls(
            f"{name} is a distributed value whose components are distributed values. Give each replica a tensor, or "
            "a structure of tensors."
        )

    @classmethod
    def endless(cls, what: str) -> ReplicaValueError:
        """A structure contains itself or is nested too deeply."""
        return cls(
            f"A structure among {what} contains itself, or has more levels of lists, tuples and mappings than Python "
            "can follow. Keep tensors in a few levels; put an object that refers to itself into a class of your own."
        )

    @classmethod
    def no_tensor(cls, name: str, value: object, reason: str) -> ReplicaValueError:
        """An array or number cannot become a tensor."""
        return cls(f"{name} cannot become a tensor: {reason.rstrip('.')}. It is {brief(value)}.")

    @classmethod
    def not_reducible(cls, value: object) -> ReplicaValueError:
        """The value of a replica is not a tensor."""
        return cls(
            f"Values of replicas are reduced as tensors, but a replica has {brief(value)}. Return tensors or numbers "
            "from the replicas. For ragged and sparse tensors, reduce the parts: x.flat_values, tf.sparse.to_dense(x)."
        )

    @classmethod
    def sum_of_one(cls, value: object) -> ReplicaValueError:
        """The sum was requested of one value that all replicas share."""
        return cls(
            f"The sum over replicas of {brief(value)} is not defined: it is one value for all replicas, not one value "
            "for each. Read it directly, reduce it with MEAN, or return its value from the replicas: v.read_value()."
        )

    @classmethod
    def bad_reduction(cls, given: object) -> ReplicaValueError:
        """The reduction is unknown."""
        return cls(f'Values are reduced with "SUM" or "MEAN", or a tf.distribute.ReduceOp; got {brief(given)}.')

    @classmethod
    def bad_axis(cls, given: object) -> ReplicaValueError:
        """`axis` is not an axis to reduce along."""
        return cls(f"`axis` must be an int, a tuple of ints, or None to reduce over replicas only; got {brief(given)}.")

    @classmethod
    def no_function(cls, given: object) -> ReplicaValueError:
        """The argument is not callable."""
        return cls(
            f"Replicas run a function: `run` takes a function, and its arguments in args=(...). Got {brief(given)}."
        )

    @classmethod
    def no_positional(cls, given: object) -> ReplicaValueError:
        """The positional arguments are not a list or tuple."""
        return cls(f"positional args must be a list or tuple, args=(x,); got {brief(given)}.")

    @classmethod
    def no_keywords(cls, given: object) -> ReplicaValueError:
        """The keyword arguments are not a mapping."""
        return cls(f"`kwargs` must be a mapping of names to arguments, kwargs={{'x': x}}, or None; got {brief(given)}.")

    @classmethod
    def no_strategy(cls, given: object) -> ReplicaValueError:
        """The first argument is not a strategy."""
        return cls(f"The first argument must be the strategy that the replicas belong to; got {brief(given)}.")

    @classmethod
    def bad_flag(cls, name: str, given: object) -> ReplicaValueError:
        """A flag is neither True nor False."""
        return cls(f"{name} must be True or False; got {brief(given)}.")

    @classmethod
    def bad_choice(cls, name: str, given: object, choices: Sequence[str]) -> ReplicaValueError:
        """A word is none of those that an argument takes."""
        return cls(f"{name} must be {', '.join(map(repr, choices))} or None; got {brief(given)}.")

    @classmethod
    def bad_trace_once(cls, given: object) -> ReplicaValueError:
        """The way to trace replicas is unknown."""
        return cls(f'trace_once must be True, False or "checked"; got {brief(given)}.')

    @classmethod
    def bad_rows(cls, name: str, given: object) -> ReplicaValueError:
        """A number of rows is negative or not an int."""
        return cls(f"{name} must be an int that is not negative, or None; got {brief(given)}.")

    @classmethod
    def no_rows(cls, value: object) -> ReplicaValueError:
        """The outputs of the replicas cannot be joined by rows."""
        return cls(
            "Outputs of replicas are joined by rows, so each leaf must be a tensor or an array on every replica; one "
            f"leaf is {brief(value)}."
        )

    @classmethod
    def bad_steps(cls, given: object) -> ReplicaValueError:
        """The number of micro-batches is not a positive int."""
        return cls(
            f"steps, the number of parts that a batch is computed in, must be a positive int; got {brief(given)}."
        )

    @classmethod
    def bad_accumulation(cls, given: object) -> ReplicaValueError:
        """The results of micro-batches are combined in an unknown way."""
        return cls(f'Results of the parts of a batch are combined with "mean" or "sum"; got {brief(given)}.')

    @classmethod
    def not_averaged(cls, dtype: str) -> ReplicaValueError:
        """A micro-batch returned a number that has no mean."""
        return cls(
            f"A result of a part of the batch is {dtype}, and only floating numbers are averaged. Cast it, "
            'tf.cast(x, tf.float32), or add the results up: accumulate(..., reduction="sum").'
        )
