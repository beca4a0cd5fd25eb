"""Parity checks: results that differ between one device and N replicas, and checks that cannot be made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from replica_engine.errors.base import ReplicaEngineError, brief


class ParityError(ReplicaEngineError, AssertionError):
    """N replicas compute other numbers than one device. The message is the report of `check_parity`.

    Raised by `raise_if_different` of the report. Begin with the first difference that it lists: what comes after it may
    follow from it.
    """


class ParityArgumentError(ReplicaEngineError, ValueError):
    """`check_parity` cannot check what it was given.

    Raised by `check_parity`. Write the call as the message shows: a model with its data.
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
    def other_replicas(cls, strategy: Any, replicas: int) -> ParityArgumentError:
        """A strategy has another number of replicas than was asked for."""
        name, present = type(strategy).__name__, strategy.num_replicas_in_sync
        return cls(
            f"The {name} in strategies has {present} replicas, but replicas={replicas}. Make them equal: "
            f"check_parity(..., replicas={present}, strategies=[strategy])."
        )

    @classmethod
    def no_model(cls, given: object) -> ParityArgumentError:
        """What is checked is no model, as a step of the user's own was in version 0.3."""
        return cls(
            f"check_parity takes a Keras model, check_parity(model, x, y); got {brief(given)}. A training loop of your "
            "own is compared by two runs, on one device and on N replicas, and np.allclose."
        )

    @classmethod
    def no_argument(cls, name: str) -> ParityArgumentError:
        """An argument is unknown, or was one of version 0.3."""
        instead = {
            "random_layers": ": make the model without layers that draw random numbers",
            "seed": ": leave it out, since all runs draw from one seed",
            "tolerance": ": write rtol",
        }
        return cls(f"check_parity(model, x, y, sample_weight) takes no argument {name}{instead.get(name, '')}.")
