"""Markers for operations that TensorFlow cannot lower, and what takes their place.

These operations are most collectives, and calls from the program to the host. The replica body holds a marker for each:
a custom call with the operation's name, after `PREFIX`, and its parameters as JSON. `expand_markers` rewrites the
program's text. The marker of a collective becomes the StableHLO operation of that name. The marker of a host call
becomes the custom call by which jaxlib calls Python functions; for devices that do not have it, `convert` replaces it
by transfers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from replica_engine.pjrt.jaxlib import HOST_CALL_TARGETS, Shape, hlo, ir, program_context
from replica_engine.pjrt.stablehlo import jax_functions, mlir, partition_local

Parameters = dict[str, Any]
"""Those of a marker: "groups" or "pairs" of replicas, axes, the name of the reduction as "op", and as "divide_by" what
its result is divided by."""


class CollectiveForm(NamedTuple):
    """One collective of StableHLO that bodies use.

    From here a module gets the operation for a marker and its parameters, the analysis of a body learns whether the
    result is equal on all replicas, and the workers of a job know which programs they must compare.

    Attributes:
        attributes: the attributes of its operation in StableHLO, as text, from the parameters of its marker.
        gives_parts: whether each replica gets another part of the result, even if all brought equal values.
    """

    attributes: Callable[[Parameters], dict[str, str]]
    gives_parts: bool = False


def _table(rows: list[list[int]]) -> str:
    return f"dense<{json.dumps(rows)}> : tensor<{len(rows)}x{len(rows[0]) if rows else 0}xi64>"


def _groups(parameters: Parameters) -> dict[str, str]:
    """The groups of replicas, padded with -1 to one size."""
    groups = parameters["groups"]
    longest = max(map(len, groups))
    # MLIR's tables are rectangular.
    return {"replica_groups": _table([group + [-1] * (longest - len(group)) for group in groups])}


def _exchange(parameters: Parameters) -> dict[str, str]:
    return {
        "split_dimension": f"{parameters['split_axis']} : i64",
        "concat_dimension": f"{parameters['concat_axis']} : i64",
        "split_count": f"{len(parameters['groups'][0])} : i64",
        **_groups(parameters),
    }


def _pairs(parameters: Parameters) -> dict[str, str]:
    pairs = parameters["pairs"]
    return {"source_target_pairs": _table(pairs) if pairs else "dense<> : tensor<0x2xi64>"}


COLLECTIVES = {
    "all_reduce": CollectiveForm(_groups),
    "all_gather": CollectiveForm(lambda given: {"all_gather_dim": f"{given['axis']} : i64", **_groups(given)}),
    "reduce_scatter": CollectiveForm(
        lambda given: {"scatter_dimension": f"{given['axis']} : i64", **_groups(given)}, gives_parts=True
    ),
    "all_to_all": CollectiveForm(_exchange, gives_parts=True),
    "collective_permute": CollectiveForm(_pairs, gives_parts=True),
}
"""By the name of the operation in StableHLO."""


PREFIX = "replica_engine."

VERSION = 6
"""Part of what a compiled program depends on. Raise it when a marker becomes another operation than before."""

HOST_CALL = f"{PREFIX}host_call"
"""The marker of a host call."""

JAX_FUNCTION = f"{PREFIX}jax_function"
"""The marker of a call of a function of JAX, which its parameters name by the "digest" of `jax_functions`."""

CONSTRAIN = f"{PREFIX}constrain"
"""The marker of a value that is divided over the devices of a replica in a certain way."""

_SHARDING, _SHARDING_ATTRIBUTE, _NUMBERS = "Sharding", "mhlo.sharding", re.compile(r"unspecified_dims=\[([\d,]+)\]")

LAYOUT = "mhlo.replica_engine_layout"
"""The attribute of a module whose replicas have several devices each; see `stablehlo`."""


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
        if LAYOUT not in module.operation.attributes:  # otherwise `partition_program` replaces them
            drop_constraints(module)
        calls = mlir.operations(module, "stablehlo.custom_call")
        for marker in [each for each in calls if target(each).startswith(PREFIX)]:
            if target(marker) == HOST_CALL:
                _replace_host_call(marker, platform)
            elif target(marker) == JAX_FUNCTION:
                _call_jax_function(marker, platform, module)
            elif target(marker) != CONSTRAIN:
                _replace(marker, platform, LAYOUT in module.operation.attributes)
        return module


def add_work(module: ir.Module) -> None:
    """Gives a program a last result that takes some work to compute.

    It is ready when the program has ended, so a program without results gets it. And XLA:CPU runs a program of fewer
    than a thousand operations on a single device inside the call that starts it: with several workers, nothing could
    end that call when another worker is lost.
    """
    main = mlir.functions(module)["main"]
    block = main.regions[0].blocks[0]
    end = block.operations[len(block.operations) - 1]
    with module.context, ir.Location.unknown():
        number = ir.RankedTensorType.get([], ir.F32Type.get())
        vector = ir.RankedTensorType.get([_WORK_SIZE], ir.F32Type.get())
        with ir.InsertionPoint(end):
            values = mlir.barrier(hlo.iota(vector, 0))
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


def read_parameters(marker: ir.Operation) -> dict[str, Any]:
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
    """Marks a value, so that each device of a replica has all of it."""
    config = json.dumps({"axes": [None] * ir.RankedTensorType(value.type).rank})
    attributes: dict[str, ir.Attribute] = {
        "call_target_name": ir.StringAttr.get(CONSTRAIN),
        "backend_config": ir.StringAttr.get(config),
    }
    return ir.Operation.create("stablehlo.custom_call", [value.type], [value], attributes=attributes).result


def drop_constraints(module: ir.Module) -> None:
    """Erases the markers of values that are divided in a certain way."""
    for each in mlir.operations(module, "stablehlo.custom_call"):
        if target(each) == CONSTRAIN:
            each.results[0].replace_all_uses_with(each.operands[0])
            each.erase()


def _replace_host_call(marker: ir.Operation, platform: str) -> None:
    marker.attributes["call_target_name"] = ir.StringAttr.get(HOST_CALL_TARGETS[platform])
    marker.attributes["backend_config"] = ir.Attribute.parse(f"{{index = {read_parameters(marker)['index']} : ui64}}")
    marker.attributes["api_version"] = ir.Attribute.parse("4 : i32")  # typed FFI


def _call_jax_function(marker: ir.Operation, platform: str, module: ir.Module) -> None:
    """Calls a function of JAX in the place of a marker, and puts it into the module if it is not there."""
    digest = read_parameters(marker)["digest"]
    name = f"jax_{digest}"
    if name not in mlir.functions(module):
        _add_jax_function(digest, name, platform, module)
    callee: dict[str, ir.Attribute] = {"callee": ir.FlatSymbolRefAttr.get(name)}
    with ir.InsertionPoint(marker), marker.location:
        call = ir.Operation.create("func.call", mlir.result_types(marker), list(marker.operands), attributes=callee)
    mlir.replace_call(marker, call.results)


def _add_jax_function(digest: str, name: str, platform: str, module: ir.Module) -> None:
    try:
        added = ir.Module.parse(jax_functions.find(digest).text([platform]))
    except jax_functions.KernelError as error:
        error.digest = digest
        raise
    names = {each: name if each == "main" else f"{name}_{each}" for each in mlir.functions(added)}
    mlir.rename_functions(added, names)
    for function in mlir.functions(added).values():
        function.attributes["sym_visibility"] = ir.StringAttr.get("private")
        for described in ("arg_attrs", "res_attrs"):
            if described in function.attributes:
                del function.attributes[described]
    end = ir.InsertionPoint(module.body)
    for each in list(added.body.operations):
        end.insert(each.detach_from_parent())


def _replace(marker: ir.Operation, platform: str, is_divided: bool) -> None:
    name = target(marker).removeprefix(PREFIX)
    parameters = read_parameters(marker)
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
            mlir.reduced(operation, _REDUCTIONS[parameters["op"]])
        new = operation.result
        if in_places:
            places = [place, *[mlir.splat(0, ir.RankedTensorType(place.type))] * kind.rank]
            new = hlo.reshape(kind, hlo.dynamic_slice(new, places, [1, *kind.shape]))
        if (divisor := parameters.get("divide_by", 1)) != 1:
            new = hlo.divide(new, mlir.splat(divisor, kind))
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
    is_here = mlir.compared(hlo.iota(places, 0), hlo.broadcast_in_dim(places, place, []), "EQ")
    own = hlo.broadcast_in_dim(wide, value, range(1, len(shape)))
    return hlo.select(is_here, own, mlir.splat(_nothing(kind.element_type, op), wide))


def _nothing(kind: ir.Type, op: str) -> float:
    """The number that changes no result of a reduction."""
    if not isinstance(kind, ir.IntegerType):
        return {"Add": -0.0, "Min": math.inf, "Max": -math.inf}[op]  # 0.0 would make another sum of -0.0
    first, last = (0, 2**kind.width - 1) if kind.is_unsigned else (-(2 ** (kind.width - 1)), 2 ** (kind.width - 1) - 1)
    return {"Add": 0, "Min": last, "Max": first}[op]


# Host calls as transfers between a device and the host.
HostFunction = Callable[..., tuple[np.ndarray, ...]]

_SEND, _RECEIVE = 2, 3  # the types of channels from a device to the host, and back
_FIRST_CHANNEL = 1 << 12  # above those of collectives; jaxlib takes numbers of 16 bits
_SDY_SHARDING = "sdy.sharding"
_DTYPES = {
    "i1": "bool",
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "bf16": "bfloat16",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}
"""By type of an element, the dtype of what can be transferred."""

Kind = tuple[tuple[int, ...], np.dtype]
"""The shape and dtype of a value."""


class UntransferableError(Exception):
    """A value of a host call that cannot be sent between a device and the host.

    Attributes:
        index: the index of the host call.
        kind: the type of the value, as text.
    """

    def __init__(self, index: int, kind: str):
        super().__init__(index, kind)
        self.index, self.kind = index, kind


@dataclass(frozen=True)
class HostTransfers:
    """The transfers of one host call in a program.

    Attributes:
        index: the index of the called function.
        operands: what it takes.
        results: what it returns.
        sends: the channels of the operands that are not empty.
        receives: the channels of the results that are not empty.
    """

    index: int
    operands: tuple[Kind, ...]
    results: tuple[Kind, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]


def convert(module: ir.Module) -> list[HostTransfers]:
    """Replaces the calls of Python functions in a module by transfers.

    Programs for CPUs and GPUs call Python by a custom call, which TPUs do not have. There what a call takes is sent to
    the host, and what it returns is received from there: a call is a `send` of each operand, and after them a `recv` of
    each result, on channels that no other call has. jaxlib calls the function with what a device has sent, and sends
    the device the results; jax makes its own callbacks for TPUs in the same way. Programs for GPUs that are not there
    are compiled so too: the compiler knows the custom call only where a GPU is.

    TPUs cannot receive empty arrays. So those are not sent, and made where they are needed.

    Raises:
        UntransferableError: a value of a call has a type or a size that cannot be sent.
    """
    with module.context, ir.Location.unknown():
        _split_functions(module)
        made: list[HostTransfers] = []
        for call in _host_calls(module):
            made.append(
                _replace_call(call, _FIRST_CHANNEL + sum(len(each.sends) + len(each.receives) for each in made))
            )
        return made


def callback(client: Any, transfers: HostTransfers, call: HostFunction) -> object:
    """What a client of jaxlib takes for the transfers of a call, when it loads the program."""
    empty = [np.zeros(*kind) if 0 in kind[0] else None for kind in transfers.operands]
    sent = [number for number, (shape, _) in enumerate(transfers.results) if 0 not in shape]

    def called(*arrays: np.ndarray) -> list[np.ndarray]:
        given = iter(arrays)
        results = call(*[next(given) if value is None else value for value in empty])
        return [results[number] for number in sent]

    return client.make_python_callback_from_host_send_and_recv(
        called,
        [Shape.array_shape(dtype, shape) for shape, dtype in transfers.operands if 0 not in shape],
        [Shape.array_shape(dtype, shape) for shape, dtype in transfers.results if 0 not in shape],
        transfers.sends,
        transfers.receives,
        _not_serialized,
    )


def _not_serialized(call: object) -> bytes:
    """The function in a serialized program: nothing, since the function is given again when the program is read."""
    return b""


def _split_functions(module: ir.Module) -> None:
    """Gives each call of a function that calls the host a copy of its own: a channel must stand in a program once."""
    known = mlir.functions(module)
    concerned = {name for name, each in known.items() if _host_calls(each)}
    calls = {name: set(map(mlir.callee, mlir.operations(each, "func.call"))) for name, each in known.items()}
    while more := {name for name, callees in calls.items() if callees & concerned} - concerned:
        concerned |= more
    seen: set[str] = set()
    # From the main function on, copies included: a copy calls what its original calls.
    pending = [known["main"]]
    while pending:
        for call in mlir.operations(pending.pop(), "func.call"):
            name = mlir.callee(call)
            if name not in concerned:
                continue
            function = known[name]
            if name in seen:
                with ir.InsertionPoint(module.body):
                    function = function.clone()
                name = f"{name}_{len(seen)}"
                function.attributes["sym_name"] = ir.StringAttr.get(name)
                call.attributes["callee"] = ir.FlatSymbolRefAttr.get(name)
            seen.add(name)
            pending.append(function)


def _replace_call(call: ir.Operation, channel: int) -> HostTransfers:
    """Replaces a call by transfers on channels from a number on."""
    index = ir.IntegerAttr(ir.DictAttr(call.attributes["backend_config"])["index"]).value
    types, is_tuple = mlir.result_types(call), isinstance(call.results[0].type, ir.TupleType)
    operands = tuple(_kind(each.type, index) for each in call.operands)
    results = tuple(_kind(each, index) for each in types)
    sends: list[int] = []
    receives: list[int] = []
    values = []
    with ir.InsertionPoint(call), call.location:
        token = hlo.create_token()
        for operand, (shape, _) in zip(call.operands, operands, strict=True):
            if 0 not in shape:
                sends.append(channel + len(sends))
                (token,) = _transfer(call, "send", [token.type], [operand, token], sends[-1], _SEND)
        for type_, (shape, _) in zip(types, results, strict=True):
            if 0 in shape:
                floats = ir.RankedTensorType.get(shape, ir.F32Type.get())  # there are no constants of complex numbers
                values.append(hlo.convert(type_, hlo.constant(ir.Attribute.parse(f"dense<> : {floats}"))))
                continue
            receives.append(channel + len(sends) + len(receives))
            value, token = _transfer(call, "recv", [type_, token.type], [token], receives[-1], _RECEIVE)
            values.append(value)
        for old, new in zip(call.results, [hlo.tuple(values)] if is_tuple else values, strict=True):
            old.replace_all_uses_with(new)
    call.operation.erase()
    return HostTransfers(index, operands, results, tuple(sends), tuple(receives))


def _transfer(
    call: ir.Operation, name: str, results: list[ir.Type], operands: list[ir.Value], channel: int, kind: int
) -> ir.OpResultList:
    attributes = {
        "channel_handle": f"#stablehlo.channel_handle<handle = {channel}, type = {kind}>",
        "is_host_transfer": "true",
        "mhlo.frontend_attributes": '{_xla_host_transfer_handler_name = "pjrt_rendezvous", '
        f'_xla_host_transfer_rendezvous = "{channel}"}}',
    }
    if _SDY_SHARDING in call.attributes:  # of a divided program, in which one device makes the call
        attributes[_SDY_SHARDING] = (
            f"#sdy.sharding_per_value<[{', '.join([f'<@{partition_local.ONE}, []>'] * len(results))}]>"
        )
    parsed = {key: ir.Attribute.parse(text) for key, text in attributes.items()}
    return ir.Operation.create(f"stablehlo.{name}", results=results, operands=operands, attributes=parsed).results


def _kind(type_: ir.Type, index: int) -> Kind:
    tensor = ir.RankedTensorType(type_)
    dtype = _DTYPES.get(str(tensor.element_type))
    if dtype is None or not tensor.has_static_shape:
        raise UntransferableError(index, str(type_))
    return tuple(tensor.shape), np.dtype(dtype)


def _host_calls(root: ir.Module | ir.Operation) -> list[ir.Operation]:
    """The calls of Python functions inside a module or a function."""
    calls = mlir.operations(root, "stablehlo.custom_call")
    return [each for each in calls if target(each) in HOST_CALL_TARGETS.values()]
