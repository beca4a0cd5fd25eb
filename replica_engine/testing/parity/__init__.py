"""`check_parity`: do N replicas compute the same numbers as one device?

- `check`: the course of a check: one device, each strategy, the comparison, the causes, the report.
- `model` and `step`: the two forms, a Keras model and a training step; each says what a run computes.
- `settings`: the arguments: numbers, strategies, batches.
- `comparison`: decides when two numbers are the same; `causes`: why they are not; `report`: the results.
- `probes` reads values inside a model; `state` leaves the model and all random numbers as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, overload

import keras

from replica_engine._tf import distribute
from replica_engine.errors import ParityArgumentError
from replica_engine.errors.base import brief
from replica_engine.testing.parity.model import check_model
from replica_engine.testing.parity.report import Cause, Compared, Difference, ParityReport
from replica_engine.testing.parity.settings import read
from replica_engine.testing.parity.step import check_step

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
    distribution: Any = None,
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
    distribution: Any = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    reduction: str | None = None,
    uneven: bool | None = None,
) -> ParityReport:
    """The form for a training step."""


def check_parity(
    model_or_step: Any,
    *args: Any,
    replicas: int = 2,
    steps: int = 5,
    batch_size: int | None = None,
    strategies: Iterable[Any] | str | None = None,
    distribution: Any = None,
    tolerance: float | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
    **kwargs: Any,
) -> ParityReport:
    """Compares N replicas with one device on equal weights and batches, and reports the numbers that differ.

    There are two forms. `check_parity(model, x, y)` takes a Keras model and runs it as it is and as `replicate_model`
    runs it. `check_parity(step, inputs, variables)` takes a function that does one training step, and runs it by
    `strategy.run` on shards of each batch. Both forms run on one device, on N threads (`MirroredStrategy`) and on N
    compiled replicas (`TPUStrategy`). The check leaves the model or the variables as they were: weights, optimizer,
    metrics, traced functions, and the state of all random number generators. A model that is not built is built, as
    `fit` does.

    Args:
        model_or_step: a Keras model: functional, sequential or subclassed, compiled or not. Or a function, which may be
            a `tf.function`. The function is called as `step(*batch)`, or `step(variables, *batch)` if `variables` are
            passed. If it has an argument named `weights` that is not a part of the batch, this argument gets the
            weights of the rows that `replica_engine.split_batch` makes.
        x, y, sample_weight: for a model: arrays, or structures of arrays, as `fit` takes them. `x` may instead be a
            `tf.data.Dataset`, a `keras.utils.PyDataset` or an iterator of batches.
        inputs: for a step: a tuple of arrays (the parts of a batch), one array or dictionary, a `tf.data.Dataset`, or a
            list or iterator of batches.
        variables: for a step: all variables that it changes. A structure of `tf.Variable`; the step gets a structure of
            copies. Or a function that makes the variables, and also models, layers and optimizers; it is called in the
            scope of each strategy, and the step gets what it returns.
        replicas: the number of replicas.
        steps: the number of training steps. The last batch has shards of unequal size: for a model always; for a step
            if it takes weights, or if the data leaves such a rest.
        batch_size: the number of rows of a batch. None takes up to 32.
        strategies: the strategies to compare with one device: "MirroredStrategy", "TPUStrategy" or strategies of this
            library. None takes all that can run here; the report names those that cannot.
        distribution: one more candidate: `TPUStrategy(distribution=...)` with one replica, whose weights, optimizer and
            batches are divided over devices: over `replicas` devices for "fsdp" and "zero1", or over the mesh of a
            `keras.distribution.ModelParallel`.
        tolerance: another name of `rtol`.
        rtol: the largest error that counts as rounding, relative to the largest element of a tensor; for a weight,
            relative to its largest change in the step. None takes 1e-4 for float32, which is 1000 roundings, 1e-8 for
            float64, 2e-2 for float16 and 8e-2 for bfloat16.
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
        ParityArgumentError: an argument is invalid, no strategy can run here, or a step changes variables that were not
            passed.
        ReplicateError: the model cannot be replicated.
        DeviceError: a strategy was named, and there are fewer devices than replicas.
        BackendMissingError: a `TPUStrategy` was named, or `distribution` passed, and jax is missing.
        DistributionError: `distribution` is none, or its layouts do not fit the model.
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
    check: Callable[..., ParityReport]
    if isinstance(model_or_step, keras.Model):
        form, check = "check_parity(model, x, y, sample_weight)", check_model
    elif callable(model_or_step) and not isinstance(model_or_step, (type, keras.Layer)):
        form, check = "check_parity(step, inputs, variables)", check_step
    else:
        raise ParityArgumentError(
            "check_parity takes a Keras model, check_parity(model, x, y), or a function that is one training step, "
            f"check_parity(step, inputs, variables); got {brief(model_or_step)}."
        )
    try:
        inspect.signature(check).bind(None, model_or_step, *args, **kwargs)
    except TypeError as error:
        raise ParityArgumentError(f"{form}: {error}.") from None
    rtol = tolerance if rtol is None else rtol
    with distribute.outside_scopes():  # one device is not the strategy whose scope the caller may be in
        settings = read(replicas, steps, batch_size, strategies, distribution, rtol, atol, seed)
        return check(settings, model_or_step, *args, **kwargs)
