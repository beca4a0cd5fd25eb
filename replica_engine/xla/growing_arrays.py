"""Arrays of tensors in a compiled program: a `tf.TensorArray` has the size that it is made with.

XLA drops a write beyond the size without a word, and the sum of such an array is wrong. So each write that may let an
array grow (`dynamic_size=True`) is checked while the program runs. A write to an array that does not grow is checked
when it is traced, as far as its index is known then, as in a Python loop: a check in each step of a recurrent layer
would cost too much.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from replica_engine._tf.graphs import made_ops
from replica_engine.diagnostics.op_lines import here
from replica_engine.errors import LoweringError
from replica_engine.errors.base import at
from replica_engine.errors.programs import WRITTEN_BEYOND_ITS_SIZE

_GROWS = "resize_if_index_out_of_bounds"


@contextlib.contextmanager
def fixed(can_check: bool) -> Iterator[None]:
    """Inside, arrays keep the size that they are made with.

    Args:
        can_check: whether the host can check writes while the program runs; if not, a write that may let an array grow
            raises a `LoweringError`.
    """

    sizes: dict[int, int | None] = {}  # by the id of the op that made an array or wrote to it

    def see_write(op: tf.Operation) -> None:
        if not op.get_attr(_GROWS):
            size, index = sizes.setdefault(id(op), _size(op.inputs[0].op, sizes)), tf.get_static_value(op.inputs[1])
            if size is not None and index is not None and index >= size:
                raise LoweringError(
                    f"Index {index} is written{at(here())} in a tf.TensorArray of size {size}. A compiled program "
                    "would drop the element without a word. Make the array large enough: tf.TensorArray(dtype, size=n)."
                )
            return
        if not can_check:
            raise LoweringError(
                f"A tf.TensorArray with dynamic_size=True is written{at(here())}. Arrays of a compiled program cannot "
                "grow, and with soft_placement=False no check can detect a write beyond the size. Pass the largest "
                "size: tf.TensorArray(dtype, size=n)."
            )
        made_ops.set_flag(op, _GROWS, False)  # XLA has no gradient of a write that grows
        array, index = op.inputs[:2]
        size = tf.raw_ops.TensorListLength(input_handle=array)
        tf.debugging.Assert(index < size, [WRITTEN_BEYOND_ITS_SIZE, index, size])

    with made_ops.seen({"TensorListSetItem": see_write}):
        yield


def _size(op: tf.Operation, sizes: dict[int, int | None]) -> int | None:
    """The size of the array that an op made or wrote to; None if it is not known."""
    while op.type == "Identity":
        op = op.inputs[0].op
    if op.type == "TensorListReserve":
        return tf.get_static_value(op.inputs[1])
    if op.type == "TensorListFromTensor":
        return op.inputs[0].shape[0] if op.inputs[0].shape.rank else None
    return sizes.get(id(op))
