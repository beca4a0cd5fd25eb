"""Conversions between types of numbers, written so that XLA gives what TensorFlow's kernels give.

- A truth value as a number. XLA turns a product with it into a choice between the other factor and 0, and so loses a
  NaN or an infinity: the loss of a padded row that is NaN times a mask of 0 is NaN, and so is a part 0 / 0 of a
  gradient. A choice between the constants 1 and 0 stays a factor.
- A number that no integer holds as an int32 or int64: NaN, an infinity, one that is too large. XLA gives 0 or the
  nearest integer, the kernels the least integer. Those are instructions of the processor; here they are of x86. To
  narrower integers TensorFlow itself has several results, by the number of elements.

Values whose sizes are not known are converted as XLA does it.
"""

from __future__ import annotations

import platform as machine

from replica_engine.pjrt.jaxlib import hlo, ir
from replica_engine.pjrt.mlir import compared, operations, splat

VERSION = 1
"""Part of what a compiled program depends on. Raise it when a conversion becomes other operations."""

_FLOATS = ("f16", "bf16", "f32", "f64")
_BITS = {"i32": 32, "i64": 64}
_IS_X86 = machine.machine().lower() in ("x86_64", "amd64")


def as_by_kernels(module: ir.Module, platform: str) -> None:
    """Rewrites the conversions of a module for a platform, in place."""
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
    """Puts the least integer in the place of each number that is none of the integers of so many bits."""
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
