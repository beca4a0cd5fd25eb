"""Writes to arrays of tensors (`tf.TensorArray`). An array of a compiled program keeps the size that it is made with.

XLA drops a write beyond that size without a word, and the sum of such an array is wrong. So a write that may let its
array grow is an error, and so is one at a known index beyond a known size. Others are not checked: that would be a call
of the host in each step of a recurrent layer.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from replica_engine._tf.graphs import made_ops
from replica_engine.diagnostics.op_lines import here
from replica_engine.errors import LoweringError
from replica_engine.errors.base import at


def checked() -> contextlib.AbstractContextManager[None]:
    """Inside, such a write raises a LoweringError when it is traced."""
    sizes: dict[tf.Operation, int | None] = {}  # by the write, of the array that it wrote to

    def check(write: tf.Operation) -> None:
        if write.get_attr("resize_if_index_out_of_bounds"):
            raise LoweringError(
                f"A tf.TensorArray with dynamic_size=True is written{at(here())}. Arrays of a compiled program cannot "
                "grow. Pass the largest size: tf.TensorArray(dtype, size=n). MirroredStrategy runs the function "
                "without changes."
            )
        size = sizes[write] = _size(write.inputs[0].op, sizes)
        index = tf.get_static_value(write.inputs[1])
        if size is not None and index is not None and index >= size:
            raise LoweringError(
                f"Index {index} is written{at(here())} in a tf.TensorArray of size {size}. A compiled program would "
                "drop the element without a word. Make the array large enough: tf.TensorArray(dtype, size=n)."
            )

    return made_ops.seen({"TensorListSetItem": check})


def _size(op: tf.Operation, sizes: dict[tf.Operation, int | None]) -> int | None:
    """The size of the array that an op made or wrote to; None if it is not known."""
    while op.type == "Identity":
        op = op.inputs[0].op
    size = sizes.get(op)
    if op.type == "TensorListReserve":
        size = tf.get_static_value(op.inputs[1])
    elif op.type == "TensorListFromTensor":
        size = op.inputs[0].shape[0] if op.inputs[0].shape.rank else None
    return size
