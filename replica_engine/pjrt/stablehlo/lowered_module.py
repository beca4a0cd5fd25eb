"""The module that TensorFlow lowered a body to: read by jaxlib, written again, and what the later stages must know.

TensorFlow and jaxlib have an MLIR each, and their texts differ in four ways:

- A constant of more than 100 truth values is a string of bytes in some versions of MLIR, and of bits in others. Here it
  becomes a list, which all versions read.
- A dynamic reshape has no name in StableHLO when TensorFlow writes it ("mhlo.unknown"). MLIR writes a module with such
  an operation in its generic form. Here it becomes a `stablehlo.dynamic_reshape`.
- TensorFlow writes `mhlo.copy`, which StableHLO does not have: the compilers of TPUs and GPUs refuse it. Here its
  operand takes its place. XLA copies by itself where a result must not share memory.
- TensorFlow writes names and source lines, and numbers the functions of a process. Here they go, so that equal programs
  have equal texts.

So all later text is in the form in which jaxlib prints a valid module. Only this file reads what TensorFlow wrote.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from replica_engine.pjrt.jaxlib import hlo, ir, program_context
from replica_engine.pjrt.stablehlo import markers, mlir
from replica_engine.pjrt.stablehlo.partition_local import cut, filled_up, tensor

_TRUTH_VALUES = re.compile(r'dense<"0x([0-9A-Fa-f]+)"> : tensor<((?:\d+x)+)i1>')
_CALL, _COPY = "stablehlo.custom_call", "mhlo.copy"
_COLLECTIVES = [f"stablehlo.{name}" for name in markers.COLLECTIVES]
_OF_ONE_REPLICA = (markers.HOST_CALL, markers.CONSTRAIN, markers.JAX_FUNCTION)
_UNKNOWN, _OTHER = '"mhlo.unknown"(', "replica_engine_unknown.operation"
_QUOTED = re.compile(r'"([^"]*)"')
_ERROR = re.compile(r'"-":(\d+):\d+: (.*)')
_ALIASES = re.compile(r"#loc\d+")
_PLACES = re.compile(r"^(#loc\d+) = loc\((.*)\)$", re.MULTILINE)
_ALIAS = "mhlo.input_output_alias"


@dataclass(frozen=True)
class LoweredModule:
    """A module as jaxlib writes it.

    Attributes:
        text: the module.
        results: the sizes of each result of the program; None for a size that depends on data.
        writes: for each result that replaces a parameter, the index of the parameter and that of the result.
        host_calls: the indices of the host calls in it.
        shaped_by_data: the indices of those whose operands have sizes that depend on data.
        sums_unknown_size: whether it sums values over replicas whose size depends on data.
        has_collectives: whether its replicas exchange values.
    """

    text: str
    results: list[list[int | None]]
    writes: list[tuple[int, int]]
    host_calls: frozenset[int]
    shaped_by_data: list[int]
    sums_unknown_size: bool
    has_collectives: bool


class UnreadableModule(Exception):
    """An operation that jaxlib does not read.

    Attributes:
        names: the names in the location of the operation, among which is that of TensorFlow's op.
        message: what jaxlib says; "" for an operation that has no form in StableHLO.
    """

    def __init__(self, names: list[str], message: str = ""):
        super().__init__(names, message)
        self.names, self.message = names, message


def read(text: str, aliases: bool = True) -> LoweredModule:
    """Reads the text that TensorFlow wrote.

    Args:
        text: the module, in either form of MLIR.
        aliases: whether the program may write results over the parameters that they replace.

    Raises:
        UnreadableModule: jaxlib does not read an operation.
    """
    # Renamed, since jaxlib reads any operation of a dialect that it does not know, but knows mhlo without this one.
    text = _TRUTH_VALUES.sub(_listed, text).replace(_UNKNOWN, f'"{_OTHER}"(')
    with program_context() as context, ir.Location.unknown(context):
        context.allow_unregistered_dialects = True
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise _make_unreadable_error(text, str(error)) from None
        found: dict[str, list[ir.Operation]] = {name: [] for name in (_CALL, *_COLLECTIVES, _COPY, _OTHER)}
        for each in mlir.operations(module, *found):
            found[each.name].append(each)
        for each in found[_COPY]:
            each.results[0].replace_all_uses_with(each.operands[0])
            each.erase()
        for each in found[_OTHER]:
            names = _QUOTED.findall(str(each.location))
            if not _reshaped(each):
                raise UnreadableModule(names)
        for each in found[_CALL]:
            markers.restore_constraint(each)
        marked = [each for each in found[_CALL] if markers.target(each).startswith(markers.PREFIX)]
        # One call has several operations if the function around it is called several times.
        host_calls = [
            (markers.read_parameters(each)["index"], each)
            for each in marked
            if markers.target(each) == markers.HOST_CALL
        ]
        _number_functions(module)
        attributes = module.operation.attributes
        attributes["sym_name"] = ir.StringAttr.get("replica_body")
        writes = _writes(attributes)
        if not aliases and _ALIAS in attributes:
            del attributes[_ALIAS]
        return LoweredModule(
            str(module.operation.get_asm(enable_debug_info=False)),
            _results(module),
            writes,
            frozenset(index for index, _ in host_calls),
            # Each once, in the order of the program.
            list({index: 0 for index, each in host_calls if not all(_is_static(one.type) for one in each.operands)}),
            any(not _is_static(one.type) for each in found["stablehlo.all_reduce"] for one in each.operands),
            any(markers.target(each) not in _OF_ONE_REPLICA for each in marked)
            or any(found[name] for name in _COLLECTIVES),
        )


def in_branches(modules: Sequence[LoweredModule], whole: bool = False) -> LoweredModule:
    """One module in which each replica takes the branch of one of several modules, which differ in shapes only.

    Its last parameter is the number of the branch. Other parameters and results have the shape that `fitting` says.

    Args:
        modules: the modules, which have no collectives.
        whole: whether each device of a replica has all values in the branches, which then exchange nothing.
    """
    with program_context() as context, ir.Location.unknown(context):
        parsed = [ir.Module.parse(each.text) for each in modules]
        end = ir.InsertionPoint(parsed[0].body)
        kinds = []
        for share, module in enumerate(parsed):
            found = mlir.functions(module)
            # The main function of all branches is the only public one.
            found["main"].attributes["sym_visibility"] = ir.StringAttr.get("private")
            kinds.append(ir.FunctionType(ir.TypeAttr(found["main"].attributes["function_type"]).value))
            mlir.rename_functions(module, {name: f"share_{share}_{name}" for name in found})
            if whole:
                markers.drop_constraints(module)
            if share:
                for each in list(module.body.operations):
                    end.insert(each.detach_from_parent())
        takes = [_fitting(types) for types in zip(*(kind.inputs for kind in kinds), strict=True)]
        gives = [_fitting(types) for types in zip(*(kind.results for kind in kinds), strict=True)]
        takes.append(tensor([], ir.IntegerType.get_signless(32)))
        main = {
            "sym_name": ir.StringAttr.get("main"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(takes, gives)),
        }
        with end:
            (body,) = ir.Operation.create("func.func", attributes=main, regions=1).regions
        block = body.blocks.append(*takes, arg_locs=[ir.Location.current] * len(takes))
        values, branch = list(block.arguments[:-1]), block.arguments[-1]
        with ir.InsertionPoint(block):
            values = list(map(markers.constrained_whole, values)) if whole else values
            case = hlo.CaseOp(gives, branch, len(kinds))
            for share, region in enumerate(case.regions):
                with ir.InsertionPoint(region.blocks.append()):
                    given = list(map(_taken, values, kinds[share].inputs))
                    callee: dict[str, ir.Attribute] = {"callee": ir.FlatSymbolRefAttr.get(f"share_{share}_main")}
                    call = ir.Operation.create("func.call", kinds[share].results, given, attributes=callee)
                    results = list(map(_given, call.results, gives))
                    hlo.return_(list(map(markers.constrained_whole, results)) if whole else results)
            ir.Operation.create("func.return", operands=case.results)
        text = str(parsed[0].operation.get_asm(enable_debug_info=False))
        return dataclasses.replace(modules[0], text=text, results=[list(each.shape) for each in gives])


def fitting(shapes: Sequence[Sequence[int]]) -> Sequence[int]:
    """The shape of a value in a program with branches: that of all, or if they differ, flat, of the largest size."""
    return shapes[0] if all(each == shapes[0] for each in shapes) else (max(map(math.prod, shapes)),)


def _fitting(types: Sequence[ir.Type]) -> ir.RankedTensorType:
    kinds = list(map(ir.RankedTensorType, types))
    return tensor(fitting([each.shape for each in kinds]), kinds[0].element_type)


def _taken(value: ir.Value, kind: ir.Type) -> ir.Value:
    """The value of a type that a branch takes out of a parameter."""
    return value if value.type == kind else hlo.reshape(kind, cut(value, _flat(kind)))


def _given(value: ir.Value, kind: ir.RankedTensorType) -> ir.Value:
    """The result of a branch that has a value first and then zeros."""
    if value.type == kind:
        return value
    return filled_up(hlo.reshape(_flat(value.type), markers.constrained_whole(value)), kind.shape)


def _flat(kind: ir.Type) -> ir.RankedTensorType:
    kind = ir.RankedTensorType(kind)
    return tensor([math.prod(kind.shape)], kind.element_type)


def _number_functions(module: ir.Module) -> None:
    """Names all functions but the main one by their places in the module, and what refers to them."""
    others = [name for name in mlir.functions(module) if name != "main"]
    mlir.rename_functions(module, {name: f"function_{place}" for place, name in enumerate(others)})


def _make_unreadable_error(text: str, error: str) -> UnreadableModule:
    """jaxlib's error, which names a line of the text, with the names in the location of the operation there."""
    found = _ERROR.search(error)
    if found is None:
        return UnreadableModule([], error.strip())
    where = text.splitlines()[int(found[1]) - 1].partition(" loc(")[2]
    places, names, pending = dict(_PLACES.findall(text)), [], [where]
    while pending:
        each = pending.pop(0)
        names += _QUOTED.findall(each)
        pending += [places.pop(alias, "") for alias in _ALIASES.findall(each)]
    return UnreadableModule(names, found[2].strip())


def _listed(constant: re.Match[str]) -> str:
    """A constant of truth values as a list."""
    shape = [int(size) for size in constant[2].split("x")[:-1]]
    count = int(np.prod(shape))
    values = np.frombuffer(bytes.fromhex(constant[1]), np.uint8)
    # A byte holds one truth value, or eight in other versions of MLIR.
    if values.size != count:
        values = np.unpackbits(values, count=count, bitorder="little")
    return f"dense<{json.dumps(values.astype(bool).reshape(shape).tolist())}> : tensor<{constant[2]}i1>"


def _reshaped(operation: ir.Operation) -> bool:
    """Replaces an unknown operation that is a reshape to scalar sizes. Returns False if it is another one."""
    value, *sizes = operation.operands
    (result,) = operation.results
    number = ir.RankedTensorType.get([], ir.IntegerType.get_signless(32))
    if len(sizes) != ir.RankedTensorType(result.type).rank or not sizes or any(each.type != number for each in sizes):
        return False
    one = ir.RankedTensorType.get([1], number.element_type)
    with ir.InsertionPoint(operation), operation.location:
        joined = hlo.concatenate([hlo.reshape(one, each) for each in sizes], 0)
        result.replace_all_uses_with(hlo.dynamic_reshape(result.type, value, joined))
    operation.erase()
    return True


def _results(module: ir.Module) -> list[list[int | None]]:
    """The sizes of the results of the main function."""
    types = ir.FunctionType(ir.TypeAttr(mlir.functions(module)["main"].attributes["function_type"]).value).results
    tensors = list(map(ir.RankedTensorType, types))
    return [
        [None if each.is_dynamic_dim(axis) else each.get_dim_size(axis) for axis in range(each.rank)]
        for each in tensors
    ]


def _writes(attributes: ir.OpAttributeMap) -> list[tuple[int, int]]:
    if _ALIAS not in attributes:
        return []
    found = []
    for each in map(ir.DictAttr, ir.ArrayAttr(attributes[_ALIAS])):
        parameter = ir.IntegerAttr(ir.DictAttr(each["alias"])["parameter_number"]).value
        index = list(ir.DenseI64ArrayAttr(each["output_index"]))  # a single result has no number
        found.append((parameter, index[0] if index else 0))
    return found


def _is_static(kind: ir.Type) -> bool:
    return ir.RankedTensorType(kind).has_static_shape
