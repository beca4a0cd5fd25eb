"""Takes the inputs of the steps of a device loop apart into each replica's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import distribute
from replica_engine._tf.data_pulls import Pulls
from replica_engine._tf.graphs import xla_ops
from replica_engine.errors import InputsError
from replica_engine.values.structure import flatten
from replica_engine.xla.signature.arguments import Arguments, difference, view


class BatchReader:
    """Takes batches apart that have the structure, dtypes and shapes of the first one.

    Most batches are tensors and arrays. Those are read quickly, and compared with the first batch while they are read.
    Any other batch goes through `Arguments`, which also explains how a batch differs from the first.

    Args:
        batch: the first batch: the arguments of a step.
        arguments: the same batch, taken apart.
        name: the name of the step, for messages.
        pulls: takes the batches after the first one as arrays; None if only their iterator can.
    """

    def __init__(self, batch: tuple, arguments: Arguments, name: str, pulls: Pulls | None = None):
        self._arguments = arguments
        self._name = name
        self._like, _ = _read(batch)
        self._skeleton = tf.nest.map_structure(lambda _: 0, batch) if batch else ()
        self._nothing: list[list[np.ndarray]] = [[] for _ in range(arguments.size)]
        self._pulls = pulls
        # For each column, the number of its component: TensorFlow counts them in the order of sorted keys.
        numbers = tf.nest.pack_sequence_as(batch, range(len(tf.nest.flatten(batch))))
        self._components = flatten(numbers)[0] if pulls is not None else []

    def take(self, batches: Iterator[tuple], number: int, most: int) -> list[list[list[np.ndarray]]]:
        """The next batches, as `parts` gives each: at least one and at most `most`, or none at the end.

        Args:
            batches: the batches.
            number: the number of the next one.
            most: how many may be taken.

        Raises:
            Exception: the iterator raised it.
            InputsError: a batch differs from the first one.
        """
        if self._pulls is None:
            batch = next(batches, None)
            return [] if batch is None else [self.parts(batch, number)]
        try:
            taken = self._pulls.take(most)
        except tf.errors.OutOfRangeError:
            return []
        each, size = self._pulls.each, self._arguments.size
        rows = list(zip(*[taken[component] for component in self._components], strict=True))
        if each == 1:
            return [[list(row)] * size for row in rows]
        return [list(map(list, rows[begin : begin + each])) for begin in range(0, len(rows), each)]

    def parts(self, batch: tuple, number: int) -> list[list[np.ndarray]]:
        """For each replica, the arrays of a batch. Nothing changes these arrays afterwards.

        Raises:
            InputsError: the batch differs from the first in structure, dtypes or shapes.
        """
        if batch == () == self._skeleton:  # steps without inputs
            return self._nothing
        like, columns = _read(batch)
        if like is None or like != self._like:
            columns = self._through_arguments(batch, number)
        size = self._arguments.size
        return [[column[replica % len(column)] for column in columns] for replica in range(size)]

    def _through_arguments(self, batch: tuple, number: int) -> list[list[np.ndarray]]:
        first = self._arguments
        given = Arguments(self._in_order(batch), {}, first.size, numbers=True)
        if given.key != first.key:
            unlike = difference(given.slots, [slot.name for slot in first.slots], first.slots)
            raise InputsError(
                f"Batch {number} for `{self._name}` differs from the first batch of this run: {unlike}. A device "
                "loop is one program for all of its batches: give every batch the same keys, lengths and dtypes."
            )
        for slot, wanted in zip(given.slots, first.slots, strict=True):
            for value in slot.values:
                if value.shape != wanted.shape:
                    raise InputsError(
                        f"{slot.name} of batch {number} for `{self._name}` has the shape {value.shape}, but in the "
                        f"first batch of this run it has the shape {wanted.shape}. A device loop runs steps of one "
                        "shape: batch with drop_remainder=True, or pad the last batch."
                    )
        return given.numpy()

    def _in_order(self, batch: tuple) -> tuple:
        """A batch whose dictionaries have their keys in the same order as in the first batch."""
        try:
            tf.nest.assert_same_structure(self._skeleton, batch)
        except (ValueError, TypeError):
            return batch
        return tf.nest.pack_sequence_as(self._skeleton, tf.nest.flatten(batch))


def _read(batch: Any) -> tuple[Any, list[list[np.ndarray]]]:
    """The structure of a batch with dtypes and shapes, and for each tensor the replicas' arrays, or one for all.

    The structure is None if the batch holds anything but tensors and arrays.
    """
    leaves, spec = flatten(batch, what="the batches")
    like: list[Any] = [spec.key]
    columns: list[list[np.ndarray]] = []
    for leaf in leaves:
        column = []
        for part in leaf.values if isinstance(leaf, distribute.PerReplica) else (leaf,):
            if isinstance(part, tf.__internal__.EagerTensor) and not xla_ops.is_host_only(part.dtype):
                array = view(part)
            elif type(part) is np.ndarray:
                array = np.array(part, order="C")  # a copy: the iterator may reuse its array for the next batch
            else:
                return None, []
            if array.dtype.kind in "OSU" or not array.dtype.isnative:
                return None, []
            column.append(array)
            like.append((array.dtype, array.shape))
        like.append(len(column))
        columns.append(column)
    return like, columns
