"""Markers for operations that TensorFlow cannot lower: most collectives, and calls from the program to the host.

The replica body holds a marker for each such operation: a custom call with the operation's name, after the prefix
below, and its parameters as JSON. This module rewrites the program's text. The marker of a collective becomes the
StableHLO operation of that name. The marker of a host call becomes the custom call by which jaxlib calls Python
functions.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np

from replica_engine.pjrt.collectives import COLLECTIVES
from replica_engine.pjrt.jaxlib import HOST_CALL_TARGETS, hlo, ir, program_context
from replica_engine.pjrt.mlir import barrier, compared, functions, operations, reduced, splat

PREFIX = "replica_engine."

VERSION = 5
"""Part of what a compiled program depends on. Raise it when a marker becomes another operation than before."""

HOST_CALL = f"{PREFIX}host_call"
"""The marker of a host call."""

CONSTRAIN = f"{PREFIX}constrain"
"""The marker of a value that is divided over the devices of a replica in a certain way."""

_SHARDING, _SHARDING_ATTRIBUTE, _NUMBERS = "Sharding", "mhlo.sharding", re.compile(r"unspecified_dims=\[([\d,]+)\]")

LAYOUT = "mhlo.replica_engine_layout"
"""The attribute of a module whose replicas have several devices each; see `partitions`."""


def host_call_parameters(index: int, name: str) -> str:
    """The parameters of a host call's marker.

    Args:
        index: the index of the called function among those that the program is compiled with.
        name: the name of the call, for readers of the program.
    """
    return json.dumps({"index": index, "name": name})


WORK: tuple[tuple[int, ...], np.dtype] = ((), np.dtype(np.float32))
"""The shape and dtype of the last result of a program after `add_work`."""

_WORK_SIZE = 4096


def expand_markers(program: str, platform: str) -> ir.Module:
    """The module of a program, with each marker replaced by the operation it stands for.

    On CPU devices, sums over replicas of 16-bit floats are added in float32 and rounded once. XLA would round after
    each addition. For TPUs, reductions over groups of different sizes are one over all replicas, to which each brings
    its value in the place of its group: libtpu refuses such groups.

    Args:
        program: the text of the module.
        platform: what it will run on.
    """
    with program_context():
        module = ir.Module.parse(program)
        if LAYOUT not in module.operation.attributes:  # otherwise `partitions` replaces them
            drop_constraints(module)
        calls = operations(module, "stablehlo.custom_call")
        for marker in [each for each in calls if target(each).startswith(PREFIX)]:
            if target(marker) == HOST_CALL:
                _replace_host_call(marker, platform)
            elif target(marker) != CONSTRAIN:
                _replace(marker, platform, LAYOUT in module.operation.attributes)
        return module


def add_work(module: ir.Module) -> None:
    """Gives a program a last result that takes some work to compute.

    It is ready when the program has ended, so a program without results gets it. And XLA:CPU runs a program of fewer
    than a thousand operations on a single device inside the call that starts it: with several workers, nothing could
    end that call when another worker is lost.
    """
    main = functions(module)["main"]
    block = main.regions[0].blocks[0]
    end = block.operations[len(block.operations) - 1]
    with module.context, ir.Location.unknown():
        number = ir.RankedTensorType.get([], ir.F32Type.get())
        vector = ir.RankedTensorType.get([_WORK_SIZE], ir.F32Type.get())
        with ir.InsertionPoint(end):
            values = barrier(hlo.iota(vector, 0))
            ir.Operation.create("func.return", operands=[*end.operands, hlo.dot(number, values, values)])
        end.operation.erase()
        kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
        main.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(kind.inputs, [*kind.results, number]))
        if "res_attrs" in main.attributes:
            described = [*ir.ArrayAttr(main.attributes["res_attrs"]), ir.DictAttr.get({})]
            main.attributes["res_attrs"] = ir.ArrayAttr.get(described)
        attributes = module.operation.attributes
        if len(kind.results) == 1 and _ALIAS in attributes:  # a single result has no number
            numbered = str(attributes[_ALIAS]).replace("output_index = array<i64>", "output_index = array<i64: 0>")
            attributes[_ALIAS] = ir.Attribute.parse(numbered)


_ALIAS = "mhlo.input_output_alias"
_NARROW = ("f16", "bf16")
_REDUCTIONS = {"Add": hlo.add, "Min": hlo.minimum, "Max": hlo.maximum}


def target(operation: ir.Operation) -> str:
    """The name that a custom call calls."""
    return ir.StringAttr(operation.attributes["call_target_name"]).value


def parameters_of(marker: ir.Operation) -> dict[str, Any]:
    """The parameters of a marker, from its JSON."""
    return json.loads(ir.StringAttr(marker.attributes["backend_config"]).value)


def restore_constraint(call: ir.Operation) -> None:
    """Makes a marker of a custom call to `Sharding` that a constraint was lowered to; no other call changes.

    TensorFlow has one op with a name and parameters of our own, and it must know the shape of its result. Another one
    passes numbers on, and its result has the shape of its operand. They are the code points of the parameters.
    """
    config = call.attributes["backend_config"] if target(call) == _SHARDING else None
    numbers = _NUMBERS.fullmatch(ir.StringAttr(config).value) if isinstance(config, ir.StringAttr) else None
    if numbers is None:
        return
    call.attributes["call_target_name"] = ir.StringAttr.get(CONSTRAIN)
    call.attributes["backend_config"] = ir.StringAttr.get(bytes(map(int, numbers[1].split(","))).decode())
    del call.attributes[_SHARDING_ATTRIBUTE]


def constrained_whole(value: ir.Value) -> ir.Value:
    """A value of which each device of a replica has all, by a marker."""
    config = json.dumps({"axes": [None] * ir.RankedTensorType(value.type).rank})
    attributes: dict[str, ir.Attribute] = {
        "call_target_name": ir.StringAttr.get(CONSTRAIN),
        "backend_config": ir.StringAttr.get(config),
    }
    return ir.Operation.create("stablehlo.custom_call", [value.type], [value], attributes=attributes).result


def drop_constraints(module: ir.Module) -> None:
    """Erases the markers of values that are divided in a certain way."""
    for each in operations(module, "stablehlo.custom_call"):
        if target(each) == CONSTRAIN:
            each.results[0].replace_all_uses_with(each.operands[0])
            each.erase()


def _replace_host_call(marker: ir.Operation, platform: str) -> None:
    marker.attributes["call_target_name"] = ir.StringAttr.get(HOST_CALL_TARGETS[platform])
    marker.attributes["backend_config"] = ir.Attribute.parse(f"{{index = {parameters_of(marker)['index']} : ui64}}")
    marker.attributes["api_version"] = ir.Attribute.parse("4 : i32")  # typed FFI


def _replace(marker: ir.Operation, platform: str, is_divided: bool) -> None:
    name = target(marker).removeprefix(PREFIX)
    parameters = parameters_of(marker)
    groups = parameters.get("groups", [])
    in_places = platform == "tpu" and name == "all_reduce" and len({*map(len, groups)}) > 1 and not is_divided
    if in_places:
        parameters["groups"] = [sorted(replica for group in groups for replica in group)]
    attributes = {key: ir.Attribute.parse(text) for key, text in COLLECTIVES[name].attributes(parameters).items()}
    (operand,), (result,) = marker.operands, marker.results
    kind = ir.RankedTensorType(result.type)
    is_wide = platform == "cpu" and parameters.get("op") == "Add" and str(kind.element_type) in _NARROW
    with ir.InsertionPoint(marker), marker.location:
        if is_wide:
            kind = ir.RankedTensorType.get(kind.shape, ir.F32Type.get())
            wide = ir.RankedTensorType.get(ir.RankedTensorType(operand.type).shape, kind.element_type)
            operand = hlo.convert(wide, operand)
        if in_places:
            place = _place_of_group(groups)
            operand = _at(operand, place, len(groups), parameters["op"])
        operation = ir.Operation.create(
            f"stablehlo.{name}",
            results=[operand.type if in_places else kind],
            operands=[operand],
            attributes=attributes,
            regions=1 if "op" in parameters else 0,
        )
        if "op" in parameters:
            reduced(operation, _REDUCTIONS[parameters["op"]])
        new = operation.result
        if in_places:
            places = [place, *[splat(0, ir.RankedTensorType(place.type))] * kind.rank]
            new = hlo.reshape(kind, hlo.dynamic_slice(new, places, [1, *kind.shape]))
        if (divisor := parameters.get("divide_by", 1)) != 1:
            new = hlo.divide(new, splat(divisor, kind))
        if is_wide:
            new = hlo.convert(result.type, new)
    result.replace_all_uses_with(new)
    marker.erase()


def _place_of_group(groups: list[list[int]]) -> ir.Value:
    """The position, among all groups, of the group of the replica that runs this."""
    of_replica = {replica: place for place, group in enumerate(groups) for replica in group}
    table: Any = np.array([of_replica[replica] for replica in range(len(of_replica))], np.int32)
    number = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
    found = hlo.dynamic_slice(hlo.constant(ir.DenseElementsAttr.get(table)), [hlo.replica_id()], [1])
    return hlo.reshape(number, found)


def _at(value: ir.Value, place: ir.Value, count: int, op: str) -> ir.Value:
    """A value at its place of `count` along a new first dimension, between numbers that change no result."""
    kind = ir.RankedTensorType(value.type)
    shape = [count, *kind.shape]
    places, wide = (ir.RankedTensorType.get(shape, each) for each in (place.type.element_type, kind.element_type))
    is_here = compared(hlo.iota(places, 0), hlo.broadcast_in_dim(places, place, []), "EQ")
    own = hlo.broadcast_in_dim(wide, value, range(1, len(shape)))
    return hlo.select(is_here, own, splat(_nothing(kind.element_type, op), wide))


def _nothing(kind: ir.Type, op: str) -> float:
    """The number that changes no result of a reduction."""
    if not isinstance(kind, ir.IntegerType):
        return {"Add": -0.0, "Min": math.inf, "Max": -math.inf}[op]  # 0.0 would make another sum of -0.0
    first, last = (0, 2**kind.width - 1) if kind.is_unsigned else (-(2 ** (kind.width - 1)), 2 ** (kind.width - 1) - 1)
    return {"Add": 0, "Min": last, "Max": first}[op]
