"""The second stage: a traced body becomes a StableHLO program; and XLA's errors in the user's terms.

The program's parameters are the slots of the arguments, captured tensors, and the values of captured variables. Its
results are the tensors that the body returned, followed by the new value of each variable that the body wrote. The
module's `input_output_alias` names those variables, so that XLA may write the new value over the old one.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.user_frames import user_line
from replica_engine.errors import CollectiveError, DeviceError, LoweringError, ProgramError
from replica_engine.errors.base import at, byte_size, shown
from replica_engine.pjrt.absent_chips import compile_absent
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.pjrt.devices import chip_memory, device_group, memory_limit
from replica_engine.pjrt.executable import Executable, agreed
from replica_engine.pjrt.jaxlib import DYNAMIC, RUNTIME_ERRORS
from replica_engine.pjrt.plan import Plan
from replica_engine.pjrt.stablehlo import jax_functions, markers, partition_program
from replica_engine.pjrt.stablehlo.lowered_module import LoweredModule, UnreadableModule, fitting, in_branches, read
from replica_engine.upstream.graphs import graph_walk, xla_ops
from replica_engine.xla.soft_placement import host_op_kinds, host_piece
from replica_engine.xla.soft_placement.graph_copy import HostCallInfo, MovedBody
from replica_engine.xla.stages.body_graph import BodyGraph
from replica_engine.xla.stages.compiled import Compiled
from replica_engine.xla.stages.program import BodyProgram
from replica_engine.xla.stages.saved_programs import found_or_compiled, found_or_lowered
from replica_engine.xla.state.device_value import pinned

_LOOP_SHAPES = re.compile(r"shapes of loop body do not match: \((.*?)\) vs\. \((.*?)\)$", re.MULTILINE)
_SHAPE = re.compile(r"\w+\[([\d,<=]*)\]")
_NODE = re.compile(r"to node `([^`]+)`|\{\{node ([^}]+)\}\}")


def make_lowering_error(traced: BodyGraph, error: Exception, moved: MovedBody | None) -> LoweringError:
    """The error that the user gets for an error of XLA's compiler.

    It is in terms of the user's program: which op, at which line, and what to write instead.
    """
    text = str(error)
    where = _line(traced, text, moved)
    if found := _LOOP_SHAPES.search(text):
        explained = _growing_loop(traced.name, where, *_change(*found.groups()), _gathers(traced, text, moved))
    else:
        explained = _find_lowering_error(traced, text, where)
    explained.op_name = _node(text)
    return explained


def unreadable(traced: BodyGraph, names: list[str], message: str, moved: MovedBody | None) -> LoweringError:
    """The error for a module with an operation that jaxlib does not read.

    Args:
        traced: the body.
        names: the names in the operation's location, among which is that of TensorFlow's op.
        message: what jaxlib says; "" for an operation that has no form in StableHLO.
        moved: the body with its host ops moved.
    """
    originals = moved.originals if moved else {}
    ops = {name: originals.get(name) or next(_named(traced.graph, name), None) for name in names}
    name, op = next((found for found in ops.items() if found[1] is not None), ("", None))
    where = user_line(op) if op is not None else ""
    if message:
        error = LoweringError.other(traced.name, message, where)
    else:
        error = _unsupported(traced.name, op.type if op is not None else "an op", where)
    error.op_name = name
    return error


def undividable(traced: BodyGraph) -> LoweringError:
    """The error for a body with a value whose shape depends on data, which XLA cannot divide over devices."""
    op = next((op for op in graph_walk.everywhere(traced.graph) if op.type in host_op_kinds.SHAPED_BY_DATA), None)
    where = user_line(op) if op is not None else ""
    return LoweringError(
        f"`{traced.name}` has a value whose shape depends on data{at(where)}, such as "
        "the result of tf.where(mask), tf.unique or tf.boolean_mask. XLA cannot divide such values over the devices of "
        "a replica. Keep the shape: tf.where(mask, x, 0.0) in place of tf.boolean_mask(x, mask), divided by the sum of "
        "the mask for a mean. On replicas of one device, without `distribution=`, the step works as it is."
    )


def _growing_loop(fn: str, where: str, before: str, after: str, gathers: list[str]) -> LoweringError:
    cause = f" The loop contains {' and '.join(gathers)}, whose result is larger than its operand." if gathers else ""
    gather = ", and gather them after the loop" if gathers else ""
    return LoweringError(
        f"In `{fn}`, a value of a loop{at(where)} has the shape {before} before an iteration and {after} after it, and "
        f"XLA compiles a loop for one shape. shape_invariants do not change that.{cause} Collect the values of the "
        f"iterations in a tf.TensorArray(dtype, size=n){gather}; or loop over a Python range, for i in range(n): such "
        "a loop is unrolled, and shapes may differ."
    )


def _unsupported(name: str, op: str, where: str) -> LoweringError:
    """The error for an op without a kernel of XLA; the user did not write the ops of `tf.debugging`."""
    if not op.startswith("Debug"):
        return LoweringError.unsupported_op(name, op, where)
    return LoweringError(
        f"tf.debugging.enable_check_numerics or another debugger has added {op} to `{name}`{at(where)}, and "
        "XLA cannot compile it. Call tf.debugging.disable_check_numerics() before the function is traced; or leave "
        "soft_placement on, with which check_numerics works under TPUStrategy; or use MirroredStrategy."
    )


def _find_lowering_error(traced: BodyGraph, text: str, where: str) -> LoweringError:
    name = traced.name
    unsupported = re.search(r"on XLA_\w+: (\w+) \(", text) or re.search(r"with op (\w+)", text)
    if "Detected unsupported operations" in text and unsupported:
        return _unsupported(name, unsupported.group(1), where)
    if "compile-time constant" in text:
        return LoweringError.not_constant(name, unsupported.group(1) if unsupported else "an op", where)
    if "tensor list" in text.lower():
        return LoweringError(
            f"In `{name}`, a loop{at(_unbounded_loop(traced.graph) or where)} keeps a value of each iteration, for its "
            "gradient or in a TensorArray, so XLA must know the number of iterations: pass maximum_iterations to "
            "tf.while_loop, or loop over tf.range(n) for a constant n."
        )
    message = text.removeprefix("Failed getting HLO text: ").strip("'").split("\n\n")[0].split("Stack trace")[0]
    message = message.split("tf2xla conversion failed")[0]  # the rest is about TensorFlow's internals
    return LoweringError.other(name, message.strip(), where)


def _unbounded_loop(graph: Any) -> str:
    """The line of the first loop that keeps values and has no known number of iterations; its gradient comes later."""
    for op in graph_walk.everywhere(graph):
        if op.type in ("While", "StatelessWhile") and any(output.dtype == tf.variant for output in op.outputs):
            most = tf.get_static_value(op.inputs[1])  # -1 stands for no maximum
            if most is None or np.all(most < 0):
                return user_line(op)
    return ""


def _change(before: str, after: str) -> tuple[str, str]:
    """The shapes of the first value of a loop that changes its shape, in the words of TensorFlow."""
    for one, other in zip(_SHAPE.findall(before), _SHAPE.findall(after), strict=False):
        if one != other:
            return f"[{one.replace(',', ', ')}]", f"[{other.replace(',', ', ')}]"
    return before, after


def _gathers(traced: BodyGraph, message: str, moved: MovedBody | None) -> list[str]:
    """The gathers in the loop that a message is about, with their lines."""
    loop = moved.originals.get(_node(message)) if moved else next(_named(traced.graph, _node(message)), None)
    graphs = [] if loop is None else graph_walk.list_inner_graphs(loop)
    inside = {user_line(op) for graph in graphs for op in graph_walk.everywhere(graph)}
    found = (each for each in traced.collectives if each.kind == "all_gather" and each.where in inside)
    return list(dict.fromkeys(f"{each.kind}{at(each.where)}" for each in found))


def _node(message: str) -> str:
    found = _NODE.search(message)
    return found.group(1) or found.group(2) if found else ""


def _line(traced: BodyGraph, message: str, moved: MovedBody | None) -> str:
    """The user's line of the op that XLA's message is about.

    The op itself knows it best. But the message gives only the op's name, and functions of the body may have ops of
    one name. Then the stack trace in the message decides. For an op of a body with moved ops this is the last choice:
    the op is a copy, and its trace is of the copying.
    """
    if moved and (op := moved.originals.get(_node(message))) is not None:
        return user_line(op)
    lines = {user_line(op) for op in _named(traced.graph, _node(message))}
    if len(lines) == 1:
        return lines.pop()
    # XLA prints one stack for the op and others for the calls around it. The op's stack is the first. The name of a
    # lambda is left out.
    stack = re.split(r"The op is created at:|Stack trace for op definition:", message)[1:2]
    return user_line(re.findall(r'File "([^"]+)", line (\d+), in (\S*)', stack[0] if stack else message))


def _named(graph: Any, name: str) -> Iterator[tf.Operation]:
    """The ops of this name in a graph, and in the functions that it runs."""
    return (op for op in graph_walk.everywhere(graph) if op.name == name)


_OF_DATA = frozenset({"Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"})
"""The ops whose results XLA gives a size that depends on data."""

_SIZES = ("Shape", "Size", "ShapeN")


def reshape_by_data(graph: Any) -> tf.Operation | None:
    """The first reshape of a body to a size that depends on data: XLA computes wrong values for it, without an error.

    `tf.reshape(x, [count, -1])`, where count is the size of `tf.where(mask)`: for XLA that size is the largest that it
    may become, together with the true one. A reshape to it gets rows for the largest. The values then lie in other rows
    than in TensorFlow, and TensorFlow's own `jit_compile=True` returns them so.

    Args:
        graph: the body; functions that it runs count.
    """
    for op in graph_walk.everywhere(graph):
        if op.type == "Reshape" and op.inputs[0].shape.is_fully_defined() and _depends_on_sizes(op.inputs[1].op):
            return op
    return None


def _depends_on_sizes(op: tf.Operation) -> bool:
    """Whether an op depends on the size of a result of one of the ops above."""

    def before(found: tuple[tf.Operation, bool]) -> list[tuple[tf.Operation, bool]]:
        each, is_size = found
        return [(one.op, is_size or one.op.type in _SIZES) for one in each.inputs]

    found = graph_walk.reached([(op, op.type in _SIZES)], before, tuple)
    return any(is_size and each.type in _OF_DATA for each, is_size in found)


class Lowered:
    """A replica body as a program for XLA.

    Attributes:
        traced: the previous stage.
        program: the data that compiling and launching need.
        host_calls: the calls to the host in the program, in the order in which they were traced.
        module: the program as jaxlib writes it.
        has_collectives: whether the replicas exchange values.
        shapes: the shapes of the slots, the tensors among the arguments.
        captured: which of the captured tensors are parameters of the program.
        results: the shape and the dtype of each result.
        writes: for each variable that is written: its index among the captured variables and its index among the
            results.
        host_slots: which slots are not parameters, since no device can have them.
        host_results: which results of the body stay on the host, and their numbers there.
    """

    def __init__(self, traced: BodyGraph, slots: list[tf.TensorSpec], module: LoweredModule, moved: MovedBody | None):
        written = [call for call in traced.host_calls.calls if not isinstance(call, host_piece.Piece)]
        pieces = [piece for piece in (moved.pieces if moved else ()) if piece.index in module.host_calls]
        self.traced = traced
        self.host_calls = tuple(map(HostCallInfo.from_call, [*written, *pieces]))
        self.has_collectives = module.has_collectives
        program = BodyProgram(traced, slots, module, moved.host_results if moved else {})
        self._set(module, program)
        self.shapes = program.shapes
        self.captured, self.results, self.writes = program.captured, program.results, program.writes
        self.host_slots, self.host_results = program.host_slots, program.host_results

    def _set(self, module: LoweredModule, program: BodyProgram) -> None:
        self.module, self.program = module, program
        self._text = (
            module.text if program.layout is None else partition_program.with_layout(module.text, program.layout)
        )

    @classmethod
    def in_branches(cls, shares: Sequence[Lowered], whole: bool = False) -> Lowered:
        """A body without collectives, in which each replica takes the branch for the shape of its share.

        Args:
            shares: the body lowered for each shape.
            whole: as for `lowered_module.in_branches`.

        Raises:
            LoweringError: the body writes other variables, or takes other tensors from outside, with another shape.
        """
        # As text, since lists have no hash.
        if len({repr((each.writes, each.captured, sorted(each.host_slots))) for each in shares}) > 1:
            raise LoweringError(
                f"`{shares[0].program.name}` writes other variables, or uses other captured tensors, for another "
                "number of samples, and the replicas have shares of several sizes. Divide the batch evenly: "
                "replica_engine.split_batch(batch, ...), or dataset.batch(n, drop_remainder=True)."
            )
        specs = zip(*(each.program.slots for each in shares), strict=True)
        slots = [tf.TensorSpec(fitting([spec.shape for spec in each]), each[0].dtype) for each in specs]
        lowered, programs = copy.copy(shares[0]), [each.program for each in shares]
        module = in_branches([each.module for each in shares], whole)
        lowered._set(module, BodyProgram(lowered.traced, slots, module, lowered.host_results, programs))
        return lowered

    def as_text(self) -> str:
        """The StableHLO program.

        Example:
            >>> from replica_engine import xla
            >>> "all_reduce" in xla.lower(xla.cross_replica_sum, [[1.0], [2.0]]).as_text()
            True
        """
        return self._text

    def executable(self, devices: DeviceGroup) -> Executable:
        """Compiles the program for devices, or reads what an earlier process compiled."""
        name, body, text = self.program.name, self.program.body, self._text
        # Weakly: the garbage collector cannot look into the program. A call holds the user's function, which may hold
        # the strategy, which holds the program. The traced body keeps the call.
        calls = [weakref.proxy(call) for call in self.traced.host_calls.calls]

        def describe(seconds: float) -> str:
            return (
                f"XLA has been compiling `{name}` for {body.size} replicas for {seconds:.3g} s. Large convolutional "
                "networks take minutes on CPU; MirroredStrategy compiles nothing."
            )

        with body.compiling(f"compile {name}", describe):
            compared = None
            if self.has_collectives or devices.spans:  # the devices of a replica exchange parts of its values
                compared = agreed(text, devices, (name, self.traced.where, self.program.takes), body.limits)
            make = functools.partial(
                Executable,
                text,
                devices,
                self.program.results,
                calls,
                compared=compared,
                limits=body.limits,
                axes=self.program.layout and self.program.layout.results,
                is_given_all=self.program.donates and not self.program.returned,
            )
            try:
                executable = found_or_compiled(text, self.program, devices, make, together=compared is not None)
            except markers.UntransferableError as refused:
                raise self._untransferable(refused, devices.platform.upper()) from None
            except jax_functions.KernelError as refused:
                raise self._other_chips(refused, devices.platform.upper()) from refused.__cause__
            except RUNTIME_ERRORS as failed:
                if DYNAMIC in str(failed):
                    raise undividable(self.traced) from None
                if devices.member is not None:
                    devices.member.explain(failed)
                raise ProgramError(  # that of GPUs tries kernels out, and so may run out of memory
                    f"`{name}` cannot be compiled for {len(devices.names)} replicas ({', '.join(devices.names)}):\n"
                    f"{str(failed).strip()}\n"
                    "Nothing was launched, so all variables keep their values. If memory is the cause, use a smaller "
                    "batch."
                ) from failed
        # Known only now, since XLA decides what the devices exchange.
        if self.traced.diverges and executable.exchanges_in_branches():
            raise LoweringError(
                f"In `{name}`, replicas may take different branches, or numbers of iterations,"
                f"{at(self.traced.diverges)}. Each replica has several devices, and XLA has divided the branch so that "
                "devices of all replicas would wait for each other in it, for ever. Let the condition be equal on all "
                "replicas (all_reduce it), compute both branches and choose with tf.where, or use replicas of one "
                "device."
            )
        limit = memory_limit(devices)
        if limit is not None and executable.bytes_needed > limit:
            error = ProgramError(
                f"The compiled program of `{name}` needs {byte_size(executable.bytes_needed)} for intermediate values "
                f"and results on each of {devices.size} replicas, but only {byte_size(limit)} of memory are available. "
                "The program was not launched, so all variables keep their values. Use a smaller batch."
            )
            error.plan = executable.plan(name, chip_memory(devices))
            raise error
        return executable

    @overload
    def compile(self, devices: DeviceGroup | None = None, *, topology: None = None) -> Compiled: ...

    @overload
    def compile(self, devices: None = None, *, topology: str) -> Plan: ...

    def compile(self, devices: DeviceGroup | None = None, *, topology: str | None = None) -> Compiled | Plan:
        """The last stage: the program compiled for devices, or for chips that are not there.

        Args:
            devices: the devices, as many as replicas; None takes the first N of the best platform.
            topology: a slice of TPUs such as "v5e:2x4" (v2, v3, v4, v5e, v5p, v6e, 7x), or GPUs, "h100:8". The program
                is compiled for its first N devices, in a process of its own, and cannot run. Install the compilers
                with `pip install "replica-engine[aot]"`.

        Returns:
            A `Compiled`; for a `topology`, a `Plan`: the memory and the work on each device, as the compiler says.

        Raises:
            DeviceError: there are fewer devices than replicas, or the slice cannot serve so many; or `devices` is a
                group of another size, or is not a DeviceGroup; or no slice has the name `topology`.
            BackendMissingError: the compiler of the topology is not installed.
            ProgramError: the compiler of the topology refuses the program, or ends its process.
        """
        if topology is not None:
            return self._plan(devices, topology)
        if isinstance(devices, str):
            raise DeviceError(f"compile takes devices; for chips that need not be there write topology={devices!r}.")
        if devices is not None and not isinstance(devices, DeviceGroup):
            raise DeviceError(
                "`devices` must be a group of devices, such as xla.PjrtClusterResolver('cpu').devices, or None for "
                f"the first devices of the best platform; got {shown(devices)}."
            )
        size = self.program.body.size
        if devices is not None and devices.replicas != size:
            raise DeviceError(
                f"The body was traced for {size} replicas and cannot be compiled for {devices.replicas} devices. "
                "Trace it with one list of arguments for each device: xla.lower(fn, inputs=[[x0], [x1], "
                "...]).compile(devices)."
            )
        devices = devices or device_group(count=size)
        return Compiled(self.program, devices, self.executable(devices))

    def _plan(self, devices: DeviceGroup | None, topology: str) -> Plan:
        """The program compiled for chips that are not there."""
        if devices is not None:
            raise DeviceError("Pass `devices`, which are there, or a `topology`, which need not be; not both.")
        program, body = self.program, self.program.body

        def slow(seconds: float) -> str:
            return (
                f"`{program.name}` for {body.size} replicas has been compiled for {topology} for {seconds:.3g} s, in a "
                "process of its own. Ctrl-C ends that, and so does the timeout= of the strategy."
            )

        with body.compiling(f"compile {program.name} for {topology}", slow):
            try:
                parts = 1 if body.mesh is None else body.mesh.size
                limit = body.limits.timeout
                return compile_absent(self._text, program.name, body.size, topology, program.sizes, limit, parts)
            except markers.UntransferableError as refused:
                raise self._untransferable(refused, topology) from None
            except jax_functions.KernelError as refused:
                raise self._other_chips(refused, topology) from refused.__cause__

    def _other_chips(self, refused: jax_functions.KernelError, where: str) -> LoweringError:
        ops = (op for op in graph_walk.everywhere(self.traced.graph) if xla_ops.marker_name(op) == markers.JAX_FUNCTION)
        found = {json.loads(xla_ops.marker_parameters(op))["digest"]: op for op in ops}
        op = found.get(refused.digest)  # none, if it is the copy of one
        name = json.loads(xla_ops.marker_parameters(op))["name"] if op is not None else "a function"
        line = user_line(op) if op is not None else ""
        return LoweringError.other_chips(name, line, where, str(refused))

    def _untransferable(self, refused: markers.UntransferableError, where: str) -> DeviceError:
        call = self.traced.host_calls.calls[refused.index]
        return DeviceError(
            f"`{self.program.name}` cannot be compiled for {where}: {call.describe()}, takes or returns a value of the "
            f"type {refused.kind}, which cannot be sent between the host and such a device. Cast the value in the "
            "step, give it a fixed size, or do the host work before and after the run."
        )


def lower(traced: BodyGraph, slots: list[tf.TensorSpec], tensors: list[tf.TensorSpec]) -> Lowered:
    """Lowers a body for slots and captured tensors of these specs.

    Raises:
        LoweringError: see `Traced.lower`.
    """
    names = [*traced.slot_names, *(f"The captured {tensor!r}" for tensor in traced.tensors)]
    for index, (name, spec) in enumerate(zip(names, [*slots, *tensors], strict=True)):
        traced.check_shape(index, name, spec)
    specs = [spec for index, spec in enumerate(slots) if index not in traced.host_slots]
    specs += [tensors[index] for index in traced.captured]
    moved: MovedBody | None = None
    try:
        if traced.moves:
            moved = traced.moved(slots, tensors)
        registered = moved.registered if moved else traced.registered()
        # Pinned, since TensorFlow looks at the shapes of variables, and a freed one is empty.
        with tf.init_scope(), pinned(traced.handles):
            text = found_or_lowered(traced.name, registered, specs, traced.handles)
    except LoweringError:
        # Once: after this, no sparse arguments are left for the host.
        if traced.leave_no_sparse_on_host():
            return lower(traced, slots, tensors)
        raise
    except (ValueError, tf.errors.OpError) as error:
        # As often as it finds a tensor to compile in, so this ends.
        if "compile-time constant" in str(error) and traced.bake_in():
            return lower(traced, slots, tensors)
        raise make_lowering_error(traced, error, moved) from None
    try:
        module = read(text, aliases=traced.donates)  # with an alias, the old value of a variable is overwritten
    except UnreadableModule as error:
        raise unreadable(traced, error.names, error.message, moved) from None
    if (reshape := reshape_by_data(traced.graph)) is not None:
        raise LoweringError.not_constant(traced.name, reshape.type, user_line(reshape))
    if module.sums_unknown_size:  # of which XLA:CPU's own error says little
        for each in traced.collectives:
            if not each.shape.is_fully_defined():
                raise CollectiveError.unknown_shape(each.kind, each.where, str(each.shape), [])
    if moved and module.shaped_by_data:
        call = traced.host_calls.calls[module.shaped_by_data[0]]
        raise LoweringError(
            f"In `{traced.name}`, {call.describe()}, needs a value from the devices whose shape depends on data, "
            "such as the result of tf.where(mask), tf.unique or tf.boolean_mask. Use a mask, or pad the values to "
            "a fixed size."
        )
    return Lowered(traced, slots, module, moved)
