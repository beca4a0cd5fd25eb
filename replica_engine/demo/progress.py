"""Shows the progress of a training: a bar on the terminal, and a line for each epoch."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from types import TracebackType

from tqdm import tqdm


class Progress:
    """A progress bar over all steps, on stderr, and above it a line on stdout for each epoch.

    If stderr is not a terminal (a pipe, a log file), the bar is not shown, and the lines remain.

    Args:
        label: the name of the training.
        epochs: the number of epochs.
        steps_per_epoch: the number of steps in each epoch.
        epoch_lines: whether to print a line for each epoch.

    Attributes:
        losses: the mean loss of each epoch so far.
    """

    def __init__(self, label: str, *, epochs: int, steps_per_epoch: int, epoch_lines: bool = True):
        self._epochs = epochs
        self._epoch = 1
        self._epoch_lines = epoch_lines
        self._ended: list[float] = []
        self.losses: list[float] = []
        # disable=None: no bar unless stderr is a terminal.
        self._bar = tqdm(
            total=epochs * steps_per_epoch,
            desc=f"  {label}",
            unit="step",
            leave=False,
            disable=None,
            dynamic_ncols=True,
        )

    def step(self, loss: float) -> None:
        """Counts one finished step, with its loss."""
        self._ended.append(time.perf_counter())
        self._bar.set_postfix_str(f"epoch {self._epoch}/{self._epochs}, loss {loss:.4f}", refresh=False)
        self._bar.update()

    def epoch(self, *, loss: float, accuracy: float) -> None:
        """Counts one finished epoch, with its mean loss and accuracy over the training samples."""
        self.losses.append(loss)
        if self._epoch_lines:
            self._bar.clear()
            width = len(str(self._epochs))
            line = f"  epoch {self._epoch:{width}}/{self._epochs}   loss {loss:.4f}   accuracy {accuracy:.4f}"
            print(line, flush=True)
        self._epoch += 1

    @property
    def seconds_a_step(self) -> float:
        """The median time from the end of a step to the end of the next; nan before there are two."""
        between = [end - begin for begin, end in itertools.pairwise(self._ended)]
        return statistics.median(between) if between else math.nan

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
