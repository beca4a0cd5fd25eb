"""`check_parity`: do N replicas compute the same numbers as one device?

- `of_model`: checks a Keras model; `probes` reads values inside the model, `model_causes` finds causes of differences.
- `of_step`: checks a custom training step; `rebinding` gives the step variables of each strategy, `step_causes` finds
  causes of differences.
- `comparison`: decides when two numbers are the same; `report`: the results.
- `settings`, `candidates`, `batches`, `state`, `random_draws`: helpers of these modules.
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
    """The form for a Keras model."""


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
    """The form for a training step."""


def check_parity(model_or_step: Any, *args: Any, **kwargs: Any) -> ParityReport:
    """Compares N replicas with one device on equal weights and batches, and reports the numbers that differ.

    There are two forms. `check_parity(model, x, y)` takes a Keras model and runs it as it is and as `replicate_model`
    runs it. `check_parity(step, inputs, variables)` takes a function that does one training step, and runs it by
    `strategy.run` on shards of each batch. Both forms run on one device, on N threads (`MirroredStrategy`) and on N
    compiled replicas (`TPUStrategy`). The check leaves the model or the variables as they were: weights, optimizer,
    metrics, traced functions, and the state of all random number generators. A model that is not built is built, as
    `fit` does.

    Args:
        model_or_step: a Keras model: functional, sequential or subclassed, compiled or not. Or a function, which may be
            a `tf.function`. The function is called as `step(*batch)`. If it takes one more argument, it is called as
            `step(*batch, weights)`, with the weights of the rows that `replica_engine.split_batch` makes.
        x, y, sample_weight: for a model: arrays, or structures of arrays, as `fit` takes them. `x` may instead be a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or an iterator of batches.
        inputs: for a step: a tuple of arrays (the parts of a batch), one array or dictionary, a `tf.data.Dataset`, or a
            list of batches.
        variables: for a step: the variables to compare, in any structure, which may contain modules, models and
            optimizers; the step uses them through its closure or globals. Or a function that makes the variables; it is
            called in the scope of each strategy, and the step is then called as `step(made, *batch)`.
        replicas: the number of replicas.
        steps: the number of training steps. The last batch has shards of unequal size: for a model always; for a step
            if it takes weights, or if the data leaves such a rest.
        batch_size: the number of rows of a batch. None takes up to 32.
        strategies: the strategies to compare with one device: "MirroredStrategy", "TPUStrategy" or strategies of this
            library. None takes all that can run here; the report names those that cannot.
        tolerance: another name of `rtol`.
        rtol: the largest error that counts as rounding, relative to the largest element of a tensor; for a weight,
            relative to its largest change. None takes 1e-4 for float32, which is 1000 roundings, 1e-8 for float64, 2e-2
            for float16 and 8e-2 for bfloat16. The check also measures how rounding affects each quantity: it runs one
            device with the samples in another order and with other last digits, and allows 10 times that difference.
        atol: the absolute tolerance, which is added to the relative one.
        seed: the seed of all random numbers.
        random_layers: for a model: False makes layers that draw random numbers behave as in inference, so that
            everything else can be compared.
        reduction: for a step: "mean" or "sum", how to combine numbers that the step returns if they differ between
            replicas. None takes "sum" for a step that takes weights, and "mean" for other steps.
        uneven: for a step: True makes the last batch uneven, False makes no batch uneven; for None see `steps`.

    Returns:
        The report. `report.ok` says whether all compared numbers agree. `print(report)` shows which numbers differ,
        where they differ first, and the known causes that were found. `report.raise_if_different()` is for tests.

    Raises:
        ParityArgumentError: an argument is invalid, or no strategy can run here.
        ReplicateError: the model cannot be replicated.
        DeviceError: a strategy was named, and there are fewer devices than replicas.
        BackendMissingError: a `TPUStrategy` was named, and jax is missing.
        BatchError: arrays have different lengths.

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
