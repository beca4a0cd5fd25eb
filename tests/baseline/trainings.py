"""Keras models that `fit` trains, in a scope or replicated: the random trainings of the soak, cut to three batches."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

from soak.trainings import draw as draws
from soak.trainings import judge
from soak.trainings.run import trained
from soak.trainings.spec import COMPILED, REPLICATE, SCOPE, THREADS, Head, Spec
from tests.baseline.start import Numbers, Start

KINDS = tuple(itertools.product((THREADS, COMPILED), (SCOPE, REPLICATE, REPLICATE)))
OPERATIONS = {"text": 8, "several": 8, "Bidirectional": 10} | dict.fromkeys(
    ("GRU", "LSTM", "SimpleRNN", "MultiHeadAttention", "GroupQueryAttention"), 5
)
"""About how many times longer than one of a dense layer a trace of these inputs and layers takes."""
MOST = 66

WANTED: tuple[Callable[[Spec], bool], ...] = (
    lambda spec: len(spec.heads) > 1,
    lambda spec: spec.between is not None or spec.api == SCOPE,
    lambda spec: spec.sample_weight or spec.class_weight or spec.api == SCOPE,
    lambda spec: spec.mask_zero,
    lambda spec: spec.loss_scale or "gradient_accumulation_steps" in spec.optimizer.options,
    lambda spec: len({*spec.sizes}) > 1 or min(spec.sizes) < spec.replicas or spec.api == SCOPE,
    lambda spec: "use_ema" in spec.optimizer.options and bool(spec.callbacks),
    lambda spec: spec.style != "functional" or spec.api == SCOPE,
    lambda spec: any(key.startswith(("clip", "global_clip")) for key in spec.optimizer.options) or spec.api == SCOPE,
)
"""What trainings have in turn: each of these comes under each strategy and API."""


def drawn(draw: random.Random, index: int) -> Spec:
    """A training on several replicas that takes little time."""
    wanted = WANTED[index // len(KINDS) % len(WANTED)]
    while True:
        spec = draws.drawn(draw.randrange(1_000_000))
        if (spec.strategy, spec.api) == KINDS[index % len(KINDS)] and spec.replicas > 1 and wanted(spec):
            cut = _cut(spec, index)
            if _traced(cut) <= MOST and wanted(cut):
                return cut


def _traced(spec: Spec) -> float:
    """About how many operations are traced to train, to test and to predict, for each thread or each program."""
    layers = 2 + OPERATIONS.get(spec.inputs, 0) + sum(OPERATIONS.get(part.name, 1) for part in spec.body)
    heads = sum(1 + len(head.metrics) + len(head.weighted) for head in spec.heads)
    times = 3 * spec.replicas if spec.strategy == THREADS else 3 * (len({*spec.sizes}) + 1)
    return (layers + heads) * times * (1.4 if spec.between else 1)


def _cut(spec: Spec, index: int) -> Spec:
    """Three batches of one epoch, in float64 where Keras computes all of it in float64."""
    cut = dataclasses.replace(
        spec,
        sizes=(spec.sizes * 2)[:3],
        epochs=1,
        limit=None,
        validation=spec.validation if index % 4 == 0 else None,
        callbacks=spec.callbacks[:1],
    )
    double = dataclasses.replace(cut, dtype="float64", heads=tuple(map(_in_float64, spec.heads)))
    single = spec.loss_scale or index % 5 == 4 or judge.tolerance(double) != judge.TOLERANCES["float64"]
    return dataclasses.replace(cut, dtype="float32") if single else double


def _in_float64(head: Head) -> Head:
    """The output without the metric that Keras refuses in float64."""
    metrics, weighted = (
        tuple(each for each in of if each.name != "SparseTopKCategoricalAccuracy")
        for of in (head.metrics, head.weighted)
    )
    return head._replace(metrics=metrics, weighted=weighted)


def run(spec: Spec, start: Start) -> Numbers:
    """Trains it, and either evaluates or predicts: each takes as long to trace as the training."""
    return trained(spec, nudge=start.nudge, uses=("evaluate",) if spec.seed % 3 == 0 else ("predict",))
