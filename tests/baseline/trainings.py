"""Keras models that `fit` trains, in a scope or replicated: random trainings of the soak, cut to three batches.

They are kept as data in trainings.jsonl, one a line, so that they stay the same when the soak draws others.
"""

from __future__ import annotations

import pathlib
import random

from soak.trainings.run import TEST_BATCH, trained
from soak.trainings.spec import SCOPE, Spec
from tests.baseline.start import Numbers, Start

FILE = pathlib.Path(__file__).with_suffix(".jsonl")


def drawn(draw: random.Random, index: int) -> Spec:
    """The training of a number; `draw` has no say in it."""
    return Spec.from_json(FILE.read_text(encoding="utf-8").splitlines()[index])


def run(spec: Spec, start: Start) -> Numbers:
    """Trains it, and either evaluates or predicts: each takes as long to trace as the training."""
    uses = ("evaluate",) if spec.seed % 3 == 0 else ("predict",)
    return trained(spec, nudge=start.nudge, uses=uses, test_batch=spec.sizes[0] if spec.api == SCOPE else TEST_BATCH)
