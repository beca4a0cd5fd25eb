"""Arrays of tensors that grow: a `tf.TensorArray` with `dynamic_size=True`.

An array in a compiled program has the size that it is made with. XLA drops a write beyond it without a word, and the
sum of such an array is wrong. So each write that may be beyond the size is checked while the program runs.
"""

from __future__ import annotations

import contextlib

import tensorflow as tf

from replica_engine._tf.graphs import made_ops
from replica_engine.diagnostics.op_lines import here
from replica_engine.errors import LoweringError
from replica_engine.errors.programs import WRITTEN_BEYOND_ITS_SIZE

_WRITE = "TensorListSetItem"
_GROWS = "resize_if_index_out_of_bounds"


def checked(raises: bool) -> contextlib.AbstractContextManager[None]:
    """Writes that are made inside to arrays that grow are checked when they run.

    Args:
        raises: whether a check that fails can raise, on the host. Otherwise such a write is a LoweringError while the
            body is traced.
    """

    def see(op: tf.Operation) -> None:
        if not op.get_attr(_GROWS):
            return
        if not raises:
            raise LoweringError.growing_array(here())
        array, index = op.inputs[:2]
        size = tf.raw_ops.TensorListLength(input_handle=array)
        tf.debugging.Assert(index < size, [WRITTEN_BEYOND_ITS_SIZE, index, size])

    return made_ops.seen(_WRITE, see)
