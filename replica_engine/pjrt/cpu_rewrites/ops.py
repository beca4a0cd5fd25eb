"""Short names for the operations that the rewrites build. Each is inserted where the current insertion point is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.mlir import made_by, splat

T = TypeVar("T")
Value = ir.Value
"""A value of a program: a tensor of known shape."""


def shape(value: Value) -> list[int]:
    """The shape of a value."""
    return list(ir.RankedTensorType(value.type).shape)


def element_type(value: Value) -> ir.Type:
    """The element type of a value."""
    return ir.RankedTensorType(value.type).element_type


def is_static_float(*values: Value) -> bool:
    """Whether values have known shapes without empty dimensions, and one element type: float32 or float64."""
    types = [ir.RankedTensorType(value.type) for value in values]
    return all(each.has_static_shape and 0 not in each.shape for each in types) and {
        str(each.element_type) for each in types
    } in ({"f32"}, {"f64"})


def scalar(value: float, kind: ir.Type) -> Value:
    """A constant of rank 0."""
    return splat(value, ir.RankedTensorType.get([], kind))


def broadcast(value: Value, to: Sequence[int], dimensions: Sequence[int]) -> Value:
    """A value repeated to a shape; dimension i becomes dimension `dimensions[i]`."""
    return hlo.broadcast_in_dim(ir.RankedTensorType.get(list(to), element_type(value)), value, list(dimensions))


def pad(
    value: Value, low: Sequence[int], high: Sequence[int], interior: Sequence[int] | None = None, with_: float = 0.0
) -> Value:
    """A value with more elements around it, and between its elements; negative numbers cut elements off."""
    inside = list(interior or [0] * len(low))
    if not any([*low, *high, *inside]):
        return value
    return hlo.pad(value, scalar(with_, element_type(value)), list(low), list(high), inside)


def cut(value: Value, start: Sequence[int], counts: Sequence[int], strides: Sequence[int]) -> Value:
    """So many elements of each dimension, from a start, with a stride."""
    if counts == shape(value):
        return value
    limits = [first + (count - 1) * stride + 1 for first, count, stride in zip(start, counts, strides, strict=True)]
    return hlo.slice(value, list(start), limits, list(strides))


def reshape(value: Value, to: Sequence[int]) -> Value:
    """A value with another shape."""
    return hlo.reshape(ir.RankedTensorType.get(list(to), element_type(value)), value) if shape(value) != to else value


def transpose(value: Value, order: Sequence[int]) -> Value:
    """A value with its dimensions in another order."""
    return hlo.transpose(value, list(order)) if list(order) != sorted(order) else value


def join(values: Sequence[Value], axis: int) -> Value:
    """Values one after the other along an axis."""
    return hlo.concatenate(list(values), axis) if len(values) > 1 else values[0]


def product(
    left: Value,
    right: Value,
    contract: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
) -> Value:
    """A matrix product. Its dimensions are the batch, then what is left of `left`, then what is left of `right`."""
    kept_left = [size for index, size in enumerate(shape(left)) if index not in (*contract[0], *batch[0])]
    kept_right = [size for index, size in enumerate(shape(right)) if index not in (*contract[1], *batch[1])]
    sizes = [shape(left)[index] for index in batch[0]] + kept_left + kept_right
    numbers = hlo.DotDimensionNumbers.get(list(batch[0]), list(batch[1]), list(contract[0]), list(contract[1]))
    return hlo.dot_general(ir.RankedTensorType.get(sizes, element_type(left)), left, right, numbers)


def is_zero(value: Value) -> bool:
    """Whether a value is the constant 0 (or -0) of a floating-point type."""
    while (change := made_by(value, "stablehlo.convert", "stablehlo.reshape")) is not None:
        value = change.operands[0]
    constant = made_by(value, "stablehlo.constant")
    if constant is None:
        return False
    if str(element_type(value)) not in ("f16", "bf16", "f32", "f64"):  # jaxlib cannot read all others: complex64
        return False
    elements = ir.DenseElementsAttr(constant.attributes["value"])
    return elements.is_splat and float(elements.get_splat_value().value) == 0.0  # type: ignore[attr-defined]


def numbers(attribute: Any, default: list[T]) -> list[T]:
    """What an attribute has for each dimension; a default if an operation lacks it."""
    return list(default if attribute is None else attribute)


def padding(operation: hlo.ConvolutionOp | hlo.SelectAndScatterOp, rank: int) -> tuple[list[int], list[int]]:
    """The padding of an operation, before and after each dimension."""
    elements: Any = [0] * 2 * rank if operation.padding is None else ir.DenseIntElementsAttr(operation.padding)
    return list(elements)[0::2], list(elements)[1::2]
