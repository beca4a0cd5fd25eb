"""The row of each value of a ragged tensor in a body for XLA. Checked on TensorFlow 2.21.0.

TensorFlow finds the row of each value by a mask of rows and of places in the longest row. XLA would have to know the
longest row when it compiles: `jit_compile=True` compiles a program for each value of the splits. The number of values
is known whatever the splits are. So here the rows are found from it, and one program serves all splits.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import subgraphs
from replica_engine._tf.graphs.kept import kept_on

_VALUES = "_replica_engine_values_of_splits"


def note_values(ragged: tf.RaggedTensor) -> None:
    """Notes which values the splits of a new ragged tensor divide, for `rows_of_values`."""
    splits = ragged.row_splits
    if tf.is_symbolic_tensor(splits):
        kept_on(splits.graph, _VALUES, dict)[splits.name] = ragged.values


def rows_of_values(lengths: Any) -> tf.Tensor | None:
    """The row of each value, if the lengths are those of the rows of a ragged tensor; None if that is not known."""
    splits = _splits(lengths) if tf.is_symbolic_tensor(lengths) else None
    values = None if splits is None else _values(splits)
    if splits is None or values is None:
        return None
    count = values.nrows(splits.dtype) if isinstance(values, tf.RaggedTensor) else tf.shape(values, splits.dtype)[0]
    # The last place takes the begins of empty rows at the end, which are no places of values.
    begins = tf.tensor_scatter_nd_add(0 * tf.range(count + 1), splits[1:-1, tf.newaxis], tf.ones_like(splits[1:-1]))
    rows = tf.slice(tf.cumsum(begins), [0], [count])
    rows.set_shape([values.shape[0]])
    return rows


def _values(splits: tf.Tensor) -> Any | None:
    """The values that splits divide; the graph of a branch or a loop may have captured the splits."""
    outside: Any = splits
    while tf.is_symbolic_tensor(outside):
        if (found := getattr(outside.graph, _VALUES, {}).get(outside.name)) is not None:
            return found
        if outside.op.type != "Placeholder":
            return None
        outside = subgraphs.captured(outside)
    return None


def _splits(lengths: tf.Tensor) -> tf.Tensor | None:
    """The splits of which lengths are the differences."""
    while lengths.op.type in ("Identity", "Cast"):
        lengths = lengths.op.inputs[0]
    ends = list(lengths.op.inputs) if lengths.op.type == "Sub" else []
    if not ends or any(each.op.type != "StridedSlice" for each in ends):
        return None
    (splits, first, *_), (other, _, last, *_) = (each.op.inputs for each in ends)
    is_whole = splits is other and tf.get_static_value(first) == [1] and tf.get_static_value(last) == [-1]
    return splits if is_whole else None
