"""The summary of the benchmarks: ten rows, each beside one peer, that stand for what users do most."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.keras_training import JAX, THEIRS, THREADS, XLA
from benchmarks.measure import Comparison, Row
from benchmarks.models import FIRST_START
from benchmarks.report import Report, aligned, digits


class Chosen(NamedTuple):
    """A row of the summary: where it is in the report, and how the summary calls it."""

    title: str
    group: str
    name: str
    replicas: int
    contender: str
    peer: str


CHOSEN = (
    Chosen("an eager run with one merge call", "eager_run", "one merge call", 4, "MirroredStrategy", "tf.distribute"),
    Chosen("training step, dense layers", "train_step", "mlp", 4, "MirroredStrategy", "tf.distribute"),
    Chosen("training step, 201 small gradients", "train_step", "small", 4, "MirroredStrategy", "tf.distribute"),
    Chosen("first step of ResNet-50", "start_up", "first step of ResNet-50", 4, "MirroredStrategy", "tf.distribute"),
    Chosen("Keras fit, transformer", "keras_fit", "transformer", 4, "replicate_model", "tf.distribute"),
    Chosen("Keras fit, dense layers, two cores", "keras_fit", "dense", 4, "replicate_model", "one device"),
    Chosen("training step, convolutions", "train_step", "conv", 4, "TPUStrategy", "JAX"),
    Chosen("training step, 201 small gradients", "train_step", "small", 4, "TPUStrategy", "JAX"),
    Chosen("one launch of a tiny program", "launch", "one launch of a tiny body", 4, "TPUStrategy.run", "jax.jit"),
    Chosen("a step of 100 in one launch", "launch", "a step of 100 in a launch", 4, "TPUStrategy.run_steps", "jax.jit"),
)
"""Rows in which this library is slower belong here as well: the reader must be able to rely on the picture."""


def _model(what: str, replicas: int, contender: str, peer: str) -> Chosen:
    return Chosen(f"{what}, N = {replicas}", "models", what, replicas, contender, peer)


OF_MODELS = (
    _model("ResNet-50, step", 4, THREADS, THEIRS),
    _model("ResNet-50, first step", 4, THREADS, THEIRS),
    _model("BERT tiny, step", 4, THREADS, THEIRS),
    _model("LSTM language model, step", 4, THREADS, THEIRS),
    _model("ResNet-50, step", 1, XLA, JAX),
    _model("ResNet-50, first step", 1, XLA, JAX),
    _model("ResNet-50, second start", 1, XLA, FIRST_START),
    _model("MobileNetV2, step", 1, XLA, JAX),
    _model("BERT tiny, step", 1, XLA, JAX),
    _model("LSTM language model, step", 1, XLA, JAX),
)
"""The rows of the summary when the report has all of them: real models, chosen before they were measured."""


def rows(report: Report) -> list[tuple[Chosen, Row, Comparison]]:
    """The rows of the summary: of real models, or those of `CHOSEN` that the report has."""
    of_models = _found(report, OF_MODELS)
    return of_models if len(of_models) == len(OF_MODELS) else _found(report, CHOSEN)


def _found(report: Report, wanted: Sequence[Chosen]) -> list[tuple[Chosen, Row, Comparison]]:
    found = []
    for chosen in wanted:
        for row in report.of(chosen.group):
            if (row.name, row.replicas, row.contender) == (chosen.name, chosen.replicas, chosen.contender):
                found += [(chosen, row, each) for each in row.comparisons if each.peer == chosen.peer]
    return found


def table(report: Report) -> str:
    """The rows as a Markdown table."""
    lines = [["what", "here", "time", "compared with", "its time", "ratio", "target"]]
    for chosen, row, each in rows(report):
        target = "" if each.target is None else f"{each.target:.2f}, {'met' if each.met else 'missed'}"
        times = [f"{digits(_median(figures))} {row.unit}" for figures in (row.ours, row.peers[each.peer])]
        ratio = f"**{each.ratio:.2f}**"
        lines.append([chosen.title, f"`{chosen.contender}`", times[0], chosen.peer, times[1], ratio, target])
    return aligned(lines)


def _median(figures: list[float]) -> float:
    return statistics.median(figures)
