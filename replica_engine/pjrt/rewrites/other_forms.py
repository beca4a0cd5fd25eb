"""Other forms of batched products, softmax and pooling, which are faster or need less memory; and of sums, in order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.stablehlo import mlir

_PRODUCT, _TRANSPOSE = "stablehlo.dot_general", "stablehlo.transpose"


def products_rewritten(operation: hlo.ReduceOp) -> mlir.Value | None:
    """The result of a batched matrix product whose batch is then summed; None if the operation is another.

    The gradient of `w` in `x @ w` with an `x` of rank 3 is lowered to this: a product for each row of the batch, all of
    them kept, and their sum. As one product over the batch too, XLA:CPU makes one call of its fast kernel.
    """
    reduce = operation.operation
    if len(reduce.results) != 1 or not mlir.is_static_float(reduce.operands[0], reduce.results[0]):
        return None
    if not mlir.is_zero(reduce.operands[1]):
        return None
    body = [each.operation.name for each in reduce.regions[0].blocks[0].operations]
    if body != ["stablehlo.add", "stablehlo.return"]:
        return None
    found = _find_product(reduce.operands[0])
    # One dtype in all of it: another one between the product and the sum would round in another way.
    if found is None or not mlir.is_static_float(*found.operands, reduce.operands[0], reduce.results[0]):
        return None
    numbers = hlo.DotDimensionNumbers(found.attributes["dot_dimension_numbers"])
    left, right = list(numbers.lhs_batching_dimensions), list(numbers.rhs_batching_dimensions)
    summed = list(operation.dimensions)
    # A product has its batch dimensions first.
    if not left or any(index >= len(left) for index in summed):
        return None
    batch = [index for index in range(len(left)) if index not in summed]
    contract = (
        [*(left[index] for index in summed), *numbers.lhs_contracting_dimensions],
        [*(right[index] for index in summed), *numbers.rhs_contracting_dimensions],
    )
    x, y = found.operands
    return mlir.product(x, y, contract, ([left[index] for index in batch], [right[index] for index in batch]))


def _find_product(value: mlir.Value) -> ir.Operation | None:
    """The product that a value is, perhaps under operations that change nothing; None if something else uses it."""
    while True:
        owner = mlir.made_by(value, _PRODUCT, _TRANSPOSE, "stablehlo.convert")
        # With another use, the product would be computed twice.
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


_CHANGES = ("stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.convert")
_LEAST_RANK = 3
"""A softmax over classes, which has rank 2, is followed by products that are small beside it."""


def softmax_rewritten(operation: hlo.MulOp) -> mlir.Value | None:
    """The result of a multiplication behind a barrier; None if it isn't the last one of a softmax's gradient.

    So the gradient of a softmax in attention is computed once on a TPU. TensorFlow's gradient is `(gradient -
    sum(gradient * softmax)) * softmax`. Two matrix products use it, for the gradients of the queries and of the keys,
    and XLA computes all of it in each, element by element as the product reads it. A barrier makes it a value of its
    own. (A decoder of two blocks, compiled for TPU v5e: 34.5 million cycles instead of 37.5, and 14.7 GiB moved instead
    of 15.8.)
    """
    left, right = operation.operands
    if len(mlir.shape(left)) < _LEAST_RANK or not (_ends(left, right) or _ends(right, left)):
        return None
    return mlir.barrier(hlo.multiply(left, right))


def _ends(difference: mlir.Value, softmax: mlir.Value) -> bool:
    """Whether the first value is a gradient minus a sum of its products with the second."""
    subtraction = mlir.made_by(difference, "stablehlo.subtract")
    if subtraction is None:
        return False
    gradient, total = subtraction.operands
    while (change := mlir.made_by(total, *_CHANGES)) is not None:
        total = change.operands[0]
    reduction = mlir.made_by(total, "stablehlo.reduce")
    if reduction is None:
        return False
    summed = reduction.operands[0]
    # A softmax of narrow floats is summed in float32.
    conversion = mlir.made_by(summed, "stablehlo.convert")
    product = mlir.made_by(summed if conversion is None else conversion.operands[0], "stablehlo.multiply")
    return product is not None and list(product.operands) in ([gradient, softmax], [softmax, gradient])


MOST_SLICES = 49
"""The most elements of a window."""

MOST_OVERLAP = 3.0
"""In how many windows an element may be. In more, adding up their gradients takes longer than XLA's loop."""


def pooling_rewritten(operation: hlo.SelectAndScatterOp) -> mlir.Value | None:
    """The result of a `select_and_scatter`; None if it is not the gradient of max-pooling, or the windows are large.

    XLA's operation loops over the windows: it looks for the first largest element of each and adds the window's
    gradient there. Here the windows are compared all at once: slice k of the input has element k of each window. Where
    the largest was found in slice k, the gradients go back to the places that slice k came from. Gradients that meet in
    one element (windows that overlap) are added in another order. Elements of the padding are never chosen. In a window
    with a NaN another element may be chosen than XLA chooses; what is pooled is NaN in both.
    """
    operand, source = operation.operand, operation.source
    if not mlir.is_static_float(operand, source) or not _is_max_gradient(operation):
        return None
    sizes = mlir.shape(operand)
    rank = len(sizes)
    ones = [1] * rank
    window, strides = (mlir.numbers(each, ones) for each in (operation.window_dimensions, operation.window_strides))
    low, high = mlir.padding(operation, rank)
    overlap = math.prod(window) / math.prod(strides)
    # Negative padding cuts elements off: the slices below do not do that.
    if math.prod(window) > MOST_SLICES or overlap > MOST_OVERLAP or min(*low, *high) < 0:
        return None
    results = mlir.shape(source)
    padded = mlir.pad(operand, low, high, with_=-math.inf)
    offsets = list(itertools.product(*map(range, window)))
    best = mlir.cut(padded, offsets[0], results, strides)
    # At first the first element outside the padding. The padding is minus infinity, and nothing is less than that.
    chosen = _spread(np.argmax(_inside(sizes, low, high, offsets, results, strides), 0), results)
    for number, offset in enumerate(offsets[1:], start=1):
        value = mlir.cut(padded, offset, results, strides)
        is_larger = mlir.compared(best, value, "LT")
        best = hlo.select(is_larger, value, best)
        chosen = hlo.select(is_larger, _spread(np.full([1] * rank, number), results), chosen)
    return mlir.cut(_scattered(source, chosen, offsets, mlir.shape(padded), strides), low, sizes, ones)


def _scattered(
    source: mlir.Value, chosen: mlir.Value, offsets: list[tuple[int, ...]], sizes: list[int], strides: list[int]
) -> mlir.Value:
    """The gradients at the places in the padded input that they were chosen from."""
    results, summed = mlir.shape(source), None
    nothing = mlir.broadcast(mlir.scalar(0.0, mlir.element_type(source)), results, [])
    for number, offset in enumerate(offsets):
        here = mlir.compared(chosen, _spread(np.full([1] * len(results), number), results), "EQ")
        part = hlo.select(here, source, nothing)
        reach = [at + (count - 1) * stride + 1 for at, count, stride in zip(offset, results, strides, strict=True)]
        after = [size - end for size, end in zip(sizes, reach, strict=True)]
        spread = mlir.pad(part, offset, after, [stride - 1 for stride in strides])
        summed = spread if summed is None else hlo.add(summed, spread)
    assert summed is not None, "a window has elements"
    return summed


def _inside(
    sizes: list[int],
    low: list[int],
    high: list[int],
    offsets: list[tuple[int, ...]],
    results: list[int],
    strides: list[int],
) -> np.ndarray:
    """For each slice, which of its elements lie outside the padding; dimensions without padding have size 1."""
    table = np.ones((len(offsets), *([1] * len(sizes))), bool)
    for dimension, size in enumerate(sizes):
        if low[dimension] or high[dimension]:
            at = np.add.outer(
                [offset[dimension] for offset in offsets], np.arange(results[dimension]) * strides[dimension]
            )
            at -= low[dimension]
            along = [1] * len(sizes)
            along[dimension] = results[dimension]
            table = table & ((at >= 0) & (at < size)).reshape(len(offsets), *along)
    return table


def _spread(table: np.ndarray, results: list[int]) -> mlir.Value:
    """Whole numbers as a constant of the shape of the results."""
    # MLIR reads the memory of the array as it lies.
    numbers: Any = np.ascontiguousarray(table, np.int32)
    constant = hlo.constant(ir.DenseElementsAttr.get(numbers))
    return mlir.broadcast(constant, results, list(range(len(results))))


def _is_max_gradient(operation: hlo.SelectAndScatterOp) -> bool:
    """Whether it selects with >= and scatters with + onto zeros."""
    select, scatter = ([*region.blocks[0].operations] for region in operation.regions)
    if len(select) != 2 or len(scatter) != 2 or scatter[0].operation.name != "stablehlo.add":
        return False
    first = select[0].operation
    return (
        first.name == "stablehlo.compare"
        and hlo.ComparisonDirectionAttr(first.attributes["comparison_direction"]).value == "GE"
        and list(first.operands) == list(operation.regions[0].blocks[0].arguments)
        and mlir.is_zero(operation.init_value)
    )


def sum_in_order(operation: hlo.AllReduceOp) -> mlir.Value | None:
    """A sum over replicas as a gather and additions in the order of each group; None for what has no order.

    Integers have the same sum in any order, and a minimum and a maximum too.
    """
    reduce = operation.operation
    groups = _groups(reduce)
    if not _adds_floats(reduce) or groups.shape[1] == 1:
        return None
    everybody = np.sort(groups[groups >= 0])[None]
    is_even = bool((groups >= 0).all())
    row = groups if is_even else everybody
    (value,) = reduce.operands
    kind = ir.RankedTensorType(value.type)
    one = mlir.reshape(value, [1, *kind.shape])
    gathered = _exchange("all_gather", one, [row.shape[1], *kind.shape], row, all_gather_dim=0)
    if not is_even:  # zeros in place of the replicas of other groups
        in_group = [(group[:, None] == everybody).any(0) for group in groups]
        place: Any = np.argmax(in_group, 0).astype(np.int32)
        table = hlo.constant(ir.DenseElementsAttr.get(place))
        own = mlir.reshape(hlo.dynamic_slice(table, [hlo.replica_id()], [1]), [])
        sizes = mlir.shape(gathered)
        is_own = mlir.compared(mlir.broadcast(table, sizes, [0]), mlir.broadcast(own, sizes, []), "EQ")
        gathered = hlo.select(is_own, gathered, mlir.splat(-0.0, ir.RankedTensorType(gathered.type)))
    return _added_up(gathered, 0)


def scatter_in_order(operation: hlo.ReduceScatterOp) -> mlir.Value | None:
    """A reduce-scatter as an exchange of parts and additions in the order of each group."""
    scatter = operation.operation
    groups = _groups(scatter)
    if not _adds_floats(scatter) or groups.shape[1] == 1:
        return None
    axis = ir.IntegerAttr(scatter.attributes["scatter_dimension"]).value
    (value,), count = scatter.operands, groups.shape[1]
    sizes = mlir.shape(value)
    parts = _exchange(
        "all_to_all", value, sizes, groups, split_dimension=axis, concat_dimension=axis, split_count=count
    )
    return _added_up(mlir.reshape(parts, [*sizes[:axis], count, sizes[axis] // count, *sizes[axis + 1 :]]), axis)


def _adds_floats(reduction: ir.Operation) -> bool:
    body = [each.operation.name for each in reduction.regions[0].blocks[0].operations]
    kind = ir.RankedTensorType(reduction.operands[0].type)
    is_float = isinstance(kind.element_type, ir.FloatType)
    return is_float and body == ["stablehlo.add", "stablehlo.return"] and kind.has_static_shape and 0 not in kind.shape


def _groups(collective: ir.Operation) -> np.ndarray:
    """The groups of replicas, filled up with -1 to one size."""
    return np.array(ir.DenseIntElementsAttr(collective.attributes["replica_groups"])).astype(np.int64)


def _exchange(name: str, value: mlir.Value, sizes: list[int], groups: np.ndarray, **numbers: int) -> mlir.Value:
    """The result of a collective of StableHLO."""
    attributes = {key: ir.Attribute.parse(f"{number} : i64") for key, number in numbers.items()}
    rows: Any = np.ascontiguousarray(groups)
    attributes["replica_groups"] = ir.DenseElementsAttr.get(rows)
    kind = ir.RankedTensorType.get(sizes, mlir.element_type(value))
    return ir.Operation.create(f"stablehlo.{name}", results=[kind], operands=[value], attributes=attributes).result


def _added_up(value: mlir.Value, axis: int) -> mlir.Value:
    """The sum along a dimension, in its order; 16-bit floats are rounded once."""
    sizes, element = mlir.shape(value), mlir.element_type(value)
    if str(element) in ("f16", "bf16"):
        value = hlo.convert(ir.RankedTensorType.get(sizes, ir.F32Type.get()), value)
    total = mlir.reduced_over(value, [axis], -0.0, hlo.add)  # from 0.0 the sum of -0.0 would be 0.0
    kind = ir.RankedTensorType.get(mlir.shape(total), element)
    return total if total.type == kind else hlo.convert(kind, total)
