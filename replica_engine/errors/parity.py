"""Parity checks: results that differ between one device and N replicas, and checks that cannot be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replica_engine.errors.base import ReplicaEngineError, brief, shown


class ParityError(ReplicaEngineError, AssertionError):
    """N replicas compute other numbers than one device. The message is the report of `check_parity`."""

    @classmethod
    def different(cls, report: str) -> ParityError:
        """`raise_if_different` was called on a report with differences."""
        return cls(report)


class ParityArgumentError(ReplicaEngineError, ValueError):
    """`check_parity` cannot check what it was given."""

    @classmethod
    def not_checkable(cls, given: object) -> ParityArgumentError:
        """The first argument is neither a model nor a step."""
        return cls(
            "check_parity takes a Keras model, check_parity(model, x, y), or a function that is one training step, "
            f"check_parity(step, inputs, variables); got {brief(given)}."
        )

    @classmethod
    def bad_number(cls, name: str, given: object) -> ParityArgumentError:
        """The number of replicas, steps or rows is not a positive int."""
        return cls(f"{name} must be a positive int; got {shown(given)}.")

    @classmethod
    def bad_tolerance(cls, name: str, given: object) -> ParityArgumentError:
        """The tolerance is negative or not a number."""
        return cls(f"{name} must be a number, 0 or larger, or None for the default; got {shown(given)}.")

    @classmethod
    def bad_reduction(cls, given: object) -> ParityArgumentError:
        """The reduction of what the replicas' steps return is unknown."""
        return cls(f'reduction must be "mean", "sum" or None; got {shown(given)}.')

    @classmethod
    def unknown_strategy(cls, given: object) -> ParityArgumentError:
        """An item of `strategies` is neither a strategy nor the name of one."""
        return cls(
            'strategies must list "MirroredStrategy", "TPUStrategy", or strategies of this library with that many '
            f"replicas, or be None for all strategies that can run here; got {brief(given)}."
        )

    @classmethod
    def other_size(cls, strategy: str, present: int, replicas: int) -> ParityArgumentError:
        """A strategy has another number of replicas than the check."""
        return cls(
            f"The {strategy} in strategies has {present} replicas, but replicas={replicas}. Make them equal: "
            f"check_parity(..., replicas={present}, strategies=[strategy])."
        )

    @classmethod
    def nothing_to_compare(cls, left_out: Mapping[str, str]) -> ParityArgumentError:
        """No strategy can run here."""
        reasons = "".join(f"\n- {name}: {reason}" for name, reason in left_out.items())
        return cls(f"No strategy can be compared with one device here:{reasons}")

    @classmethod
    def no_rows(cls) -> ParityArgumentError:
        """The data has no rows."""
        return cls("The data has no rows, so there is no batch to compare on.")

    @classmethod
    def not_called_so(cls, step: str, signature: str, given: int) -> ParityArgumentError:
        """The step does not accept the parts of a batch as its arguments."""
        return cls(
            f"{step}{signature} cannot be called with a batch of {given} part{'s' * (given != 1)}. check_parity calls "
            "step(*batch), step(*batch, weights) or step(batch); if `variables` is a function, its result comes first: "
            "step(made, *batch)."
        )

    @classmethod
    def unreached(cls, names: Sequence[str]) -> ParityArgumentError:
        """The check cannot find how the step reaches some of the variables."""
        return cls(
            f"The step does not reach {', '.join(names)} through its closure, its globals or its arguments, so the "
            "replicas cannot be given copies. Pass a function that makes the variables, and take them as the step's "
            "first argument: "
            'check_parity(lambda v, x: ..., inputs, variables=lambda: {"w": tf.Variable(...)}).'
        )

    @classmethod
    def runs_itself(cls, step: str) -> ParityArgumentError:
        """The step calls `strategy.run`."""
        return cls(
            f"{step} calls the run method of a strategy. check_parity does that itself, on each strategy that it "
            "compares. Pass the function that one replica runs: the function that `strategy.run` is given."
        )

    @classmethod
    def nothing_compared(cls, step: str) -> ParityArgumentError:
        """The step returns no numbers, and no variables were named."""
        return cls(
            f"{step} returned no numbers, and no `variables` were passed, so there is nothing to compare. Return the "
            "loss, and pass the variables that the step updates."
        )
