"""Host calls of programs for TPUs: what a call takes is sent to the host, and what it returns is received from there.

Programs for CPUs and GPUs call Python by a custom call, which TPUs do not have. There a call is a `send` of each
operand, and after them a `recv` of each result, on channels that no other call has. jaxlib calls the function with what
a device has sent, and sends the device the results; jax makes its own callbacks for TPUs in the same way. Programs for
GPUs that are not there are compiled so too: the compiler knows the custom call only where a GPU is.

TPUs cannot receive empty arrays. So those are not sent, and made where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from replica_engine.pjrt import mlir
from replica_engine.pjrt.jaxlib import HOST_CALL_TARGETS, Shape, hlo, ir
from replica_engine.pjrt.markers import target
from replica_engine.pjrt.partitions.layout import ONE

Call = Callable[..., tuple[np.ndarray, ...]]

_SEND, _RECEIVE = 2, 3  # the types of channels from a device to the host, and back
_FIRST_CHANNEL = 1 << 12  # above those of collectives; jaxlib takes numbers of 16 bits
_SHARDING = "sdy.sharding"
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
        kind: the type of the value, in words.
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

    Raises:
        UntransferableError: a value of a call has a type or a size that cannot be sent.
    """
    with module.context, ir.Location.unknown():
        _split_functions(module)
        made: list[HostTransfers] = []
        for call in _host_calls(module):
            made.append(_replace(call, _FIRST_CHANNEL + sum(len(each.sends) + len(each.receives) for each in made)))
        return made


def callback(client: Any, transfers: HostTransfers, call: Call) -> object:
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
    functions = mlir.functions(module)
    concerned = {name for name, each in functions.items() if _host_calls(each)}
    calls = {name: set(map(mlir.callee, mlir.operations(each, "func.call"))) for name, each in functions.items()}
    while more := {name for name, callees in calls.items() if callees & concerned} - concerned:
        concerned |= more
    seen: set[str] = set()
    pending = [functions["main"]]
    while pending:
        for call in mlir.operations(pending.pop(), "func.call"):
            name = mlir.callee(call)
            if name not in concerned:
                continue
            function = functions[name]
            if name in seen:
                with ir.InsertionPoint(module.body):
                    function = function.clone()
                name = f"{name}_{len(seen)}"
                function.attributes["sym_name"] = ir.StringAttr.get(name)
                call.attributes["callee"] = ir.FlatSymbolRefAttr.get(name)
            seen.add(name)
            pending.append(function)


def _replace(call: ir.Operation, channel: int) -> HostTransfers:
    """Replaces a call by transfers on channels from a number on."""
    index = ir.IntegerAttr(ir.DictAttr(call.attributes["backend_config"])["index"]).value
    types = [each.type for each in call.results]
    if is_tuple := isinstance(types[0], ir.TupleType):  # TensorFlow gives several results in one
        types = [types[0].get_type(number) for number in range(types[0].num_types)]
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
    if _SHARDING in call.attributes:  # of a divided program, in which one device makes the call
        attributes[_SHARDING] = f"#sdy.sharding_per_value<[{', '.join([f'<@{ONE}, []>'] * len(results))}]>"
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
