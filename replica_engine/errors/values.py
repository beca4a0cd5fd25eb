"""Values that replicas cannot be given, or that cannot be brought together: said before any replica starts."""

from __future__ import annotations

from replica_engine.errors.base import ReplicaEngineError, brief


class ReplicaValueError(ReplicaEngineError, ValueError, TypeError):
    """A value, or a structure of values, that cannot be handed to replicas, reduced, or joined."""

    @classmethod
    def other_size(cls, name: str, given: int, size: int) -> ReplicaValueError:
        """A distributed value of another number of replicas."""
        return cls(
            f"{name} is a distributed value of {given} replica{'' if given == 1 else 's'}, and there are {size} here. "
            "Values of one strategy are for its own replicas: make this one again with "
            "strategy.experimental_distribute_values_from_function(fn)."
        )

    @classmethod
    def distributed(cls, name: str) -> ReplicaValueError:
        """A distributed value inside of another."""
        return cls(
            f"{name} is a distributed value whose components are distributed values. Give each replica a tensor, or "
            "a structure of tensors."
        )

    @classmethod
    def endless(cls, what: str) -> ReplicaValueError:
        """A structure that is too deep to be walked through."""
        return cls(
            f"A structure among {what} contains itself, or has more levels of lists, tuples and mappings than Python "
            "can follow. Keep tensors in a few levels; hide an object that refers to itself in a class of your own."
        )

    @classmethod
    def no_tensor(cls, name: str, value: object, reason: str) -> ReplicaValueError:
        """An array or number that cannot become a tensor."""
        return cls(f"{name} cannot become a tensor: {reason.rstrip('.')}. It is {brief(value)}.")

    @classmethod
    def not_reducible(cls, value: object) -> ReplicaValueError:
        """Components that are no tensors."""
        return cls(
            f"Values of replicas are reduced as tensors, and a replica has {brief(value)}. Return tensors or numbers "
            "from the replicas; of ragged and sparse tensors, reduce the parts: x.flat_values, tf.sparse.to_dense(x)."
        )

    @classmethod
    def sum_of_one(cls, value: object) -> ReplicaValueError:
        """The sum of what is one value for all replicas."""
        return cls(
            f"The sum over replicas of {brief(value)} is not defined: it is one value for all of them, not one for "
            "each. Read it as it is, reduce it with MEAN, or return its value from the replicas: v.read_value()."
        )

    @classmethod
    def bad_reduction(cls, given: object) -> ReplicaValueError:
        """No reduction."""
        return cls(f'Values are reduced with "SUM" or "MEAN", or a tf.distribute.ReduceOp; got {brief(given)}.')

    @classmethod
    def bad_axis(cls, given: object) -> ReplicaValueError:
        """No dimension to reduce along."""
        return cls(f"`axis` is an int, a tuple of several, or None to reduce over replicas only; got {brief(given)}.")

    @classmethod
    def no_function(cls, given: object) -> ReplicaValueError:
        """Nothing to call."""
        return cls(
            f"Replicas run a function: `run` takes a function, and its arguments in args=(...). Got {brief(given)}."
        )

    @classmethod
    def no_positional(cls, given: object) -> ReplicaValueError:
        """No list of arguments."""
        return cls(f"positional args must be a list or tuple, args=(x,); got {brief(given)}.")

    @classmethod
    def no_keywords(cls, given: object) -> ReplicaValueError:
        """No mapping of arguments."""
        return cls(f"`kwargs` must be a mapping of names to arguments, kwargs={{'x': x}}, or None; got {brief(given)}.")

    @classmethod
    def no_strategy(cls, given: object) -> ReplicaValueError:
        """Something that has no replicas."""
        return cls(f"The first argument is the strategy whose replicas it is for; got {brief(given)}.")

    @classmethod
    def bad_flag(cls, name: str, given: object) -> ReplicaValueError:
        """Neither yes nor no."""
        return cls(f"{name} is True or False; got {brief(given)}.")

    @classmethod
    def bad_rows(cls, name: str, given: object) -> ReplicaValueError:
        """A number of rows that is none."""
        return cls(f"{name} must be an int that is not negative, or None; got {brief(given)}.")

    @classmethod
    def no_rows(cls, value: object) -> ReplicaValueError:
        """Outputs that cannot be joined."""
        return cls(
            "Outputs of replicas are joined by rows: each leaf has to be a tensor or an array on every replica; one is "
            f"{brief(value)}."
        )
