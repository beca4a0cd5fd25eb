"""Several steps in one call of a graph: a loop over batches, as Keras has one around the steps of an execution.

A call of a function costs as much as a small step, so steps on threads share one. The batches are arguments of the
graph, since a batch that fails, or that replicas must compute whole, has to be known before its step. The graph takes
any number of batches up to the one that it was made for: fewer are filled up, and a count says how many there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

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
