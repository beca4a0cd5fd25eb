"""Reductions of divided values in two steps: each device reduces its part, and then what all have found."""

from __future__ import annotations

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.partitions.local import Devices, computed_locally
from replica_engine.pjrt.partitions.propagation import Divided, Propagated

_EXTREMES = ("stablehlo.maximum", "stablehlo.minimum")


def drops_nan(operation: ir.Operation, divided: Propagated, devices: Devices) -> bool:
    """Whether a reduction looks for the largest or smallest value, or several at once, along a divided dimension."""
    first = ir.RankedTensorType(operation.operands[0].type)
    if not str(first.element_type).startswith(("f", "bf")):
        return False
    body = [each.name for each in operation.regions[0].blocks[0].operations]
    count = len(operation.results)
    looks = count > 1 or body[0] in _EXTREMES
    return looks and any(divided.operands[index][each] for index in range(count) for each in _dimensions(operation))


def reduce_in_two_steps(operation: ir.Operation, divided: Propagated, devices: Devices) -> None:
    """Lets each device reduce its part. Nothing is lost between the steps, as it is between devices."""
    count, reduced = len(operation.results), _dimensions(operation)
    rank = ir.RankedTensorType(operation.operands[0].type).rank
    shape = ir.RankedTensorType(operation.operands[0].type).shape
    by: list[tuple[str, ...]] = []
    used: set[str] = set()
    for each in range(rank):
        found = [divided.operands[index][each] for index in range(count) if divided.operands[index][each]]
        names = found[0] if found and devices.is_whole_axes((found[0],)) and not used & {*found[0]} else ()
        if each not in reduced and shape[each] % devices.count(names):
            names = ()
        by.append(names)
        used |= {*names}
    along = tuple(name for each in reduced for name in by[each])
    kept = tuple(names for each, names in enumerate(by) if each not in reduced)
    scalars: list[Divided] = [()] * count
    fillings = list(operation.operands)[count:]

    def build(parts: list[ir.Value]) -> list[ir.Value]:
        values, starts = parts[:count], parts[count:]
        found = _reduced(operation, values, starts, list(reduced))
        if not along:
            return found
        return _reduced(operation, [devices.gathered(each, along) for each in found], starts, [0])

    computed_locally(operation, [tuple(by)] * count + scalars, [kept] * count, devices, build, fillings)


def _dimensions(operation: ir.Operation) -> list[int]:
    return list(ir.DenseI64ArrayAttr(operation.attributes["dimensions"]))


def _reduced(
    operation: ir.Operation, values: list[ir.Value], starts: list[ir.Value], dimensions: list[int]
) -> list[ir.Value]:
    """The same reduction of other values, at the current place."""
    kinds = []
    for value in values:
        kind = ir.RankedTensorType(value.type)
        left = [size for each, size in enumerate(kind.shape) if each not in dimensions]
        kinds.append(ir.RankedTensorType.get(left, kind.element_type))
    made = hlo.ReduceOp(kinds, values, starts, dimensions)
    copy = operation.operation.clone()
    copy.regions[0].blocks[0].append_to(made.regions[0])
    copy.erase()
    return list(made.results)
