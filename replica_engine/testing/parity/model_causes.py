"""Known causes of differences, searched for in a model. A loss or metric is tried on one device before it is named.

The search runs only if numbers differ: a model with Dropout is not wrong.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine.testing.parity import batches as cut
from replica_engine.testing.parity.comparison import RTOL, Tolerance
from replica_engine.testing.parity.probes import called, is_callable
from replica_engine.testing.parity.random_draws import draws
from replica_engine.testing.parity.report import Cause, Difference

HALVES = ("float16", "bfloat16")


def found(
    model: keras.Model,
    batch: Any,
    replicas: int,
    differences: Sequence[Difference],
    limits: Tolerance,
    equal: Collection[str] = (),
) -> tuple[Cause, ...]:
    """Finds the known causes in a model whose numbers differ.

    Args:
        model: the model, at its initial weights.
        batch: a batch that `replicas` divides.
        replicas: the number of replicas.
        differences: all differences.
        limits: the tolerance.
        equal: the layers whose outputs were compared and do not differ.
    """
    causes = list(_normalizations(model))
    if is_callable(model):
        causes += [each for each in _random_numbers(model, batch) if each.name not in equal]
        causes += _of_outputs(model, batch, replicas, differences)
    causes += _assigned(model, differences)
    causes += _halves(limits)
    return tuple(causes)


def _of_outputs(model: keras.Model, batch: Any, replicas: int, differences: Sequence[Difference]) -> Iterator[Cause]:
    kinds = {each.kind for each in differences}
    if kinds & {"loss", "gradient", "weight"}:
        yield from _losses(model, batch, replicas)
    if "metric" in kinds:
        names = {each.name for each in differences if each.kind == "metric"}
        yield from _metrics(model, batch, replicas, names)


def _normalizations(model: keras.Model) -> Iterator[Cause]:
    for layer in keras_model.layers_of(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized:
            yield Cause(
                "batch normalization",
                layer.name,
                f"On each replica, the layer {layer.name!r} (BatchNormalization) normalizes with the mean and variance "
                "of that replica's rows. One device uses those of the whole batch.",
                "keras.layers.BatchNormalization(synchronized=True) computes them over all replicas.",
            )


def _random_numbers(model: keras.Model, batch: Any) -> Iterator[Cause]:
    function = tf.function(functools.partial(called, model), autograph=False)
    by_name = {layer.name: layer for layer in keras_model.layers_of(model)}
    for draw in draws(function.get_concrete_function(batch[0]).graph, list(by_name)):
        kind = type(by_name[draw.layer]).__name__ if draw.layer in by_name else "model"
        what = f"The layer {draw.layer!r} ({kind})" if draw.layer in by_name else f"The model {model.name!r}"
        if draw.is_stateless:
            yield Cause(
                "stateless algorithm",
                draw.layer or model.name,
                f"{what} draws random numbers with {draw.op} from a fixed seed, so all replicas draw the "
                "same numbers, each for its own rows. One device draws other numbers for other rows.",
                "Pass the numbers as a part of the batch, or give them a shape that does not depend on the batch.",
            )
        else:
            yield Cause(
                "random numbers",
                draw.layer or model.name,
                f"{what} draws random numbers ({draw.op}), and each replica draws its own.",
                "They have the same distribution, so training is equally good. check_parity(..., random_layers=False) "
                "compares everything else.",
            )


def _losses(model: keras.Model, batch: Any, replicas: int) -> Iterator[Cause]:
    """Losses whose value for a batch is not the mean of their values for equal shards, with the same predictions."""
    x, y, _ = batch
    if y is None or not keras_model.flat_losses(model) or keras_model.mixes_samples(model):
        outputs, y = None, None
    else:
        outputs = keras.tree.map_structure(tf.identity, model(x, training=False))
    for name, loss, path in keras_model.flat_losses(model) if outputs is not None else ():
        if getattr(loss, "reduction", "mean") in ("sum", "none", None):
            continue  # a sum over samples is summed over replicas
        pair = (_at(y, path), _at(outputs, path))
        if not _is_mean(lambda pair, loss=loss: loss(*pair), pair, replicas):
            yield Cause(
                "loss",
                name,
                f"The loss {name!r} of a batch is not the mean of its samples' losses: on one device, the mean over "
                f"{replicas} equal shares of the batch is another number. Replicas average the losses of their shares.",
                "Return a vector with one loss for each sample, and let Keras compute the mean. Or return a sum over "
                'samples, with reduction="sum".',
            )
    for layer in keras_model.layers_of(model)[::-1]:
        if layer.losses and not any(inner.losses for inner in _inside(layer)):
            sizes = [_added(model, layer, part) for part in ([batch], cut.shares(batch, replicas))]
            if not _is_close(*sizes):
                yield Cause(
                    "loss",
                    layer.name,
                    f"add_loss in the layer {layer.name!r} adds a number that is not a mean over samples.",
                    "Add the mean over the rows that the layer receives.",
                )


def _metrics(model: keras.Model, batch: Any, replicas: int, names: set[str]) -> Iterator[Cause]:
    """Metrics whose result changes when the same samples come in several equal batches."""
    x, y, _ = batch
    outputs = None if y is None else model(x, training=False)
    is_one = isinstance(outputs, tf.Tensor) and isinstance(y, tf.Tensor)
    for metric in keras_model.metrics_of(model) if is_one else ():
        if metric.name not in names:
            continue
        results = []
        for parts in ([(y, outputs)], cut.shares((y, outputs), replicas)):
            metric.reset_state()
            for part in parts:
                metric.update_state(*part)
            results.append(np.asarray(metric.result()))
        if not _is_close(*results):
            yield Cause(
                "metric",
                metric.name,
                f"The metric {metric.name!r} of a batch is not a mean over its samples: on one device, {replicas} "
                "equal shares of the batch give another result. Replicas average their results.",
                "Return one number for each sample, or add up sums in a keras.metrics.Metric with update_state.",
            )


def _assigned(model: keras.Model, differences: Sequence[Difference]) -> Iterator[Cause]:
    different = {each.name for each in differences if each.kind == "weight"}
    for layer in keras_model.layers_of(model, include_self=False):
        if isinstance(layer, keras.layers.BatchNormalization):
            continue
        own = {id(weight) for inner in _inside(layer) for weight in inner.non_trainable_weights}
        for weight in layer.non_trainable_weights:
            if id(weight) not in own and layer.trainable and not weight.trainable and weight.path in different:
                yield Cause(
                    "assigned weight",
                    weight.path,
                    f"The layer {layer.name!r} ({type(layer).__name__}) computes its weight {weight.path!r} from the "
                    "rows of one replica. The values are averaged over replicas; an integer keeps its value on replica "
                    "0.",
                    "Assign a mean over rows, or reduce over replicas first: "
                    "tf.distribute.get_replica_context().all_reduce(...).",
                )


def _halves(limits: Tolerance) -> Iterator[Cause]:
    if limits.dtype in HALVES and limits.rtol < RTOL[limits.dtype]:
        yield Cause(
            "float16",
            limits.dtype,
            f"The model computes in {limits.dtype}, which has {3 if limits.dtype == 'float16' else 2} digits, and "
            f"the given tolerance is {limits.rtol:g}.",
            f"The default for {limits.dtype} is {RTOL[limits.dtype]:g}. For a close comparison use float32.",
        )


def _is_mean(loss: Any, data: Any, replicas: int) -> bool:
    whole = np.asarray(loss(data))
    if whole.ndim:
        return True  # one loss per sample
    return _is_close(whole, _mean([np.asarray(loss(part)) for part in cut.shares(data, replicas)]))


def _added(model: keras.Model, layer: keras.layers.Layer, parts: Sequence[Any]) -> Any:
    found = []
    for part in parts:
        model(part[0], training=False)
        found.append(np.sum([np.asarray(loss) for loss in layer.losses]))
    return _mean(found)


def _mean(values: Sequence[Any]) -> Any:
    return functools.reduce(operator.add, values) / len(values)


def _is_close(one: Any, other: Any) -> bool:
    return bool(np.allclose(np.float64(one), np.float64(other), rtol=1e-3, atol=1e-7, equal_nan=True))


def _inside(layer: keras.layers.Layer) -> list[keras.layers.Layer]:
    return keras_model.layers_of(layer, include_self=False)


def _at(structure: Any, path: tuple) -> Any:
    for part in path:
        structure = structure[part]
    return structure
