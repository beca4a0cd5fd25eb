"""Updates of some rows of a table, for which XLA has no kernel. Checked on TensorFlow 2.21.0.

The optimizers of `tf.compat.v1.train`, and those of Keras 2 in part, have an op that updates a table and its slots at
some rows. XLA has the op that updates all rows. So in a body all rows are updated, and the others are put back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# resource_sparse_apply_*: what the optimizers of tf.compat.v1.train call. Keras 2 calls tf.raw_ops.
from tensorflow.python.ops import gen_training_ops as _training_ops

from replica_engine._tf.graphs import control_flow

_NAMES = {
    "resource_sparse_apply_adadelta": "Adadelta",
    "resource_sparse_apply_adagrad": "Adagrad",
    "resource_sparse_apply_adagrad_da": "AdagradDA",
    "resource_sparse_apply_adagrad_v2": "AdagradV2",
    "resource_sparse_apply_centered_rms_prop": "CenteredRMSProp",
    "resource_sparse_apply_ftrl": "Ftrl",
    "resource_sparse_apply_ftrl_v2": "FtrlV2",
    "resource_sparse_apply_keras_momentum": "KerasMomentum",
    "resource_sparse_apply_momentum": "Momentum",
    "resource_sparse_apply_proximal_adagrad": "ProximalAdagrad",
    "resource_sparse_apply_proximal_gradient_descent": "ProximalGradientDescent",
    "resource_sparse_apply_rms_prop": "RMSProp",
}
_WHY = "optimizers of tf.compat.v1.train and Keras 2 update rows of tables in compiled bodies"

WRAPPED = {
    **{name: control_flow.Wrapped(_training_ops, name, _WHY) for name in _NAMES},
    **{
        kind: control_flow.Wrapped(tf.raw_ops, kind, _WHY)
        for kind in (f"ResourceSparseApply{each}" for each in _NAMES.values())
    },
}
"""The functions that make the ops."""


def wrap() -> None:
    """Makes bodies update all rows, once."""
    for name, kind in _NAMES.items():
        around = _around(kind, inspect.signature(getattr(_training_ops, name)))
        control_flow.wrap(WRAPPED[name], around)
        control_flow.wrap(WRAPPED[f"ResourceSparseApply{kind}"], around)


def _around(kind: str, signature: inspect.Signature) -> Callable[..., Any]:
    of_all = getattr(tf.raw_ops, f"ResourceApply{kind}")
    gradient = "delta" if "delta" in inspect.signature(of_all).parameters else "grad"

    def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not control_flow.in_body():
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        given.pop("name", None)
        rows, indices = tf.convert_to_tensor(given.pop("grad")), tf.convert_to_tensor(given.pop("indices"))
        shape = tf.raw_ops.VariableShape(input=given["var"], out_type=indices.dtype)
        places = indices[:, tf.newaxis]
        given[gradient] = tf.scatter_nd(places, rows, shape)
        chosen = tf.scatter_nd(places, tf.ones_like(indices, tf.int32), shape[:1]) > 0
        chosen = tf.reshape(chosen, [-1, *[1] * (rows.shape.rank - 1)])
        handles = [each for each in given.values() if isinstance(each, tf.Tensor) and each.dtype == tf.resource]
        before = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=rows.dtype) for handle in handles]
        with tf.control_dependencies([*before, of_all(**given)]):
            return tf.group(*(_put_back(handle, chosen, old) for handle, old in zip(handles, before, strict=True)))

    return update


def _put_back(handle: tf.Tensor, chosen: tf.Tensor, before: tf.Tensor) -> tf.Operation:
    """Restores the rows of a variable that were not to be updated."""
    after = tf.raw_ops.ReadVariableOp(resource=handle, dtype=before.dtype)
    return tf.raw_ops.AssignVariableOp(resource=handle, value=tf.where(chosen, after, before))
