"""The picture at the end of the demo: the loss of each training, and how many samples a second N replicas train on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib import figure, ticker
from matplotlib.axes import Axes

COLOURS = {"custom": "#2a9d8f", "keras": "#e76f51"}


@dataclass(frozen=True)
class Trained:
    """A training for the picture.

    Attributes:
        loop: which training loop, "custom" or "keras".
        replicas: on how many replicas.
        losses: the mean loss of each epoch; empty if only the throughput counts.
        rate: samples a second, by the median time of a step.
    """

    loop: str
    replicas: int
    losses: Sequence[float]
    rate: float


def draw(trained: list[Trained], path: str) -> None:
    """Writes the picture; its suffix (.png, .svg, .pdf) selects the format."""
    whole = figure.Figure(figsize=(10, 4), layout="constrained")
    left, right = whole.subplots(1, 2)
    _losses(left, [each for each in trained if each.losses])
    _rates(right, trained)
    most = max(each.replicas for each in trained)
    whole.suptitle(f"Handwritten digits: {most} replicas train as one device does", x=0.01, ha="left")
    whole.savefig(path, dpi=130)


def _losses(axes: Axes, trained: list[Trained]) -> None:
    for each in trained:
        epochs = range(1, len(each.losses) + 1)
        one = each.replicas == 1
        # The one device is drawn thick and pale, so that the line of the replicas is seen to lie on it.
        axes.plot(
            epochs,
            each.losses,
            "--" if not one else "-",
            color=COLOURS[each.loop],
            linewidth=6 if one else 1.8,
            alpha=0.35 if one else 1.0,
            marker=None if one else "o",
            label=f"{each.loop} loop, {'one device' if one else f'{each.replicas} replicas'}",
        )
    axes.set(title="Training loss, lower is better", xlabel="epoch", ylim=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)


def _rates(axes: Axes, trained: list[Trained]) -> None:
    counts = sorted({each.replicas for each in trained})
    loops = list(dict.fromkeys(each.loop for each in trained))
    width = 0.8 / len(loops)
    for place, loop in enumerate(loops):
        rates = {each.replicas: each.rate for each in trained if each.loop == loop}
        at = [counts.index(count) + (place - (len(loops) - 1) / 2) * width for count in rates]
        bars = axes.bar(at, list(rates.values()), width=width * 0.92, color=COLOURS[loop], label=f"{loop} loop")
        axes.bar_label(bars, fmt="{:,.0f}", fontsize=8)
    axes.set_xticks(range(len(counts)), [str(count) for count in counts])
    cores = os.cpu_count()
    axes.set(title="Samples a second, higher is better", xlabel=f"N: replicas on this machine ({cores} cores)")
    axes.legend(frameon=False)
    axes.margins(y=0.2)
