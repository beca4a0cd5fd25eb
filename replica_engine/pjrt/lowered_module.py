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

import json
import re
from dataclasses import dataclass

import numpy as np

from replica_engine.pjrt.collectives import COLLECTIVES
from replica_engine.pjrt.jaxlib import hlo, ir, program_context
from replica_engine.pjrt.markers import CONSTRAIN, HOST_CALL, PREFIX, parameters_of, restore_constraint, target
from replica_engine.pjrt.mlir import functions, operations
from replica_engine.pjrt.partitions.program import of_one_replica

_TRUTH_VALUES = re.compile(r'dense<"0x([0-9A-Fa-f]+)"> : tensor<((?:\d+x)+)i1>')
_CALL, _COPY, _REPLICA_ID = "stablehlo.custom_call", "mhlo.copy", "stablehlo.replica_id"
_COLLECTIVES = [f"stablehlo.{name}" for name in COLLECTIVES]
_UNKNOWN, _OTHER = '"mhlo.unknown"(', "replica_engine_unknown.operation"
_REFERENCES = ("callee", "called_computations", "decomposition")  # attributes that name functions
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
    text = _TRUTH_VALUES.sub(_listed, text).replace(_UNKNOWN, f'"{_OTHER}"(')
    with program_context() as context, ir.Location.unknown(context):
        context.allow_unregistered_dialects = True
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise _explained(text, str(error)) from None
        found: dict[str, list[ir.Operation]] = {name: [] for name in (_CALL, *_COLLECTIVES, _COPY, _OTHER)}
        for each in operations(module, *found):
            found[each.name].append(each)
        for each in found[_COPY]:
            each.results[0].replace_all_uses_with(each.operands[0])
            each.erase()
        for each in found[_OTHER]:
            names = _QUOTED.findall(str(each.location))
            if not _reshaped(each):
                raise UnreadableModule(names)
        for each in found[_CALL]:
            restore_constraint(each)
        markers = [each for each in found[_CALL] if target(each).startswith(PREFIX)]
        # One call has several operations if the function around it is called several times.
        host_calls = [(parameters_of(each)["index"], each) for each in markers if target(each) == HOST_CALL]
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
            list({index: 0 for index, each in host_calls if not all(_is_static(one.type) for one in each.operands)}),
            any(not _is_static(one.type) for each in found["stablehlo.all_reduce"] for one in each.operands),
            any(target(each) not in (HOST_CALL, CONSTRAIN) for each in markers)
            or any(found[name] for name in _COLLECTIVES),
        )


def of_replica(text: str, replica: int) -> str:
    """The text of a module without collectives, for one replica: its number takes the place of the replica id."""
    with program_context() as context, ir.Location.unknown(context):
        module = ir.Module.parse(text)
        for each in operations(module, _REPLICA_ID):
            with ir.InsertionPoint(each):
                number = hlo.constant(ir.Attribute.parse(f"dense<{replica}> : {each.results[0].type}"))
            each.results[0].replace_all_uses_with(number)
            each.erase()
        of_one_replica(module)
        return str(module.operation.get_asm(enable_debug_info=False))


def _number_functions(module: ir.Module) -> None:
    """Names all functions but the main one by their places in the module, and what refers to them."""
    names: dict[str, str] = {}
    for name, each in functions(module).items():
        if name != "main":
            names[name] = f"function_{len(names)}"
            each.attributes["sym_name"] = ir.StringAttr.get(names[name])

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


def _explained(text: str, error: str) -> UnreadableModule:
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
    types = ir.FunctionType(ir.TypeAttr(functions(module)["main"].attributes["function_type"]).value).results
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
