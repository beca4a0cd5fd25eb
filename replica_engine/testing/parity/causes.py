"""Known causes of differences, looked for in a model and in the numbers of a step.

A loss or a metric is tried on one device before it is named: its value for a batch must be the mean of its values for
equal shares. Random numbers are found in the ops of the traced model or step, so those of the user's own layers count
too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine.diagnostics.op_lines import is_scope_of
from replica_engine.testing.parity.comparison import Computed
from replica_engine.testing.parity.probes import called, is_callable
from replica_engine.testing.parity.report import Cause, Difference
from replica_engine.testing.parity.settings import shares
from replica_engine.values import samples

# Ops that draw random numbers, but not those that make a key from a seed, and not calls of functions.
_RANDOM = re.compile(
    "(Stateless|Parameterized)*(Random(?!Get)|Truncated|Multinomial)|StatelessShuffle|NonDeterministic"
    "|Stateful(?!Partitioned)"
)


def of_model(
    model: keras.Model, batch: Any, replicas: int, differences: Sequence[Difference], equal: Collection[str]
) -> Iterator[Cause]:
    """Finds the known causes in a model whose numbers differ.

    Args:
        model: the model, at its initial weights.
        batch: a batch that `replicas` divides.
        replicas: the number of replicas.
        differences: all differences.
        equal: the layers whose outputs were compared and do not differ.
    """
    yield from _normalizations(model)
    if is_callable(model):
        yield from (each for each in _random_layers(model, batch) if each.name not in equal)
        if any(each.kind in ("loss", "gradient", "weight") for each in differences):
            yield from _losses(model, batch, replicas)
        yield from _metrics(model, batch, replicas, {each.name for each in differences if each.kind == "metric"})


def of_step(
    differences: Sequence[Difference],
    expected: Computed,
    runs: Mapping[str, Computed],
    batches: Sequence[Any],
    replicas: int,
    alone: Callable[[], Computed],
) -> Iterator[Cause]:
    """Finds the known causes in the numbers of a step.

    Args:
        differences: all differences.
        expected: the numbers of one device.
        runs: the numbers of the strategies.
        batches: the batches of the runs.
        replicas: the number of replicas.
        alone: runs one device on the rows of replica 0, from the first batch.
    """
    yield from _unequal_shares(differences, batches, replicas)
    wrong = {(each.kind, each.name) for each in differences if each.step == 1 and each.strategy in runs}
    if not wrong:
        return
    one, first = _of_first_step(expected), _of_first_step(alone())
    for numbers in runs.values():
        known = wrong & one.keys() & first.keys()
        found = {key: value for key, value in _of_first_step(numbers).items() if key in known}
        yield from _scaled(one, found, replicas)
        yield from _not_combined(one, first, found)


def random_ops(graph: Any) -> Iterator[tuple[str, str]]:
    """The name with scopes and the type of each op of a graph that draws random numbers, also in functions it calls."""
    definition = graph.as_graph_def()
    functions = {function.signature.name: function.node_def for function in definition.library.function}

    def walk(nodes: Any, prefix: str, around: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        for node in nodes:
            if _RANDOM.match(node.op):
                yield prefix + node.name, node.op
            values = node.attr.values()
            for name in {each.name for value in values for each in (value.func, *value.list.func)}:
                if name in functions and name not in around:
                    yield from walk(functions[name], f"{prefix}{node.name}/", (*around, name))

    return walk(definition.node, "", ())


def random_numbers(subject: str, name: str, op: str, remedy: str) -> Cause:
    """The cause that replicas draw other random numbers than one device."""
    return Cause(
        "random numbers",
        name,
        f"{subject} draws random numbers ({op}), and each replica draws its own.",
        f"They have the same distribution, so training is equally good. {remedy} An op with a fixed seed draws equal "
        "numbers on all replicas, each for its own rows: pass the numbers as a part of the batch.",
    )


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


def _random_layers(model: keras.Model, batch: Any) -> Iterator[Cause]:
    """The innermost layers with ops that draw random numbers; a layer's name is in the scopes of its ops."""
    graph = tf.function(functools.partial(called, model), autograph=False).get_concrete_function(batch[0]).graph
    layers = {layer.name: layer for layer in keras_model.layers_of(model)}
    for scope, op in random_ops(graph):
        inside = [name for part in scope.split("/") for name in sorted(layers, key=len) if is_scope_of(part, name)]
        name = inside[-1] if inside else model.name
        kind = type(layers.get(name, model)).__name__
        remedy = "check_parity(..., random_layers=False) compares everything else."
        yield random_numbers(f"The layer {name!r} ({kind})", name, op, remedy)


def _losses(model: keras.Model, batch: Any, replicas: int) -> Iterator[Cause]:
    """The losses of `compile` and of `add_loss` that are not the mean of their values for equal shares."""
    flat = [] if batch[1] is None or keras_model.mixes_samples(model) else keras_model.flat_losses(model)
    # A sum over samples is summed over replicas.
    flat = [each for each in flat if getattr(each[1], "reduction", "mean") not in ("sum", "none", None)]

    def losses(part: Any) -> dict[str, Any]:
        outputs = model(part[0], training=False)
        layers = [layer for layer in keras_model.layers_of(model)[::-1] if layer.losses]
        inner = [layer for layer in layers if not set(layers) & {*keras_model.layers_of(layer, include_self=False)}]
        found = {layer.name: np.sum([np.asarray(loss) for loss in layer.losses]) for layer in inner}
        for name, loss, path in flat:
            y, output = (functools.reduce(lambda each, key: each[key], path, whole) for whole in (part[1], outputs))
            found[name] = np.asarray(loss(y, output))
        return found

    parts = [losses(part) for part in shares(batch, replicas)]
    for name, value in losses(batch).items():
        if not np.ndim(value) and not _is_close(value, np.mean([part[name] for part in parts])):
            yield Cause(
                "loss",
                name,
                f"The loss {name!r} of a batch is not the mean of its samples' losses: on one device, the mean over "
                f"{replicas} equal shares of the batch is another number. Replicas average the losses of their shares.",
                "Return a vector with one loss for each sample, and let Keras compute the mean. Or return a sum over "
                'samples, with reduction="sum". Give add_loss the mean over the rows that the layer receives.',
            )


def _metrics(model: keras.Model, batch: Any, replicas: int, names: Collection[str]) -> Iterator[Cause]:
    """Metrics whose result changes when the same samples come in several equal batches."""
    x, y, _ = batch
    metrics = [metric for metric in keras_model.metrics_of(model) if metric.name in names]
    outputs = model(x, training=False) if metrics and isinstance(y, tf.Tensor) else None
    for metric in metrics if isinstance(outputs, tf.Tensor) else ():
        results = []
        for parts in ([(y, outputs)], shares((y, outputs), replicas)):
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


def _unequal_shares(differences: Sequence[Difference], batches: Sequence[Any], replicas: int) -> Iterator[Cause]:
    different = {each.step for each in differences if each.step is not None}
    uneven = [index + 1 for index, batch in enumerate(batches) if samples.count(batch) % replicas]
    if different and uneven and min(different) == uneven[0] > 1:
        total = samples.count(batches[uneven[0] - 1])
        yield Cause(
            "unequal shares",
            f"step {uneven[0]}",
            f"Batches whose size is a multiple of {replicas} agree, but the batch of {total} rows differs: a mean over "
            "replicas counts each replica once, however many rows it has.",
            "Divide the loss of each row by the size of the whole batch, and sum over replicas: give the step an "
            "argument named `weights` (replica_engine.split_batch makes them), or use tf.nn.compute_average_loss with "
            "the size of the whole batch. uneven=False leaves such batches out.",
        )


def _scaled(one: Mapping[Any, Any], found: Mapping[Any, Any], replicas: int) -> Iterator[Cause]:
    many = (
        f"{replicas} times",
        'If each replica computes a mean over its rows, average over replicas: all_reduce("MEAN", ...) or '
        'CrossReplicaOptimizer(..., "mean"). Or divide each row\'s loss by the size of the whole batch, and sum.',
    )
    few = (
        f"1 / {replicas} of",
        'If each row\'s loss is divided by the size of the whole batch, sum over replicas: all_reduce("SUM", ...) '
        'or CrossReplicaOptimizer(..., "sum"). For a result of the step: check_parity(..., reduction="sum").',
    )
    for factor, (words, remedy) in ((replicas, many), (1 / replicas, few)):
        for subject, is_weight in (("The change of", True), ("The result", False)):
            keys = [key for key, value in found.items() if _is_scaled(one[key] * factor, value)]
            names = [name for kind, name in keys if (kind == "weight") is is_weight]
            if names and replicas > 1:
                why = f"{subject} {names[0]!r} is {words} that on one device."
                yield Cause("scaled by replicas", names[0], why, remedy)


def _not_combined(one: Mapping[Any, Any], first: Mapping[Any, Any], found: Mapping[Any, Any]) -> Iterator[Cause]:
    for (kind, name), value in found.items():
        if kind == "weight" and not _is_scaled(one[kind, name], value) and _is_scaled(first[kind, name], value):
            yield Cause(
                "not combined",
                name,
                f"{name!r} changes as if the rows of replica 0 were the whole batch: the step does not combine the "
                "gradients of the replicas.",
                'Call tf.distribute.get_replica_context().all_reduce("MEAN", gradients) before applying them, or use '
                "replica_engine.keras.CrossReplicaOptimizer.",
            )
            return


def _of_first_step(numbers: Computed) -> dict[tuple[str, str], Any]:
    """By kind and name: the results of the first step, and the changes of the weights in it.

    Variables that this step made, such as momenta, start at zero.
    """
    return {
        (each.kind, name): np.asarray(value, "float64") - np.asarray((each.start or {}).get(name, 0.0), "float64")
        for each in numbers
        if each.step == 1
        for name, value in each.values.items()
        if np.asarray(value).dtype.kind in "biufV"
    }


def _is_close(one: Any, other: Any) -> bool:
    return bool(np.allclose(np.float64(one), np.float64(other), rtol=1e-3, atol=1e-7, equal_nan=True))


def _is_scaled(one: Any, other: Any) -> bool:
    """Whether two arrays are equal but for rounding, and not 0."""
    largest = float(np.max(np.abs(one), initial=0.0))
    return one.shape == other.shape and largest > 0 and bool(np.max(np.abs(one - other)) <= 1e-3 * largest)
