"""The summary of the benchmarks: ten rows, each beside one peer, that stand for what users do most."""

from __future__ import annotations

import statistics
from typing import NamedTuple

from benchmarks.keras_training import JAX, THEIRS, THREADS, XLA
from benchmarks.measure import Comparison, Row
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
    Chosen("Keras fit, dense layers, N = 2", "keras_fit", "dense", 2, "replicate_model", "one device"),
    Chosen("Keras fit, dense layers, N = 4", "keras_fit", "dense", 4, "replicate_model", "tf.distribute"),
    Chosen("ResNet-50, step, N = 4", "models", "ResNet-50, step", 4, THREADS, THEIRS),
    Chosen("ResNet-50, first step, N = 4", "models", "ResNet-50, first step", 4, THREADS, THEIRS),
    Chosen("BERT tiny, step, N = 4", "models", "BERT tiny, step", 4, THREADS, THEIRS),
    Chosen("ResNet-50, step, N = 1", "models", "ResNet-50, step", 1, XLA, JAX),
    Chosen("ResNet-50, first step, N = 1", "models", "ResNet-50, first step", 1, XLA, JAX),
    Chosen("BERT tiny, step, N = 1", "models", "BERT tiny, step", 1, XLA, JAX),
    Chosen("LSTM language model, step, N = 1", "models", "LSTM language model, step", 1, XLA, JAX),
    Chosen("ResNet-50, estimated cycles of TPU v5e, N = 8", "aot", "ResNet-50, 224x224, float32: cycles", 8, XLA, JAX),
)
"""What a user asks about, with the peer that they have today.

Rows in which this library is slower belong here as well: the reader must be able to rely on the picture. Targets are
ours alone, and stand on the pages of the groups.
"""


def rows(report: Report) -> list[tuple[Chosen, Row, Comparison]]:
    """The chosen rows that the report has."""
    found = []
    for chosen in CHOSEN:
        for row in report.list_rows(chosen.group):
            if (row.name, row.replicas, row.contender) == (chosen.name, chosen.replicas, chosen.contender):
                found += [(chosen, row, each) for each in row.comparisons if each.peer == chosen.peer]
    return found


def called(peer: str) -> str:
    """What a reader who has not seen the benchmark calls the peer."""
    return {"one device": "plain Keras, one device"}.get(peer, peer)


def table(report: Report) -> str:
    """The rows as a Markdown table."""
    lines = [["what", "here", "time", "compared with", "its time", "ratio"]]
    for chosen, row, each in rows(report):
        times = [f"{digits(statistics.median(figures))} {row.unit}" for figures in (row.ours, row.peers[each.peer])]
        ratio = f"**{each.ratio:.2f}**"
        lines.append([chosen.title, f"`{chosen.contender}`", times[0], called(chosen.peer), times[1], ratio])
    return aligned(lines)
