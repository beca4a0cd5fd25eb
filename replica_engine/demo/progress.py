"""How far a training is: a bar on the terminal, and a line for each epoch."""

from __future__ import annotations

from types import TracebackType

from tqdm import tqdm


class Progress:
    """A progress bar over all steps, on stderr, with a line on stdout for each epoch above it.

    Where stderr is no terminal (a pipe, a log file) there is no bar, and the lines remain.

    Args:
        label: what is being trained.
        epochs: how many.
        steps_per_epoch: steps in each of them.
        epoch_lines: whether to print a line for each epoch.
    """

    def __init__(self, label: str, *, epochs: int, steps_per_epoch: int, epoch_lines: bool = True):
        self._epochs = epochs
        self._epoch = 1
        self._epoch_lines = epoch_lines
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
        """One step is done, and this was its loss."""
        self._bar.set_postfix_str(f"epoch {self._epoch}/{self._epochs}, loss {loss:.4f}", refresh=False)
        self._bar.update()

    def epoch(self, *, loss: float, accuracy: float) -> None:
        """An epoch is done, with this mean loss and accuracy over its training samples."""
        if self._epoch_lines:
            self._bar.clear()
            width = len(str(self._epochs))
            line = f"  epoch {self._epoch:{width}}/{self._epochs}   loss {loss:.4f}   accuracy {accuracy:.4f}"
            print(line, flush=True)
        self._epoch += 1

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
