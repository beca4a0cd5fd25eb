"""The gradient of a softmax in attention, computed once on a TPU.

TensorFlow's gradient is `(gradient - sum(gradient * softmax)) * softmax`. Two matrix products use it, for the gradients
of the queries and of the keys, and XLA computes all of it in each, element by element as the product reads it. A
barrier makes it a value of its own. (A decoder of two blocks, compiled for TPU v5e: 34.5 million cycles instead of
37.5, and 14.7 GiB moved instead of 15.8.)
"""

from __future__ import annotations

from replica_engine.pjrt.cpu_rewrites import ops
from replica_engine.pjrt.cpu_rewrites.ops import Value
from replica_engine.pjrt.jaxlib import hlo
from replica_engine.pjrt.mlir import barrier, made_by

_CHANGES = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.convert")
_LEAST_RANK = 3
"""A softmax over classes, which has rank 2, is followed by products that are small beside it."""


def rewritten(operation: hlo.MulOp) -> Value | None:
    """The result of a multiplication behind a barrier; None if it isn't the last one of a softmax's gradient."""
    left, right = operation.operands
    if len(ops.shape(left)) < _LEAST_RANK or not (_ends(left, right) or _ends(right, left)):
        return None
    return barrier(hlo.multiply(left, right))


def _ends(difference: Value, softmax: Value) -> bool:
    """Whether the first value is a gradient minus a sum of its products with the second."""
    subtraction = made_by(difference, "stablehlo.subtract")
    if subtraction is None:
        return False
    gradient, total = subtraction.operands
    while (change := made_by(total, *_CHANGES)) is not None:
        total = change.operands[0]
    reduction = made_by(total, "stablehlo.reduce")
    if reduction is None:
        return False
    summed = reduction.operands[0]
    conversion = made_by(summed, "stablehlo.convert")
    product = made_by(summed if conversion is None else conversion.operands[0], "stablehlo.multiply")
    return product is not None and list(product.operands) in ([gradient, softmax], [softmax, gradient])
