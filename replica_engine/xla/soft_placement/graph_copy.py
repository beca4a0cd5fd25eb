"""A copy of a body's graph in which calls of the host stand for the host ops.

The copy is made in one pass, op by op, in the order of the program. An op is treated in one of four ways:

- XLA compiles it, and its inputs are on the devices: it is copied.
- It is a host op (`host_op_kinds.is_for_host`), or one of its inputs cannot leave the host, or the host computes its
  shape: it waits for the next call (`host_piece`).
- It only checks something: the devices make the check, and call the host if it fails.
- It is a branch, a loop or a call with host ops inside: it is built again around copies of its functions. Calls are
  inlined. The host does a branch itself that only computes, from a value that cannot leave the host.

In branches and loops of the user, strings may be printed and summarized, but not worked with: the devices decide which
branch is taken, and a string cannot leave the host.

A body is rewritten for the shapes that it is lowered for, so a host op may have inputs of any batch size.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics.user_frames import user_line
from replica_engine.errors import LoweringError, program_errors
from replica_engine.errors.base import at
from replica_engine.upstream import eager, thread_state
from replica_engine.upstream.graphs import graph_walk, host_kernels, xla_ops
from replica_engine.xla.host_calls.host_call import HostCall, HostCalls
from replica_engine.xla.soft_placement import host_op_kinds
from replica_engine.xla.soft_placement.host_piece import Pending, Piece, Shapes, Source, Value

_numbers = itertools.count()


class HostCallInfo(NamedTuple):
    """A host call of a program, in `Lowered.host_calls`.

    Example:
        >>> import tensorflow as tf
        >>> from replica_engine import xla
        >>> (call,) = xla.lower(lambda x: tf.print(x), [[1.0], [2.0]]).host_calls
        >>> [op for op, line in call.ops]
        ['StringFormat', 'PrintV2']
        >>> call.moved, call.in_loop
        (True, False)

    Attributes:
        name: the name of its cluster: "0", "1", ...; a gradient of cluster "0" has the name "0.0".
        ops: the ops that run on the host, each as its type and the user's line; empty for a function of the user.
        where: the user's line.
        moved: whether soft placement moved ops there; False for `outside_compilation`.
        in_loop: whether it is in a loop of the body, and happens in each iteration. Known only for moved ops.
        results: specs of the results that the program gets back.
    """

    name: str
    ops: tuple[tuple[str, str], ...]
    where: str
    moved: bool
    in_loop: bool
    results: tuple[tf.TensorSpec, ...]

    @classmethod
    def from_call(cls, call: HostCall) -> HostCallInfo:
        """The description of a call."""
        results = tuple(call.results)
        if isinstance(call, Piece):
            ops = tuple((op.kind, op.where) for op in call.ops)
            return cls(call.name, ops, call.where, True, call.in_loop, results)
        return cls(call.name, (), call.where, False, False, results)


class MovedBody(NamedTuple):
    """A body whose host ops are in host calls.

    Attributes:
        registered: its graph, as a function that TensorFlow can find by name.
        pieces: the host calls.
        host_results: the results that stay on the host: the number under which each is stored, by its index.
        originals: the original op of each copied op, by the name of the copy.
    """

    registered: Any
    pieces: list[Piece]
    host_results: dict[int, int]
    originals: dict[str, tf.Operation]


class Inputs(NamedTuple):
    """The inputs of the graph of a body, and their counterparts in the copy.

    Attributes:
        specs: for each slot and captured tensor that is a parameter, the tensor of the graph and its spec.
        variables: for each variable, the tensor of the graph that is its handle, and the handle itself.
        on_host: for each tensor of the graph that no device can have, its shape and where the host has it.
    """

    specs: list[tuple[tf.Tensor, tf.TensorSpec]]
    variables: list[tuple[tf.Tensor, Any]]
    on_host: list[tuple[tf.Tensor, tf.TensorShape, Source]]


def move(name: str, graph: Any, calls: HostCalls, inputs: Inputs) -> MovedBody:
    """Moves the host ops of a body.

    Args:
        name: the name of the body.
        graph: its graph.
        calls: its host calls; the pieces are added to them.
        inputs: the inputs of the graph.

    Raises:
        LoweringError: the devices need a value that cannot leave the host, the host needs one that cannot leave the
            devices, or a branch or a loop of the user works with strings.
    """
    rewriter = Rewriter(name, calls, graph)
    begin = len(calls.calls)
    host_results: dict[int, int] = {}

    def build(*placeholders: tf.Tensor) -> list[tf.Tensor]:
        values: dict[int, Value] = {}
        for (inside, _), placeholder in zip(inputs.specs, placeholders, strict=True):
            values[id(inside)] = Value.from_tensor(placeholder)
        for inside, handle in inputs.variables:
            eager.graph().capture(handle)
            # The handle itself, which each graph captures: ops on a variable keep their order if all use one tensor.
            value = values[id(inside)] = Value.from_tensor(handle)
            if handle is calls.order:
                rewriter.order = value
        for inside, shape, source in inputs.on_host:
            values[id(inside)] = Value(inside.dtype, shape, source=source)
        with xla_ops.xla_context():
            results, stored = rewriter.copy(values)
        host_results.update(stored)
        return results

    with thread_state.unobserved():
        copy = xla_ops.trace(name, build, [spec for _, spec in inputs.specs])
    handles = [copy.capture(handle) for _, handle in inputs.variables]
    # The handles last: the order in which the program has its parameters.
    copy.inputs[:] = [*copy.inputs[: len(inputs.specs)], *handles]
    with tf.init_scope():
        registered = xla_ops.register(f"replica_body_{name}_on_host_{next(_numbers)}", copy)
    pieces = [call for call in calls.calls[begin:] if isinstance(call, Piece)]
    return MovedBody(registered, pieces, host_results, rewriter.originals)


class Rewriter:
    """Copies the graph of one body.

    Args:
        name: the name of the body.
        calls: its host calls; the pieces are added to them.
        graph: the graph.

    Attributes:
        originals: the original of each copied op, by the name of the copy.
        order: the handle of the variable that keeps host calls in order.
    """

    def __init__(self, name: str, calls: HostCalls, graph: Any):
        self.name = name
        self.calls = calls
        self.originals: dict[str, tf.Operation] = {}
        self.shapes = Shapes()
        self.order: Value | None = None
        self._graph = graph
        self._python_calls: dict[str, int] = {}

    def copy(self, values: dict[int, Value]) -> tuple[list[tf.Tensor], dict[int, int]]:
        """Copies the graph into the one under construction.

        Args:
            values: the values of its inputs, by the id of the tensor.

        Returns:
            The results that the devices have; and for each other result, by its index, the number under which the host
            has it.

        Raises:
            LoweringError: the devices need a value that cannot leave the host.
        """
        pending = Pending(self.calls)
        frame = Frame(self, pending, self._graph, values)
        frame.run()
        stored: dict[int, int] = {}
        results = []
        for index, value in enumerate(map(frame.value, self._graph.outputs)):
            if value.stays_on_host:
                stored[index] = self.calls.new_number()
                pending.keep(value, stored[index])
            else:
                results.append(frame.on_devices(value))
        pending.flush()
        return results, stored

    def check_gradients(self, op: tf.Operation, in_loop: bool) -> None:
        """Checks that the gradient of a Python function finds the call that it is the gradient of.

        TensorFlow gives all calls of one op the same token. In a loop that is enough: gradients run in reverse, and the
        latest call is found first. If the user's program calls one function twice, its two calls have the same token,
        and their gradients cannot be told apart.

        Raises:
            LoweringError: a function has two calls, and a gradient.
        """
        if op.type != "EagerPyFunc" or in_loop:
            return
        function = host_kernels.PythonFunction(op)
        if function.forward_token is None:
            self._python_calls[function.token] = self._python_calls.get(function.token, 0) + 1
        elif self._python_calls.get(function.forward_token, 0) > 1:
            raise LoweringError(
                f"In `{self.name}`, a tf.function that contains a tf.py_function is called more than "
                f"once{at(user_line(op))}, and the gradients of the calls cannot be told apart. Call "
                "tf.py_function in the body itself, or run the function with xla.outside_compilation, which has "
                "gradients of every order."
            )


class Frame:
    """One graph of the body that is being copied.

    Args:
        rewriter: the copier of the whole body.
        pending: the host ops that wait in the graph of the copy.
        graph: the original.
        values: the values of its tensors, by id; the values of its ops' outputs are added.
    """

    def __init__(self, rewriter: Rewriter, pending: Pending, graph: Any, values: dict[int, Value]):
        self._rewriter = rewriter
        self._pending = pending
        self._graph = graph
        self._values = values
        self._copied: dict[str, tf.Operation] = {}
        self._sizes = host_op_kinds.computes_sizes(graph)

    def run(self) -> None:
        """Copies all ops that are needed."""
        for op in host_kernels.needed_ops(self._graph):
            # An input of the graph has its value already.
            if not (op.outputs and all(id(output) in self._values for output in op.outputs)):
                self._visit(op)

    def value(self, tensor: tf.Tensor) -> Value:
        """The counterpart, in the copy, of a tensor of the original graph."""
        return self._values[id(tensor)]

    def on_devices(self, value: Value) -> tf.Tensor:
        """The tensor in the copy for a value that can leave the host."""
        if value.tensor is None and value.is_constant:
            made = self._pending.constants
            if value not in made:
                made[value] = host_kernels.copy_op(value.maker, [], []).outputs[0]
            return made[value]
        if value.tensor is None:
            self._pending.flush()
        assert value.tensor is not None, "a host call returns what the devices use"
        return value.tensor

    def _visit(self, op: tf.Operation) -> None:
        # Copied where it is used: the host may need it, and XLA must see a constant where it asks for one.
        if op.type == "Const":
            self._values[id(op.outputs[0])] = Value(op.outputs[0].dtype, op.outputs[0].shape, maker=op)
            return
        inputs = [self.value(tensor) for tensor in op.inputs]
        functions = graph_walk.list_inner_graphs(op)
        if op.type in graph_walk.BRANCHES:
            _be_scalar(inputs[0])
        stuck = next((value for value in inputs if value.stays_on_host), None)
        if functions:
            if stuck is not None or host_op_kinds.contains_host_op(op):
                self._enter(op, functions, inputs, stuck)
            else:
                self._copy(op, inputs)
        elif host_op_kinds.is_numerics_summary(op) and stuck is None:
            self._values[id(op.outputs[0])] = Value.from_tensor(_what_is_not_finite(self.on_devices(inputs[0])))
        elif op.type in host_op_kinds.CHECKS and stuck is None and not self._pending.in_condition:
            self._check(op, inputs)
        elif host_op_kinds.is_for_host(op) or (stuck is None and self._is_shaped(op, inputs)):
            self._defer(op, inputs)
        elif stuck is None:
            self._copy(op, inputs)
        elif host_op_kinds.may_move(op) and host_kernels.has_host_kernel(op):
            self._defer(op, inputs)
        else:
            raise self._stays(op, stuck)

    def _is_shaped(self, op: tf.Operation, inputs: Sequence[Value]) -> bool:
        """Whether the host computes a shape that XLA must know when it compiles, and the op has or makes that shape."""
        if (
            not any(value.from_host for value in inputs)
            or not host_op_kinds.may_move(op)
            or op.type in host_op_kinds.KNOWN_TO_XLA
        ):
            return False
        if any(inputs[index].from_host for index in host_op_kinds.shape_inputs(op)):
            return True
        if _by_data(op, inputs):
            return False
        sizes = (value for value in inputs if value.from_host and value.dtype.is_integer and value.shape.rank in (0, 1))
        # Before shapes are inferred, which takes long: most ops neither compute a size nor get one.
        if op in self._sizes or next(sizes, None) is None:
            return op in self._sizes
        return not all(shape.is_fully_defined() for shape in self._rewriter.shapes.inferred(op, inputs))

    def _stays(self, op: tf.Operation, stuck: Value) -> LoweringError:
        by_dtype = xla_ops.is_host_only(stuck.dtype)
        described = stuck.dtype.name if by_dtype else str(stuck.shape)
        made_by = (stuck.maker.type, user_line(stuck.maker)) if stuck.maker is not None else ("", "")
        return LoweringError.stays_on_host(self._rewriter.name, op.type, user_line(op), described, by_dtype, *made_by)

    def _copy(self, op: tf.Operation, inputs: Sequence[Value]) -> None:
        if host_op_kinds.calls_host(op) or self._rewriter.order in inputs:
            self._pending.flush()  # the waiting calls come before the read of the next call's position
        tensors = [self.on_devices(value) for value in inputs]
        before = [self._copied[each.name] for each in op.control_inputs if each.name in self._copied]
        copied = self._copied[op.name] = host_kernels.copy_op(op, tensors, before)
        self._rewriter.originals[copied.name] = op
        outputs = [Value.from_tensor(new, op) for new in copied.outputs]
        for tensor, value in zip(op.outputs, outputs, strict=True):
            self._values[id(tensor)] = value
            value.inputs, value.outputs = inputs, outputs
            value.by_data = not value.shape.is_fully_defined() and (_by_data(op, inputs) or _has_inside(op))
            value.from_host = op.type not in host_op_kinds.KNOWN_TO_XLA and any(each.from_host for each in inputs)

    def _defer(self, op: tf.Operation, inputs: list[Value]) -> None:
        self._rewriter.check_gradients(op, self._pending.in_loop)
        outputs = self._add(self._pending, op, inputs)
        self._values.update((id(tensor), value) for tensor, value in zip(op.outputs, outputs, strict=True))

    def _add(self, pending: Pending, op: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
        """Adds an op to those that wait."""
        taken = [self._on_host(pending, op, value) for value in inputs]
        shapes = self._rewriter.shapes.infer_results(op, taken, self._values)
        pairs = zip(op.outputs, shapes, strict=True)
        outputs = [Value(tensor.dtype, shape, maker=op, from_host=True) for tensor, shape in pairs]
        pending.add(op, taken, outputs)
        return outputs

    def _on_host(self, pending: Pending, op: tf.Operation, value: Value) -> Value:
        """A value as a host op takes it.

        A shape that depends on data, as that of `tf.where(mask)`, does not leave the devices, nor does a list. So the
        host computes such a value once more, from what it is made of.

        Raises:
            LoweringError: the host cannot do that.
        """
        if value.tensor is None or not (value.by_data or value.dtype in (tf.variant, tf.resource)):
            return value
        maker = value.maker
        if value.dtype == tf.resource:
            raise LoweringError.unsupported_op(self._rewriter.name, op.type, user_line(op))
        if maker is None or not host_op_kinds.may_move(maker) or not host_kernels.has_host_kernel(maker):
            by_ids = maker is not None and any(each.op.type == "Unique" for each in maker.inputs)
            made = f"a result of {maker.type}{at(user_line(maker))}" if maker is not None else "a value of a loop"
            advice = f" {program_errors.ROWS_OF_UNIQUE}" if by_ids else ""
            raise LoweringError(
                f"In `{self._rewriter.name}`, {op.type}{at(user_line(op))} runs on the host and needs {made} whose "
                "shape depends on data, or which is a list of tensors. Such a result cannot leave the devices. Give it "
                f"a static shape: use a mask, or pad the values to a fixed size.{advice}"
            )
        # Once, however many host ops take it.
        if value not in pending.again:
            pending.again.update(zip(value.outputs, self._add(pending, maker, value.inputs), strict=True))
        return pending.again[value]

    def _check(self, op: tf.Operation, inputs: list[Value]) -> None:
        """Makes a check on the devices. If it fails, the op runs on the host, and raises its own error."""
        self._pending.flush()
        checked = self.on_devices(inputs[0])
        passes = checked if op.type == "Assert" else tf.reduce_all(tf.math.is_finite(checked))

        def fail() -> list[tf.Tensor]:
            pending = Pending(self._rewriter.calls, self._pending.in_loop)
            self._add(pending, op, inputs)
            pending.flush()
            return []

        tf.cond(passes, lambda: [], fail)
        for output in op.outputs:
            # CheckNumerics passes its input on.
            self._values[id(output)] = inputs[0]

    def _enter(self, op: tf.Operation, functions: list[Any], inputs: list[Value], stuck: Value | None) -> None:
        """Builds a branch, a loop or a call again."""
        if op.type.endswith("PartitionedCall"):
            # Inlined: what waits for the host before the call and inside it then goes in one host call.
            frame = self._inner(functions[0], inputs, self._pending)
            self._values.update(
                (id(outer), frame.value(inner)) for outer, inner in zip(op.outputs, functions[0].outputs, strict=True)
            )
            return
        if (work := host_op_kinds.string_work([op])) is not None:
            raise LoweringError(
                f"`{self._rewriter.name}` works with strings or a lookup table in a branch or a loop: "
                f"{work.type}{at(user_line(work))}. A compiled body can do that outside of them. Do it before or after "
                "tf.cond, tf.while_loop, or what AutoGraph makes of `if` and `for`, and choose with tf.where; or write "
                "xla.outside_compilation(fn, ...) inside, where fn does it and returns numbers."
            )
        if (stuck is not None or any(each.dtype == tf.string for each in op.outputs)) and host_op_kinds.runs_whole(op):
            self._defer(op, inputs)
            return
        self._pending.flush()
        (self._loop if op.type.endswith("While") else self._branches)(op, functions, inputs)
        for value in map(self.value, op.outputs):
            value.from_host = value.from_host or value not in inputs  # nothing more precise is known here
            value.by_data = value.tensor is not None and not value.shape.is_fully_defined()

    def _inner(self, graph: Any, inputs: Sequence[Value], pending: Pending) -> Frame:
        """Copies a function of an op."""
        values = {id(inside): value for inside, value in zip(graph.inputs, inputs, strict=True)}
        frame = Frame(self._rewriter, pending, graph, values)
        frame.run()
        return frame

    def _branches(self, op: tf.Operation, functions: list[Any], inputs: list[Value]) -> None:
        # A call for each branch: its ops must run only if the branch is taken.
        def branch(graph: Any) -> list[tf.Tensor]:
            pending = Pending(self._rewriter.calls, self._pending.in_loop)
            results = self._inner(graph, inputs[1:], pending)._results(range(len(graph.outputs)))
            pending.flush()
            return results

        branches = [functools.partial(branch, graph) for graph in functions]
        if inputs[0].stays_on_host:
            raise self._stays(op, inputs[0])
        chosen = self.on_devices(inputs[0])
        if op.type.endswith("Case"):
            results = tf.switch_case(chosen, branches)
        else:
            results = tf.cond(chosen if chosen.dtype == tf.bool else tf.not_equal(chosen, 0), *branches)
        for output, tensor in zip(op.outputs, results, strict=True):
            host_kernels.keep_shape(output, tensor)
            self._values[id(output)] = Value.from_tensor(tensor, op)

    def _loop(self, op: tf.Operation, functions: list[Any], inputs: list[Value]) -> None:
        condition, body = functions
        # What no iteration changes stays as it is outside the loop: a constant, or a handle. All ops on a variable must
        # use one tensor, or TensorFlow does not keep their order.
        constant = {index for index in range(len(inputs)) if graph_walk.is_passed_on(body, index)}
        numbers = {  # of the values that stay on the host, such as what tf.summary.audio has encoded in its loop
            index: self._rewriter.calls.new_number()
            for index, value in enumerate(inputs)
            if index not in constant and (value.stays_on_host or value.dtype == tf.string)
        }
        carried = [index for index in range(len(inputs)) if index not in constant and index not in numbers]
        for index, number in numbers.items():
            self._pending.keep(inputs[index], number)
        self._pending.flush()

        def values(tensors: Sequence[tf.Tensor]) -> list[Value]:
            found = list(inputs)
            for index, tensor in zip(carried, tensors, strict=True):
                host_kernels.keep_shape(body.inputs[index], tensor)
                found[index] = Value.from_tensor(tensor)
            for index, number in numbers.items():
                found[index] = Value(inputs[index].dtype, body.inputs[index].shape, source=Source("stored", number))
            return found

        def goes_on(*tensors: tf.Tensor) -> tf.Tensor:
            pending = Pending(self._rewriter.calls, in_loop=True, in_condition=True)
            frame = self._inner(condition, values(tensors), pending)
            _be_scalar(frame.value(condition.outputs[0]))
            (result,) = frame._results([0])
            pending.flush()
            return pending.hold(result)

        def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
            pending = Pending(self._rewriter.calls, in_loop=True)
            frame = self._inner(body, values(tensors), pending)
            results = frame._results(carried)
            for index, number in numbers.items():
                pending.keep(frame.value(body.outputs[index]), number)
            pending.flush()
            return results

        begin = [self.on_devices(inputs[index]) for index in carried]
        shapes = [_invariant(inputs[index], body, index) for index in carried]
        parallel = op.get_attr("parallel_iterations")
        results = tf.while_loop(goes_on, step, begin, shape_invariants=shapes, parallel_iterations=parallel)
        on_devices = dict(zip(carried, results, strict=True))
        for index, output in enumerate(op.outputs):
            if index in constant:
                self._values[id(output)] = inputs[index]
            elif index in numbers:
                source = Source("stored", numbers[index])
                self._values[id(output)] = Value(output.dtype, output.shape, None, source, op)
            else:
                host_kernels.keep_shape(output, on_devices[index])
                self._values[id(output)] = Value.from_tensor(on_devices[index], op)

    def _results(self, indices: Sequence[int]) -> list[tf.Tensor]:
        """Results of a branch or an iteration.

        Raises:
            LoweringError: one of them cannot leave the host.
        """
        results = []
        for value in (self.value(self._graph.outputs[index]) for index in indices):
            if value.stays_on_host:
                what = f"dtype {value.dtype.name}" if xla_ops.is_host_only(value.dtype) else f"shape {value.shape}"
                made = "" if value.maker is None else f", made by {value.maker.type}{at(user_line(value.maker))}"
                raise LoweringError(
                    f"In `{self._rewriter.name}`, a branch or a loop returns a value of {what}{made}, which cannot "
                    "leave the host. Declare a fixed shape, tf.ensure_shape(x, ...); or compute numbers of one shape "
                    "on the host with xla.outside_compilation(fn, ...) and xla.returns."
                )
            results.append(self.on_devices(value))
        return results


def _by_data(op: tf.Operation, inputs: Sequence[Value]) -> bool:
    """Whether the shape of a result on the devices may depend on data."""
    return op.type in host_op_kinds.SHAPED_BY_DATA or any(value.by_data for value in inputs)


def _has_inside(op: tf.Operation) -> bool:
    """Whether a branch or a loop has an op, at any depth, whose results have a shape that depends on data."""
    return any(
        each.type in host_op_kinds.SHAPED_BY_DATA for each in graph_walk.everywhere(*graph_walk.list_inner_graphs(op))
    )


def _what_is_not_finite(x: tf.Tensor) -> tf.Tensor:
    """What DebugNumericSummaryV2 computes: -inf, inf and nan, each only if an element of `x` is that, and 0 else.

    XLA has no kernel for the op. On the devices, the checked result need not leave them, whatever its shape is.
    """
    found = [x == -np.inf, x == np.inf, tf.math.is_nan(x)]
    return tf.where([tf.reduce_any(each) for each in found], tf.constant([-np.inf, np.inf, np.nan]), 0.0)


def _be_scalar(value: Value) -> None:
    """Notes that a value chooses a branch or ends a loop: it is a scalar, even if its shape is unknown."""
    if value.tensor is None and value.source is None and not value.is_constant:
        value.shape = tf.TensorShape([])


def _invariant(value: Value, body: Any, index: int) -> Any:
    """The shape that a value of a loop has in each iteration."""
    before, after = body.inputs[index].shape, body.outputs[index].shape
    return value.shape if before.is_fully_defined() or after == before else before
