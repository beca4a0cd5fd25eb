"""One step of Keras on the shard of each replica, and several of them in one graph.

`ShardedStep` is a step of a model on one replica, on its `Shard` of a batch. `across_replicas` says what its logs are
over all replicas.

A call of a function costs as much as a small step, so steps on threads share one: a loop over batches, as Keras has one
around the steps of an execution. The batches are arguments of the graph, since a batch that fails, or that replicas
must compute whole, has to be known before its step. The graph takes any number of batches up to the one that it was
made for: fewer are filled up, and a count says how many there are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from replica_engine.errors import LogError
from replica_engine.keras.shard import Shard, check_sum, check_weights
from replica_engine.upstream.keras import keras_models, keras_training
from replica_engine.values import linear, replica_weights, table_rows


class ShardedStep:
    """A step of a model on one replica.

    Args:
        model: the model.
        name: "train_step", "test_step" or "predict_step".
        own_step: what a `train_step` of the user's own computes: "mean", of its samples, which counts by their number;
            or "sum", its part of what is summed over replicas, as in `tf.distribute`. The same for `compute_loss`.
    """

    def __init__(self, model: keras.Model, name: str, own_step: Literal["mean", "sum"] = "mean"):
        self.model, self.name, self._own_step = model, name, own_step

    @property
    def is_own(self) -> bool:
        """Whether it trains the model, and is not Keras'."""
        return self.name == "train_step" and not keras_training.has_keras_step(self.model, self.name)

    @property
    def is_plain(self) -> bool:
        """Whether it follows the rule of `tf.distribute`; with a `compute_loss` of the user's own, each step does."""
        return self._own_step == "sum" and (self.is_own or not keras_training.has_keras_loss(self.model))

    @property
    def mixes_samples(self) -> bool:
        """Whether the model shows that a step on a shard would not do for the shard what it does for the batch.

        What float8 keeps of gradients is of the loss that a step has; in one of the user's own, the mean over a shard.
        """
        own = not keras_training.has_keras_step(self.model, "train_step")
        overwrites = own and any(map(keras_models.is_overwritten, self.model.trainable_variables))
        return overwrites or keras_models.mixes_samples(self.model)

    def __call__(self, data: object, share: Shard) -> Any:
        """Runs the step on this replica's samples, which are this part of a batch.

        Returns:
            The logs of the step over all replicas, equal on all of them; for a prediction, the outputs for the samples.
        """
        if self.name == "predict_step":
            return self.method(data)
        counted = metric_variables(self.model)
        before = [tf.identity(variable.value) for variable in counted] if share.whole else []
        if before and self._own_step == "sum":  # in a scope, each replica has a part of a value that Keras has set
            context = tf.distribute.get_replica_context()
            for variable, total in zip(counted, context.all_reduce(tf.distribute.ReduceOp.SUM, before), strict=True):
                variable.assign(total)
            before = [tf.zeros_like(value) for value in before]
        share.is_plain = self.is_plain and not share.whole
        share.averages = self._own_step == "sum" and not keras_training.has_keras_step(self.model, self.name)
        weight = share.fraction if self.is_own and not share.whole and not share.is_plain else None
        with self.followed(data, share), replica_weights.weighted_late(weight):
            logs = self.method(data)
        if self.is_own and not share.is_plain:
            check_weights(self.model, share)
        for variable, value in zip(counted, before, strict=False):
            # All replicas computed the same samples, which must count once.
            is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
            variable.assign(tf.where(is_first, variable.value, value))
        return across_replicas(self.model, Logs(logs, share), share.weight("float64"))

    @property
    def method(self) -> Callable[[object], Any]:
        """The method of the model."""
        return getattr(self.model, self.name)

    def followed(self, data: object, share: Shard) -> contextlib.AbstractContextManager[object]:
        """Around a call of `method` on a shard: what it does to gradients and to sums of losses can be seen.

        Says which tensors are its samples, and whether a method of the user's own uses the loss of `compile`.
        """
        is_of_keras = keras_training.has_keras_step(self.model, self.name) and keras_training.has_keras_loss(self.model)
        share.is_own = not is_of_keras
        linear.tag(tf.nest.flatten(data, expand_composites=True), linear.SAMPLES)
        return share.entered()


class Logs:
    """The logs that a step returned on one replica.

    Args:
        returned: the return value of the step; nested dictionaries are flattened, as in Keras.
        share: the shard that the step computed.

    Attributes:
        values: what is not a result of a metric, by name. A number is averaged over the samples, in its own precision.
            An integer is not a mean: one that the samples do not change is the same on all replicas.
        metrics: for each number that is the result of a metric: the metric, and the key of the number in the result.
        names: the names of all, in the order of the step.

    Raises:
        LogError: a value is not a number that all replicas together can give as one device would.
    """

    def __init__(self, returned: object, share: Shard):
        flat = _flat(returned) if isinstance(returned, Mapping) else {"loss": returned}
        self.metrics: dict[str, tuple[keras.metrics.Metric, str | None]] = {}
        self.values: dict[str, tf.Tensor] = {}
        for key, value in flat.items():
            found = [(metric, part) for result, metric, part in share.results if result is value]
            if found:
                self.metrics[key] = found[-1]
            elif value is not None:
                if not share.averages:
                    check_sum(value, share)
                self.values[key] = _value(key, value, share)
        self.names = [key for key in flat if key in self.metrics or key in self.values]
        self.averages = share.averages


def across_replicas(model: keras.Model, logs: Logs, weight: tf.Tensor) -> dict[str, tf.Tensor]:
    """Combines the logs of all replicas: metric results over all samples, and weighted means of all other numbers.

    Args:
        model: the model whose step ran.
        logs: the logs of this replica.
        weight: the weight of this replica's means, in float64.
    """
    context = tf.distribute.get_replica_context()
    own = {key: value * tf.cast(weight, value.dtype) for key, value in logs.values.items() if _is_mean(value)}
    counted = metric_variables(model)
    values = [tf.identity(variable.value) for variable in counted]
    counts = {key: value for key, value in logs.values.items() if logs.averages and value.dtype.is_integer}
    sums, means, counts = context.all_reduce(tf.distribute.ReduceOp.SUM, (values, own, counts))
    means |= {key: count // context.num_replicas_in_sync for key, count in counts.items()}
    with keras.StatelessScope(state_mapping=list(zip(counted, sums, strict=True))):
        results = {id(metric): metric.result() for metric, _ in logs.metrics.values()}
        for key, (metric, part) in logs.metrics.items():
            result = results[id(metric)]
            # Inside the scope: a result may be a variable of the metric, and is read here.
            means[key] = tf.convert_to_tensor(result if part is None else result[part])
    return {key: means[key] if key in means else logs.values[key] for key in logs.names}


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The metric variables that each replica counts in separately and whose values are added up."""
    return [variable for variable in model.metrics_variables if keras_models.is_counted(variable)]


def _value(name: str, value: object, share: Shard) -> tf.Tensor:
    """A value of the logs as a tensor; numbers of half precision in float32."""
    is_variable = isinstance(value, (keras.Variable, tf.Variable))
    tensor = tf.convert_to_tensor(value)
    if not (_is_mean(tensor) or tensor.dtype.is_integer or tensor.dtype.is_bool):
        raise LogError(
            f"The step returned {name!r} of dtype {tensor.dtype.name}, of which no mean over replicas exists. "
            "Return numbers, or print it in a callback."
        )
    if not share.whole and share.replicas > 1 and not share.averages:
        shard = tf.get_static_value(share.rows)
        if tensor.shape.rank is None or (tensor.shape.rank and tensor.shape[0] in (None, shard)):
            raise LogError(
                f"The step returned {name!r} of shape {tensor.shape}, which may be one number for each sample "
                "of the replica's shard. One device would return those of the whole batch. Return their mean, "
                f'{{"{name}": tf.reduce_mean(...)}}, or the result() of a metric.'
            )
        if not _is_mean(tensor) and not is_variable:
            _check_integer(name, tensor, shard)
    return tf.cast(tensor, "float32") if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def _check_integer(name: str, tensor: tf.Tensor, shard: np.ndarray | None) -> None:
    """Raises LogError unless the graph shows that an integer has nothing to do with the samples of the shard."""
    known = table_rows.origin(tensor, of_variables=True)
    if known is None or known.of_lengths or shard in known.numbers:  # a length of a known shape is a constant
        raise LogError(
            f"The step returned {name!r} of dtype {tensor.dtype.name}, which may be a count of the replica's "
            "shard. One device would count the whole batch. For a sum over samples return the result() of a "
            f'keras.metrics.Sum; for a mean return {{"{name}": tf.cast(..., "float32")}}; for a counter of steps '
            "return the variable."
        )


def _is_mean(value: tf.Tensor) -> bool:
    return bool(value.dtype.is_floating or value.dtype.is_complex)


def _flat(logs: Mapping[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in logs.items():
        flat.update(_flat(value) if isinstance(value, Mapping) else {key: value})
    return flat


# Several steps in one call of a graph.
MOST = 8
"""The most steps in a call: then the call costs little beside them, and no more batches are held than so many."""

_SCALAR = np.zeros(0, np.int32)  # the shape of a number


def fits(batch: object) -> bool:
    """Whether a batch can be one of several: its leaves are dense tensors, or None."""
    return all(leaf is None or isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(batch))


def filled(batches: Sequence[object], most: int) -> tuple[tuple[object, ...], tf.Tensor]:
    """What a graph for `most` batches takes: the last batch fills up what is missing; and how many there are."""
    more = itertools.repeat(batches[-1], most - len(batches))
    return (*batches, *more), tf.constant(len(batches))


def last(step: Callable[[Any], Any], batches: Sequence[object], count: tf.Tensor) -> Any:
    """Builds the loop over the first `count` batches; returns what the step returned for the last one."""
    made, specs = _looped(step, batches, count)
    return _returned(count - 1, made, specs)


class NotJoined(Exception):
    """What a step returned is no tensors with a row per sample, as far as its graph shows."""


def joined(
    step: Callable[[Any], tuple[Any, Any]], batches: Sequence[object], count: tf.Tensor
) -> tuple[Any, tf.Tensor]:
    """Builds the loop for a step that returns outputs, and whether they have a row per sample.

    Returns:
        The outputs for all batches as those for one, and whether each has a row per sample.

    Raises:
        NotJoined: the graph shows that outputs cannot be joined.
    """

    def with_flag(batch: object) -> tuple[Any, tf.Tensor]:
        outputs, are_of_rows = step(batch)
        if are_of_rows is False or not all(isinstance(leaf, tf.Tensor) for leaf in tf.nest.flatten(outputs)):
            raise NotJoined
        return outputs, tf.reshape(are_of_rows, [1])

    made, specs = _looped(with_flag, batches, count)
    arrays = [
        tf.TensorArray(leaf.dtype, count, infer_shape=False, element_shape=[None, *leaf.shape[1:]])
        for leaf in tf.nest.flatten(specs)
    ]

    def put(index: tf.Tensor, arrays: list[tf.TensorArray]) -> tuple[tf.Tensor, list[tf.TensorArray]]:
        found = tf.nest.flatten(_returned(index, made, specs))
        return index + 1, [array.write(index, leaf) for array, leaf in zip(arrays, found, strict=True)]

    _, arrays = tf.while_loop(lambda index, _: index < count, put, (0, arrays))
    outputs, flags = tf.nest.pack_sequence_as(specs, [array.concat() for array in arrays])
    return outputs, tf.reduce_all(flags)


def _looped(step: Callable[[Any], Any], batches: Sequence[object], count: tf.Tensor) -> tuple[tf.Tensor, Any]:
    """The loop: a list with an optional for each step, and what the step returned while it was traced.

    A loop must know beforehand what its body returns. The types in an optional are known afterwards, too.
    """
    like = batches[0]
    columns = [_column(leaves) for leaves in zip(*map(tf.nest.flatten, batches), strict=True)]
    made = tf.raw_ops.TensorListReserve(element_shape=_SCALAR, num_elements=count, element_dtype=tf.variant)
    returned: list[Any] = []

    def one(index: tf.Tensor, made: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        leaves = [None if column is None else column.read(index) for column in columns]
        outputs = step(tf.nest.pack_sequence_as(like, leaves))
        returned[:] = [outputs]
        parts = [index, *tf.nest.flatten(outputs)]  # an optional has one part at least
        optional = tf.raw_ops.OptionalFromValue(components=parts)
        return index + 1, tf.raw_ops.TensorListSetItem(input_handle=made, index=index, item=optional)

    # One step after the other, as they change variables.
    _, made = tf.while_loop(lambda index, _: index < count, one, (0, made), parallel_iterations=1)
    (outputs,) = returned
    return made, tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), outputs)


def _column(leaves: Sequence[tf.Tensor | None]) -> tf.TensorArray | None:
    """A leaf of all batches, each with its own number of samples; without copies."""
    if leaves[0] is None:
        return None
    shape = leaves[0].shape
    shape = [None, *shape[1:]] if shape.rank else shape
    array = tf.TensorArray(leaves[0].dtype, len(leaves), infer_shape=False, element_shape=shape)
    for index, leaf in enumerate(leaves):
        array = array.write(index, leaf)
    return array


def _returned(index: tf.Tensor, made: tf.Tensor, specs: Any) -> Any:
    """What one step returned."""
    parts = [tf.TensorSpec([], tf.int32), *tf.nest.flatten(specs)]
    optional = tf.raw_ops.TensorListGetItem(
        input_handle=made, index=index, element_shape=_SCALAR, element_dtype=tf.variant
    )
    _, *leaves = tf.raw_ops.OptionalGetValue(
        optional=optional, output_types=[spec.dtype for spec in parts], output_shapes=[spec.shape for spec in parts]
    )
    return tf.nest.pack_sequence_as(specs, leaves)
