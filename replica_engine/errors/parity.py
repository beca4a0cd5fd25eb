"""Parity checks: results that differ between one device and N replicas, and checks that cannot be made."""

from __future__ import annotations

from replica_engine.errors.base import ReplicaEngineError


class ParityError(ReplicaEngineError, AssertionError):
    """N replicas compute other numbers than one device. The message is the report of `check_parity`.

    Raised by `raise_if_different` of the report. Begin with the first difference that it lists: what comes after it may
    follow from it.
    """


class ParityArgumentError(ReplicaEngineError, ValueError):
    """`check_parity` cannot check what it was given.

    Raised by `check_parity`. Write the call as the message shows: a model with its data.
    """
