"""Updates of some rows of a table, for which XLA has no kernel. Checked on TensorFlow 2.21.0.

The optimizers of `tf.compat.v1.train`, and those of Keras 2 in part, have an op that updates a table and its slots at
some rows. XLA has the op that updates all rows. So in a body all rows are updated, and the others are put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replica_engine._tf.graphs import control_flow
from replica_engine._tf.hook import FIRST_COMPILED, Hook

_SPARSE, _DENSE = "ResourceSparseApply", "ResourceApply"

MAKE_OP = Hook(
    "tensorflow.python.framework.op_def_library",
    "_apply_op_helper",
    why="in compiled bodies, optimizers of `tf.compat.v1.train` and Keras 2 update rows of tables, and "
    "`Generator.binomial` draws",
    since=FIRST_COMPILED,
)


def update_all(original: Callable[..., Any], kind: str, name: str | None = None, **given: Any) -> Any:
    """Makes an op, or in a body what stands for an update of some rows; the answer has the op as its third value."""
    of_all = getattr(tf.raw_ops, kind.replace(_SPARSE, _DENSE), None) if kind.startswith(_SPARSE) else None
    if of_all is None or not control_flow.in_body():
        return original(kind, name=name, **given)
    rows, indices = tf.convert_to_tensor(given.pop("grad")), tf.convert_to_tensor(given.pop("indices"))
    shape = tf.raw_ops.VariableShape(input=given["var"], out_type=indices.dtype)
    places = indices[:, tf.newaxis]
    gradient = "delta" if "delta" in inspect.signature(of_all).parameters else "grad"
    given[gradient] = tf.scatter_nd(places, rows, shape)
    chosen = tf.scatter_nd(places, tf.ones_like(indices, tf.int32), shape[:1]) > 0
    chosen = tf.reshape(chosen, [-1, *[1] * (rows.shape.rank - 1)])
    handles = [each for each in given.values() if isinstance(each, tf.Tensor) and each.dtype == tf.resource]
    before = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=rows.dtype) for handle in handles]
    with tf.control_dependencies([*before, of_all(**given)]):
        updates = [_put_back(handle, chosen, old) for handle, old in zip(handles, before, strict=True)]
    return None, True, tf.group(*updates), []


def _put_back(handle: tf.Tensor, chosen: tf.Tensor, before: tf.Tensor) -> tf.Operation:
    """Restores the rows of a variable that were not to be updated."""
    after = tf.raw_ops.ReadVariableOp(resource=handle, dtype=before.dtype)
    return tf.raw_ops.AssignVariableOp(resource=handle, value=tf.where(chosen, after, before))
