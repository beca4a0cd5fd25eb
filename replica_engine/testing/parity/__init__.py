"""`check_parity`: do N replicas compute the numbers of one device?

- `of_model`: the check of a Keras model; `probes` looks into it, `model_causes` knows why models differ.
- `of_step`: the check of a training step of one's own; `rebinding` gives it variables of each strategy.
- `comparison`: when two numbers are the same; `report`: what was found.
- `settings`, `candidates`, `batches`, `state`, `random_draws`: what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import keras

from replica_engine.errors import ParityArgumentError
from replica_engine.testing.parity.of_model import check_model
from replica_engine.testing.parity.report import Cause, Compared, Difference, ParityReport
from replica_engine.testing.parity.settings import settings

__all__ = ["Cause", "Compared", "Difference", "ParityReport", "check_parity"]


def check_parity(model_or_step: Any, *args: Any, **kwargs: Any) -> ParityReport:
    if isinstance(model_or_step, keras.Model):
        return _of_model(model_or_step, *args, **kwargs)
    raise ParityArgumentError.not_checkable(model_or_step)


def _of_model(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    replicas: int = 2,
    steps: int = 5,
    batch_size: int | None = None,
    strategies: Any = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    random_layers: bool = True,
) -> ParityReport:
    read = settings(replicas, steps, batch_size, strategies, tolerance, rtol, atol, seed)
    return check_model(model, x, y, sample_weight, read, random_layers)
