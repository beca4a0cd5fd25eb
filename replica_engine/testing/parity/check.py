"""The course of a parity check, which is the same for a model and for a step.

The run on one device comes first and gives the numbers that are expected. Then each strategy computes the same numbers,
from the same weights on the same batches. What differs is listed, and only then are known causes looked for: a model
with Dropout is not wrong.
"""

from __future__ import annotations

import abc
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replica_engine.errors import LoweringError
from replica_engine.testing.parity.comparison import Computed, Tolerance, compare
from replica_engine.testing.parity.report import ONE_DEVICE, Cause, Difference, ParityReport
from replica_engine.testing.parity.settings import Settings
from replica_engine.values import samples

logger = logging.getLogger("replica_engine")


class Check(abc.ABC):
    """A parity check of a model or of a step.

    Args:
        subject: what is checked, in words.
        given: the arguments of the check.
        batches: the batches of the training steps.

    Attributes:
        limits: the tolerance; known at the latest when one device has run.
        notes: further information for the reader of the report.
    """

    limits: Tolerance

    def __init__(self, subject: str, given: Settings, batches: Sequence[Any]):
        self.subject, self.given, self.batches = subject, given, batches
        self.notes: list[str] = []

    @abc.abstractmethod
    def run(self, says: str, strategy: tf.distribute.Strategy | None) -> Computed:
        """Computes the numbers of a strategy, or of one device (None); `says` is its name in the log."""

    @abc.abstractmethod
    def causes(
        self, differences: Sequence[Difference], expected: Computed, runs: Mapping[str, Computed]
    ) -> Iterable[Cause]:
        """Looks for known causes of the differences."""

    def report(self) -> ParityReport:
        """Runs, compares, and reports.

        Raises:
            LoweringError: XLA cannot compile the only strategy.
        """
        expected = self.run(ONE_DEVICE, None)
        runs: dict[str, Computed] = {}
        for name, strategy in self.given.strategies.items():
            try:
                runs[name] = self.run(name, strategy)
            except LoweringError as error:
                if len(self.given.strategies) == 1:
                    raise
                self.given.left_out[name] = str(error)
        compared, differences = compare(expected, runs, self.limits)
        causes: tuple[Cause, ...] = ()
        if any(each.strategy in runs for each in differences):
            try:
                causes = tuple(dict.fromkeys(self.causes(differences, expected, runs)))
            except Exception as error:  # a model may not be traceable, a step may refuse the rows of one replica
                self.notes.append(f"The search for known causes failed: {type(error).__name__}: {error}")
        return ParityReport(
            subject=self.subject,
            replicas=self.given.replicas,
            strategies=tuple(runs),
            left_out=self.given.left_out,
            batches=tuple(samples.count(each) for each in self.batches),
            tolerance=str(self.limits),
            compared=compared,
            differences=differences,
            causes=causes,
            notes=tuple(self.notes),
            seed=self.given.seed,
        )
