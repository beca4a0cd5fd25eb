"""Parity checks: results that differ between one device and N replicas, and checks that cannot be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replica_engine.errors.base import ReplicaEngineError, brief, shown


class ParityError(ReplicaEngineError, AssertionError):
    """N replicas compute other numbers than one device. The message is the report of `check_parity`.

    Raised by `raise_if_different` of the report. Begin with the first difference that it lists: what comes after it may
    follow from it. Known causes that it finds say what to write.
    """


class ParityArgumentError(ReplicaEngineError, ValueError):
    """`check_parity` cannot check what it was given.

    Raised by `check_parity`. Write the call as the message shows: a model with its data, or a step, its batch and the
    variables that it changes.
    """

    @classmethod
    def unknown_strategy(cls, given: object) -> ParityArgumentError:
        """An item of `strategies` is neither a strategy nor the name of one."""
        return cls(
            'strategies must list "MirroredStrategy", "TPUStrategy", or strategies of this library with that many '
            f"replicas, or be None for all strategies that can run here; got {brief(given)}."
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
    def not_passed(cls, step: str, names: Sequence[str]) -> ParityArgumentError:
        """The step changes variables that were not passed as `variables`."""
        listed = ", ".join(names)
        return cls(
            f"{step} changes variables that are not in `variables`: {listed}. Each strategy needs variables of its "
            f"own. Pass them, and take the copies as the step's first argument: def {step}(variables, ...), "
            f"check_parity({step}, inputs, variables=[{listed}]). For models and optimizers, pass a function that "
            'makes them: variables=lambda: {"model": ..., "optimizer": ...}.'
        )
