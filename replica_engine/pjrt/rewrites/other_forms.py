"""Other forms of batched products, softmax and pooling, which are faster or need less memory; and of sums, in order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.stablehlo import mlir
from replica_engine.process import ordered_sum

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
    """A sum over replicas as a gather and additions in the order of the replicas; None for what has no order.

    Integers have the same sum in any order, and a minimum and a maximum too.
    """
    reduce = operation.operation
    if not _adds_floats(reduce):
        return None
    groups = _groups(reduce)
    return _gathered_sum(reduce.operands[0], [sorted(group) for group in groups])


def scatter_in_order(operation: hlo.ReduceScatterOp) -> mlir.Value | None:
    """A reduce-scatter as an exchange of parts and additions in the order of the replicas."""
    scatter = operation.operation
    if not _adds_floats(scatter):
        return None
    groups = _groups(scatter)
    axis = ir.IntegerAttr(scatter.attributes["scatter_dimension"]).value
    (value,), count = scatter.operands, len(groups[0])
    sizes, rows = mlir.shape(value), mlir.shape(scatter.results[0])
    if all(group == sorted(group) for group in groups):
        parts = _exchange(
            "all_to_all", value, sizes, groups, split_dimension=axis, concat_dimension=axis, split_count=count
        )
        return _added_up(mlir.reshape(parts, [*sizes[:axis], count, *rows[axis:]]), axis)
    # The place of a replica in its group says which part it gets; its number says when it is added.
    total = _gathered_sum(value, [sorted(group) for group in groups])
    begins = [
        place * rows[axis] for _, place in sorted((each, at) for group in groups for at, each in enumerate(group))
    ]
    begin = _own(begins)
    zero = mlir.splat(0, ir.RankedTensorType(begin.type))
    return hlo.dynamic_slice(total, [begin if index == axis else zero for index in range(len(sizes))], rows)


def _adds_floats(reduction: ir.Operation) -> bool:
    """Whether it adds floats of several replicas."""
    body = [each.operation.name for each in reduction.regions[0].blocks[0].operations]
    kind = ir.RankedTensorType(reduction.operands[0].type)
    is_sum = isinstance(kind.element_type, ir.FloatType) and body == ["stablehlo.add", "stablehlo.return"]
    return is_sum and kind.has_static_shape and 0 not in kind.shape and max(map(len, _groups(reduction))) > 1


def _groups(collective: ir.Operation) -> list[list[int]]:
    rows = np.array(ir.DenseIntElementsAttr(collective.attributes["replica_groups"])).astype(np.int64).tolist()
    return [[each for each in row if each >= 0] for row in rows]  # groups of unequal sizes are filled up with -1


def _gathered_sum(value: mlir.Value, groups: list[list[int]]) -> mlir.Value:
    everybody = sorted(each for group in groups for each in group)
    is_even = len({*map(len, groups)}) == 1
    sizes = mlir.shape(value)
    rows = groups if is_even else [everybody]
    one = mlir.reshape(value, [1, *sizes])
    gathered = _exchange("all_gather", one, [len(rows[0]), *sizes], rows, all_gather_dim=0)
    if is_even:
        return _added_up(gathered, 0)
    # What a replica has of other groups becomes -0.0, which changes no sum.
    group_of = [next(index for index, group in enumerate(groups) if each in group) for each in everybody]
    own = _own(group_of)
    shape, number = mlir.shape(gathered), ir.RankedTensorType(own.type).element_type
    table = hlo.constant(
        ir.DenseElementsAttr.get(_numbers(group_of), type=ir.RankedTensorType.get([len(everybody)], number))
    )
    is_own = mlir.compared(mlir.broadcast(table, shape, [0]), mlir.broadcast(own, shape, []), "EQ")
    return _added_up(hlo.select(is_own, gathered, mlir.splat(-0.0, ir.RankedTensorType(gathered.type))), 0)


def _own(of_replica: list[int]) -> mlir.Value:
    """The number of the replica that runs this."""
    table = hlo.constant(ir.DenseElementsAttr.get(_numbers(of_replica)))
    return mlir.reshape(hlo.dynamic_slice(table, [hlo.replica_id()], [1]), [])


def _numbers(of_replica: list[int]) -> Any:
    return np.array(of_replica, np.int32)


def _exchange(name: str, value: mlir.Value, sizes: list[int], groups: list[list[int]], **numbers: int) -> mlir.Value:
    """The result of a collective of StableHLO."""
    attributes = {key: ir.Attribute.parse(f"{number} : i64") for key, number in numbers.items()}
    rows: Any = np.array(groups, np.int64)
    attributes["replica_groups"] = ir.DenseElementsAttr.get(rows)
    kind = ir.RankedTensorType.get(sizes, mlir.element_type(value))
    return ir.Operation.create(f"stablehlo.{name}", results=[kind], operands=[value], attributes=attributes).result


def _added_up(values: mlir.Value, axis: int) -> mlir.Value:
    """The sum along a dimension, in the order of `process.ordered_sum`; 16-bit floats are rounded once.

    One addition after the other: XLA does not change their order, but that of a reduction. And it adds up what it knows
    while it compiles in an order of its own, so it must not see where the values come from.
    """
    sizes, element = mlir.shape(values), mlir.element_type(values)
    values = mlir.barrier(values)
    if str(element) in ("f16", "bf16"):
        values = hlo.convert(ir.RankedTensorType.get(sizes, ir.F32Type.get()), values)

    def part(place: int) -> mlir.Value:
        start = [place if index == axis else 0 for index in range(len(sizes))]
        counts = [1 if index == axis else size for index, size in enumerate(sizes)]
        return mlir.reshape(mlir.cut(values, start, counts, [1] * len(sizes)), [*sizes[:axis], *sizes[axis + 1 :]])

    total: mlir.Value = ordered_sum([*map(part, range(sizes[axis]))], hlo.add)
    return (
        hlo.convert(ir.RankedTensorType.get(mlir.shape(total), element), total)
        if mlir.element_type(total) != element
        else total
    )
