"""Batches of Python code, copied into TensorFlow's memory before replicas get parts of them.

TensorFlow takes an array that a generator or `tf.numpy_function` returns without a copy, if its memory is aligned to 64
bytes. It marks such memory as not its own, so no op writes its result there in place of its input. But a slice of it
does not carry the mark, and a distributed dataset gives each replica a slice of the batch. An op of the step may then
overwrite the user's array. The next epoch trains on what the step has computed, and where arrays lie and which op comes
last differ from run to run. TensorFlow's own strategies do so too. Checked on TensorFlow 2.21.0.

`batch` copies its elements. So only what Python does after the last `batch` matters here.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# The classes of what `batch` and `padded_batch` return.
from tensorflow.python.data.ops.batch_op import _BatchDataset, _ParallelBatchDataset
from tensorflow.python.data.ops.padded_batch_op import _PaddedBatchDataset

from replica_engine._tf.data_pulls import looks_as_if_it_calls_python

# Without strings and variants, which are never NumPy's memory, and float8 and int4, which `DeepCopy` does not know.
_COPIED = frozenset(
    tf.as_dtype(name)
    for name in (
        *("bool", "bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
        *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    )
)


def in_own_memory(dataset: Any) -> Any:
    """The dataset with copies of its elements, if they may be the memory of Python; otherwise the dataset itself."""
    if not isinstance(dataset, tf.data.Dataset) or not looks_as_if_it_calls_python(dataset, _COPYING):
        return dataset
    several = type(dataset.element_spec) is tuple  # `map` passes the parts of a tuple one by one

    @tf.autograph.experimental.do_not_convert
    def copied(*element: Any) -> Any:
        return tf.nest.map_structure(_copied, element if several else element[0], expand_composites=True)

    return dataset.map(copied)


_COPYING = (_BatchDataset, _ParallelBatchDataset, _PaddedBatchDataset)


def _copied(tensor: Any) -> Any:
    return tf.raw_ops.DeepCopy(x=tensor) if getattr(tensor, "dtype", None) in _COPIED else tensor
