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
    def bad_call(cls, form: str, reason: str) -> ParityArgumentError:
        """An argument of `check_parity` is missing or unknown."""
        return cls(f"{form}: {reason}")

    @classmethod
    def no_targets(cls, model: str) -> ParityArgumentError:
        """The model is compiled with a loss, and there is no `y`."""
        return cls(
            f"The model {model!r} is compiled with a loss, and the data has no targets for it. Pass them, "
            "check_parity(model, x, y), or a dataset of (x, y). A model that is not compiled needs no targets: its "
            "layers and predictions are compared."
        )

    @classmethod
    def bad_variables(cls, given: object) -> ParityArgumentError:
        """`variables` holds something that is not a tf.Variable, such as the targets or a model."""
        shape = getattr(given, "shape", None)
        got = brief(given) if shape is None else f"{type(given).__name__} of shape {shown(tuple(shape))}"
        return cls(
            "variables must be a tf.Variable, a structure of them, or a function that makes what the step uses, also "
            f"Keras models, layers, optimizers and tf.Modules: variables=lambda: ...; got {got}. All parts of a batch "
            "go into the second argument: check_parity(step, (x, y), variables)."
        )

    @classmethod
    def not_called_so(cls, step: str, signature: str, given: int, reason: str) -> ParityArgumentError:
        """The step does not accept the parts of a batch as its arguments."""
        return cls(
            f"{step}{signature} cannot be called with a batch of {given} part{'s' * (given != 1)}: {reason}. "
            "check_parity calls step(*batch) or step(batch). The batch is the second argument: "
            "check_parity(step, (x, y), variables). An argument that is named `weights` gets the weights of the rows; "
            "no other name does. With `variables`, they come first: step(variables, *batch)."
        )

    @classmethod
    def not_passed(cls, step: str, names: Sequence[str]) -> ParityArgumentError:
        """The step changes variables that were not passed as `variables`."""
        listed = ", ".join(names)
        return cls(
            f"{step} changes variables that are not in `variables`: {listed}. Each strategy needs variables of its "
            f"own. Pass them, and take the copies as the step's first argument: def {step}(variables, ...), "
            f"check_parity({step}, inputs, variables=[{listed}]). For models and optimizers, pass a function that "
            'makes them: variables=lambda: {"model": ..., "optimizer": ...}.'
        )

    @classmethod
    def nothing_compared(cls, step: str) -> ParityArgumentError:
        """The step returns no numbers, and no variables were named."""
        return cls(
            f"{step} returned no numbers, and no `variables` were passed, so there is nothing to compare. Return the "
            "loss, and pass the variables that the step updates."
        )
