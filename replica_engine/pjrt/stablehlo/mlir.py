"""Building and changing modules of MLIR: names of operations, conversions of numbers, divisions."""

from __future__ import annotations

import platform as machine
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from replica_engine.pjrt.jaxlib import FOLDS_DIVISIONS, hlo, ir

_REFERENCES = ("callee", "called_computations", "decomposition")  # attributes that name functions


def operations(root: ir.Module | ir.Operation, *names: str) -> list[ir.Operation]:
    """The operations of these names inside a module, a function or another operation."""
    found: list[ir.Operation] = []

    def collect(operation: ir.Operation) -> ir.WalkResult:
        if operation.name in names:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    root.operation.walk(collect)
    return found


def functions(module: ir.Module) -> dict[str, ir.Operation]:
    """The functions of a module, by name."""
    found = (each.operation for each in module.body.operations if each.operation.name == "func.func")
    return {ir.StringAttr(each.attributes["sym_name"]).value: each for each in found}


def made_by(value: ir.Value, *names: str) -> ir.Operation | None:
    """The operation of one of these names that makes a value; None if another one does, or if it is an argument."""
    operation = None if isinstance(value.owner, ir.Block) else value.owner.operation
    return operation if operation is not None and operation.name in names else None


def callee(call: ir.Operation) -> str:
    """The name of the function that an operation calls."""
    return ir.FlatSymbolRefAttr(call.attributes["callee"]).value


def rename_functions(module: ir.Module, names: Mapping[str, str]) -> None:
    """Gives functions of a module other names, also where an operation refers to them."""
    for name, each in functions(module).items():
        each.attributes["sym_name"] = ir.StringAttr.get(names.get(name, name))

    def renamed(attribute: ir.Attribute) -> ir.Attribute:
        if isinstance(attribute, ir.FlatSymbolRefAttr):
            return ir.FlatSymbolRefAttr.get(names.get(attribute.value, attribute.value))
        if isinstance(attribute, ir.ArrayAttr):
            return ir.ArrayAttr.get([renamed(each) for each in attribute])
        return attribute

    def rename(operation: ir.Operation) -> ir.WalkResult:
        for name in _REFERENCES:
            if name in operation.attributes:
                operation.attributes[name] = renamed(operation.attributes[name])
        return ir.WalkResult.ADVANCE

    module.operation.walk(rename)


def result_types(call: ir.Operation) -> list[ir.Type]:
    """The types of the results of a custom call: TensorFlow gives several results in one tuple."""
    types = [each.type for each in call.results]
    if isinstance(types[0], ir.TupleType):
        return [types[0].get_type(index) for index in range(types[0].num_types)]
    return types


def replace_call(call: ir.Operation, values: Sequence[ir.Value]) -> None:
    """Puts values into the place of the results of a custom call, and erases it."""
    if isinstance(call.results[0].type, ir.TupleType):
        for use in list(call.results[0].uses):
            taken = use.owner
            assert taken.name == "stablehlo.get_tuple_element", "TensorFlow takes its results out of it"
            taken.results[0].replace_all_uses_with(values[ir.IntegerAttr(taken.attributes["index"]).value])
            taken.operation.erase()
    else:
        for old, new in zip(call.results, values, strict=True):
            old.replace_all_uses_with(new)
    call.erase()


def attributes(operation: ir.Operation) -> dict[str, ir.Attribute]:
    """The attributes of an operation, by name."""
    names = [each if isinstance(each, str) else each.name for each in operation.attributes]  # by the version of jaxlib
    return {name: operation.attributes[name] for name in names}


def splat(value: float, kind: ir.RankedTensorType) -> ir.Value:
    """A constant tensor of a type, with one number in each element."""
    of = ir.IntegerAttr if isinstance(kind.element_type, ir.IntegerType) else ir.FloatAttr
    return hlo.constant(ir.DenseElementsAttr.get_splat(kind, of.get(kind.element_type, value)))


def barrier(value: ir.Value) -> ir.Value:
    """A value behind which XLA does not look."""
    return hlo.OptimizationBarrierOp([value]).results[0]


def compared(left: ir.Value, right: ir.Value, direction: str) -> ir.Value:
    """Where a comparison is true: "EQ", "GE", "LT"; false where one of the values is NaN."""
    return hlo.compare(left, right, hlo.ComparisonDirectionAttr.get(direction))


def reduced_over(
    value: ir.Value, dimensions: Sequence[int], start: float, join: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """A value reduced over some of its dimensions, from a number that changes no result."""
    kind = ir.RankedTensorType(value.type)
    left = [size for index, size in enumerate(kind.shape) if index not in dimensions]
    result = ir.RankedTensorType.get(left, kind.element_type)
    first = splat(start, ir.RankedTensorType.get([], kind.element_type))
    return reduced(hlo.ReduceOp([result], [value], [first], list(dimensions)), join)


def reduced(reduction: ir.Operation | ir.OpView, join: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """The result of a reduction that joins two scalars so; gives the operation its region."""
    (result,) = reduction.operation.results
    scalar = ir.RankedTensorType.get([], ir.RankedTensorType(result.type).element_type)
    block = reduction.operation.regions[0].blocks.append(scalar, scalar, arg_locs=[ir.Location.current] * 2)
    with ir.InsertionPoint(block):
        hlo.return_([join(*block.arguments)])
    return result


VERSION = 1
"""Part of what a compiled program depends on. Raise it when a conversion becomes other operations."""

_FLOATS = ("f16", "bf16", "f32", "f64")
_BITS = {"i32": 32, "i64": 64}
_IS_X86 = machine.machine().lower() in ("x86_64", "amd64")


def as_by_kernels(module: ir.Module, platform: str) -> None:
    """Rewrites the conversions of a module for a platform, in place, so that XLA gives what TensorFlow's kernels give.

    - A truth value as a number. XLA turns a product with it into a choice between the other factor and 0, and so loses
      a NaN or an infinity: the loss of a padded row that is NaN times a mask of 0 is NaN, and so is a part 0 / 0 of a
      gradient. A choice between the constants 1 and 0 stays a factor.
    - A number that no integer holds as an int32 or int64: NaN, an infinity, one that is too large. XLA gives 0 or the
      nearest integer, the kernels the least integer. Those are instructions of the processor; here they are of x86. To
      narrower integers TensorFlow itself has several results, by the number of elements.

    Values whose sizes are not known are converted as XLA does it.
    """
    with module.context:
        for operation in operations(module, "stablehlo.convert"):
            (value,), (result,) = operation.operands, operation.results
            kind = ir.RankedTensorType(result.type)
            of, to = str(ir.RankedTensorType(value.type).element_type), str(kind.element_type)
            if not kind.has_static_shape:
                continue
            with ir.InsertionPoint(operation), operation.location:
                if of == "i1" and to in _FLOATS:
                    result.replace_all_uses_with(hlo.select(value, splat(1.0, kind), splat(0.0, kind)))
                    operation.erase()
                elif of in _FLOATS and to in _BITS and platform == "cpu" and _IS_X86:
                    _with_least(operation, value, kind, _BITS[to])


def _with_least(operation: ir.Operation, value: ir.Value, kind: ir.RankedTensorType, bits: int) -> None:
    """Converts numbers to integers of so many bits. A number that does not fit becomes the least integer."""
    floats = ir.RankedTensorType(value.type)
    if str(floats.element_type) == "f16":  # its largest number is one of them
        is_held = hlo.is_finite(value)
    else:
        limit = 2.0 ** (bits - 1)
        is_held = hlo.and_(compared(value, splat(-limit, floats), "GE"), compared(value, splat(limit, floats), "LT"))
    least = splat(-(2 ** (bits - 1)), kind)
    converted = hlo.convert(kind, value)
    operation.results[0].replace_all_uses_with(hlo.select(is_held, converted, least))
    operation.erase()


_NAMES = ("stablehlo.divide", "stablehlo.remainder")


def keep(module: ir.Module) -> None:
    """Puts a barrier before the divisors in a module that do not depend on its arguments, in place.

    XLA must not compute such divisions of integers while it compiles. A division or a remainder by 0, of numbers that
    are all known then, ends the process in jaxlib before 0.11.2, also where they are known only by computing with
    others. A barrier keeps such a divisor from being known before the program runs. There, and when newer versions
    compile, XLA divides by 0 without an error, as `docs/tpu_strategy.md` says.
    """
    if FOLDS_DIVISIONS:
        return
    # Arguments of other functions count as known, which costs a barrier more than is needed at most.
    of_arguments = set(functions(module)["main"].regions[0].blocks[0].arguments)
    found: list[ir.Operation] = []

    def collect(operation: ir.Operation) -> ir.WalkResult:
        if any(each in of_arguments for each in operation.operands):
            of_arguments.update(operation.results)
        elif operation.name in _NAMES:
            kind = ir.RankedTensorType(operation.results[0].type).element_type
            if isinstance(kind, ir.IntegerType):
                found.append(operation)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(collect, ir.WalkOrder.PRE_ORDER)
        for operation in found:
            with ir.InsertionPoint(operation), operation.location:
                operation.operands[1] = barrier(operation.operands[1])


# Short names for the operations that the rewrites build. Each is inserted where the current insertion point is.
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
