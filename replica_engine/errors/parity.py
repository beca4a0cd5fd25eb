"""Parity checks: numbers that differ between one device and N replicas, and checks that cannot be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replica_engine.errors.base import ReplicaEngineError, brief, shown


class ParityError(ReplicaEngineError, AssertionError):
    """Replicas compute other numbers than one device. Its text is the report of `check_parity`."""

    @classmethod
    def different(cls, report: str) -> ParityError:
        """`raise_if_different` of a report with differences."""
        return cls(report)


class ParityArgumentError(ReplicaEngineError, ValueError):
    """`check_parity` was given what it cannot check."""

    @classmethod
    def not_checkable(cls, given: object) -> ParityArgumentError:
        """The first argument is neither a model nor a step."""
        return cls(
            "check_parity takes a Keras model, check_parity(model, x, y), or a function that is one training step, "
            f"check_parity(step, inputs, variables); got {brief(given)}."
        )

    @classmethod
    def bad_number(cls, name: str, given: object) -> ParityArgumentError:
        """A number of replicas, steps or rows that is not a positive int."""
        return cls(f"{name} must be a positive int; got {shown(given)}.")

    @classmethod
    def bad_tolerance(cls, name: str, given: object) -> ParityArgumentError:
        """A tolerance that is not a number."""
        return cls(f"{name} must be a number, 0 or larger, or None for the default; got {shown(given)}.")

    @classmethod
    def bad_reduction(cls, given: object) -> ParityArgumentError:
        """An unknown way to bring together what the replicas' steps return."""
        return cls(f'reduction must be "mean", "sum" or None; got {shown(given)}.')

    @classmethod
    def unknown_strategy(cls, given: object) -> ParityArgumentError:
        """Something in `strategies` that names no strategy."""
        return cls(
            'strategies lists "MirroredStrategy" and "TPUStrategy", or strategies of this library that have that many '
            f"replicas, or is None for all that can run here; got {brief(given)}."
        )

    @classmethod
    def other_size(cls, strategy: str, present: int, replicas: int) -> ParityArgumentError:
        """A strategy of another number of replicas."""
        return cls(
            f"The {strategy} in strategies has {present} replicas, and replicas={replicas}. Make them equal: "
            f"check_parity(..., replicas={present}, strategies=[strategy])."
        )

    @classmethod
    def nothing_to_compare(cls, left_out: Mapping[str, str]) -> ParityArgumentError:
        """No strategy can run here."""
        reasons = "".join(f"\n- {name}: {reason}" for name, reason in left_out.items())
        return cls(f"No strategy can be compared with one device here:{reasons}")

    @classmethod
    def no_rows(cls) -> ParityArgumentError:
        """Data without a single row."""
        return cls("The data has no rows, so there is no batch to compare on.")

    @classmethod
    def not_called_so(cls, step: str, signature: str, given: int) -> ParityArgumentError:
        """A step that does not take the parts of a batch."""
        return cls(
            f"{step}{signature} cannot be called with a batch of {given} part{'s' * (given != 1)}. check_parity calls "
            "step(*batch), step(*batch, weights) or step(batch); where `variables` is a function, what it returns "
            "comes first: step(made, *batch)."
        )

    @classmethod
    def unreached(cls, names: Sequence[str]) -> ParityArgumentError:
        """Variables that the step does not use by a way that can be followed."""
        return cls(
            f"The step does not reach {', '.join(names)} by its closure, its globals or its arguments, so replicas "
            "cannot be given copies. Pass a function that makes the variables, and take them as the first argument: "
            'check_parity(lambda v, x: ..., inputs, variables=lambda: {"w": tf.Variable(...)}).'
        )

    @classmethod
    def runs_itself(cls, step: str) -> ParityArgumentError:
        """A step that calls `strategy.run`."""
        return cls(
            f"{step} calls the run of a strategy. check_parity does that, on each strategy that it compares: pass the "
            "function that one replica runs, which is what `strategy.run` is given."
        )

    @classmethod
    def nothing_compared(cls, step: str) -> ParityArgumentError:
        """A step that returns nothing and changes nothing that was named."""
        return cls(
            f"{step} returned no numbers, and there are no `variables`: there is nothing to compare. Return the loss, "
            "and pass the variables that the step updates."
        )
