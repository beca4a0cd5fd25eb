"""The callbacks of a spec, by name."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np

from soak.trainings.spec import Spec

Numbers = dict[str, np.ndarray]
"""Every number of a training, by a name that says when it was taken and what it is."""


class EachBatch(keras.callbacks.Callback):
    """Writes down the logs of each batch."""

    def __init__(self, numbers: Numbers, when: str):
        super().__init__()
        self.numbers, self.when = numbers, when

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._write("train", batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._write("test", batch, logs)

    def _write(self, kind: str, batch: int, logs: Any) -> None:
        count = sum(name.startswith(f"{self.when} {kind} ") for name in self.numbers)
        for name, value in (logs or {}).items():
            self.numbers[f"{self.when} {kind} {count:03d} batch {batch} {name}"] = np.asarray(value)


class SetRate(keras.callbacks.Callback):
    """Sets the learning rate at the beginning of each epoch."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.03 / (1 + epoch)


class SetWeights(keras.callbacks.Callback):
    """Sets all weights in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            weights = self.model.get_weights()
            self.model.set_weights([each * 0.9 if np.issubdtype(each.dtype, np.floating) else each for each in weights])


def made(spec: Spec, numbers: Numbers, when: str, folder: str) -> list[keras.callbacks.Callback]:
    """The callbacks of one `fit`."""
    monitor = "val_loss" if spec.validation else "loss"
    kinds = {
        "each_batch": lambda: EachBatch(numbers, when),
        "schedule": lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
        "plateau": lambda: keras.callbacks.ReduceLROnPlateau(monitor=monitor, patience=0, min_delta=0.5),
        "early_stopping": lambda: keras.callbacks.EarlyStopping(
            monitor, min_delta=0.3, restore_best_weights=True, mode="min"
        ),
        "checkpoint": lambda: keras.callbacks.ModelCheckpoint(
            os.path.join(folder, "best.weights.h5"), monitor, save_weights_only=True, save_best_only=True, mode="min"
        ),
        "set_rate": SetRate,
        "set_weights": SetWeights,
        "swap_ema": keras.callbacks.SwapEMAWeights,
    }
    ema = spec.optimizer.options.get("use_ema", False) and not spec.loss_scale
    return [kinds[name]() for name in spec.callbacks if ema or name != "swap_ema"]
