"""A batched matrix product whose batch is then summed, as one product.

The gradient of `w` in `x @ w` with an `x` of rank 3 is lowered to this: a product for each row of the batch, all of
them kept, and their sum. As one product over the batch too, XLA:CPU makes one call of its fast kernel.
"""

from __future__ import annotations

from replica_engine.pjrt.cpu_rewrites import ops
from replica_engine.pjrt.cpu_rewrites.ops import Value
from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.mlir import made_by

_PRODUCT, _TRANSPOSE = "stablehlo.dot_general", "stablehlo.transpose"


def rewritten(operation: hlo.ReduceOp) -> Value | None:
    """The result of a sum of products; None if the operation is another."""
    reduce = operation.operation
    if len(reduce.results) != 1 or not ops.is_static_float(reduce.operands[0], reduce.results[0]):
        return None
    if not ops.is_zero(reduce.operands[1]):
        return None
    body = [each.operation.name for each in reduce.regions[0].blocks[0].operations]
    if body != ["stablehlo.add", "stablehlo.return"]:
        return None
    found = _product_of(reduce.operands[0])
    if found is None or not ops.is_static_float(*found.operands, reduce.operands[0], reduce.results[0]):
        return None
    numbers = hlo.DotDimensionNumbers(found.attributes["dot_dimension_numbers"])
    left, right = list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)
    summed = list(operation.dimensions)
    if not left or any(index >= len(left) for index in summed):
        return None
    batch = [index for index in range(len(left)) if index not in summed]
    contract = (
        [*(left[index] for index in summed), *numbers.lhs_contracting_dimensions],
        [*(right[index] for index in summed), *numbers.rhs_contracting_dimensions],
    )
    x, y = found.operands
    return ops.product(x, y, contract, ([left[index] for index in batch], [right[index] for index in batch]))


def _product_of(value: Value) -> ir.Operation | None:
    """The product that a value is, perhaps under operations that change nothing; None if something else uses it."""
    while True:
        owner = made_by(value, _PRODUCT, _TRANSPOSE, "stablehlo.convert")
        if owner is None or len(list(value.uses)) != 1:
            return None
        if owner.name == _PRODUCT:
            return owner
        if owner.name == _TRANSPOSE:
            order = list(ir.DenseI64ArrayAttr(owner.attributes["permutation"]))
            if order != sorted(order):
                return None
        if owner.operands[0].type != owner.results[0].type:
            return None
        value = owner.operands[0]
