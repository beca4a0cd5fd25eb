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
from replica_engine.testing.parity.of_step import check_step
from replica_engine.testing.parity.report import Cause, Compared, Difference, ParityReport
from replica_engine.testing.parity.settings import settings

__all__ = ["Cause", "Compared", "Difference", "ParityReport", "check_parity"]


@overload
def check_parity(
    model_or_step: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    replicas: int = 2,
    steps: int = 5,
    batch_size: int | None = None,
    strategies: Iterable[Any] | str | None = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    random_layers: bool = True,
) -> ParityReport:
    """Of a model."""


@overload
def check_parity(
    model_or_step: Callable[..., Any],
    inputs: Any,
    variables: Any = None,
    *,
    replicas: int = 2,
    steps: int = 5,
    batch_size: int | None = None,
    strategies: Iterable[Any] | str | None = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    reduction: str | None = None,
    uneven: bool | None = None,
) -> ParityReport:
    """Of a step."""


def check_parity(model_or_step: Any, *args: Any, **kwargs: Any) -> ParityReport:
    """Compares N replicas with one device: the same weights, the same batches, and which numbers differ.

    Two forms. `check_parity(model, x, y)` takes a Keras model and runs it by itself and as `replicate_model` runs it.
    `check_parity(step, inputs, variables)` takes a function that is one training step, and runs it by `strategy.run`
    on shares of each batch. Both run on one device, on N threads (`MirroredStrategy`) and on N compiled replicas
    (`TPUStrategy`). The model or the variables are left as they were: weights, optimizer, metrics, traced functions,
    and the state of all random numbers. A model that is not built is built, as `fit` does.

    Args:
        model_or_step: a Keras model: functional, sequential or subclassed, compiled or not. Or a function, which may be
            a `tf.function`; it is called as `step(*batch)`, or as `step(*batch, weights)` if it takes one argument
            more, with the weights of the rows that `replica_engine.split_batch` makes.
        x, y, sample_weight: of a model: arrays, or structures of arrays, as `fit` takes them. Or `x` is a
            `tf.data.Dataset`, `keras.utils.PyDataset` or iterator of batches.
        inputs: of a step: a tuple of arrays (the parts of a batch), one array or dictionary, a `tf.data.Dataset`, or a
            list of batches.
        variables: of a step: the variables to compare, in any structure, with modules, models and optimizers among
            them; the step uses them by its closure or globals. Or a function that makes them, called in the scope of
            each strategy; then the step is called as `step(made, *batch)`.
        replicas: how many replicas.
        steps: how many training steps. The last one has a batch whose shares are not of equal size: of a model always,
            of a step if it takes weights, or if the data leaves such a rest.
        batch_size: rows of a batch. None takes up to 32.
        strategies: what to compare with one device: "MirroredStrategy", "TPUStrategy" or strategies of this library.
            None takes all that can run here; the report names those that cannot.
        tolerance: the same as `rtol`.
        rtol: what counts as rounding, relative to the largest element of a tensor; of a weight, to its largest change.
            None takes 1e-4 for float32, which is 1000 roundings, 1e-8 for float64, 2e-2 for float16 and 8e-2 for
            bfloat16. What rounding does to a quantity is also measured, on one device with the samples in another
            order and other last digits, and 10 times that is allowed.
        atol: added to it.
        seed: where all random numbers begin.
        random_layers: of a model: False has layers that draw random numbers behave as in inference, so that everything
            else can be compared.
        reduction: of a step: "mean" or "sum", how numbers that the step returns are brought together where replicas
            return different ones. None takes "sum" for a step that takes weights, and "mean" for others.
        uneven: of a step: True takes an uneven last batch, False none; None is described at `steps`.

    Returns:
        The report. `report.ok` says whether all that was compared agrees; `print(report)` shows what differs, where
        first, and the known causes that were found; `report.raise_if_different()` is for tests.

    Raises:
        ParityArgumentError: an argument is not what it has to be, or no strategy can run here.
        ReplicateError: the model cannot be replicated.
        DeviceError: a strategy was named, and there are fewer devices than replicas.

    Example:
        >>> import keras, numpy as np
        >>> from replica_engine.testing import check_parity
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> x, y = np.ones((20, 4), "float32"), np.ones((20, 1), "float32")
        >>> report = check_parity(model, x, y, replicas=2, steps=2, strategies="TPUStrategy")
        >>> report.ok
        True
        >>> report.batches
        (20, 19)
    """
    if isinstance(model_or_step, keras.Model):
        return _of_model(model_or_step, *args, **kwargs)
    if callable(model_or_step) and not isinstance(model_or_step, (type, keras.Layer)):
        return _of_step(model_or_step, *args, **kwargs)
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


def _of_step(
    step: Callable[..., Any],
    inputs: Any,
    variables: Any = None,
    *,
    replicas: int = 2,
    steps: int = 5,
    batch_size: int | None = None,
    strategies: Any = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    reduction: str | None = None,
    uneven: bool | None = None,
) -> ParityReport:
    read = settings(replicas, steps, batch_size, strategies, tolerance, rtol, atol, seed)
    return check_step(step, inputs, variables, read, reduction, uneven)
