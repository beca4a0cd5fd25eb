"""Arrays of tensors that grow: a `tf.TensorArray` with `dynamic_size=True`.

An array in a compiled program has the size that it is made with. XLA drops a write beyond it without a word, and the
sum of such an array is wrong. So each write that may let an array grow is checked while the program runs.
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

    def see_write(op: tf.Operation) -> None:
        if not op.get_attr(_GROWS):
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
