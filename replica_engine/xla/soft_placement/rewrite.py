"""A copy of a body's graph in which pieces on the host stand for the host ops.

The copy is made op by op, in the order of the program. An op is treated in one of four ways:

- XLA compiles it, and its inputs are on the devices: it is copied.
- It is a host op (`kinds.is_for_host`), or one of its inputs cannot leave the host: it waits to become part of a
  piece (`pending`).
- It only checks something: the devices make the check, and call the host if it fails.
- It is a branch, a loop or a call with host ops inside: it is built again around copies of its functions. Calls are
  inlined. A value that cannot leave the host enters and leaves branches and loops by the number it is stored under.

A body is rewritten for the shapes that it is lowered for, so a host op may have inputs of any batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf.graphs import host_ops, subgraphs, xla_ops
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.errors import LoweringError
from replica_engine.errors.base import at
from replica_engine.errors.programs import ROWS_OF_UNIQUE
from replica_engine.xla.host_calls.call import HostCalls
from replica_engine.xla.soft_placement import kinds, unknown_shapes
from replica_engine.xla.soft_placement.pending import Pending, Waiting
from replica_engine.xla.soft_placement.piece import Source
from replica_engine.xla.soft_placement.values import Value


class Rewriter:
    """Copies the graph of one body.

    Args:
        name: the name of the body.
        calls: its host calls; the pieces are added to them.
        moved: ops that XLA has a kernel for, but that must run on the host; more may be added to them.
        tries_all: whether to try all host ops whose results have no known shape (`unknown_shapes`).
    """

    def __init__(self, name: str, calls: HostCalls, moved: set[tf.Operation], tries_all: bool):
        self.name = name
        self.tries_all = tries_all
        self.calls = calls
        self.moved = moved
        self._python_inputs: dict[str, list[tf.TensorShape]] = {}  # of Python functions, by token
        self.originals: dict[str, tf.Operation] = {}  # the original of each copied op, by the name of the copy
        self.samples = unknown_shapes.Samples()
        self.order: Value | None = None  # the handle of the variable that keeps host calls in order
        self._python_calls: dict[str, int] = {}
        self._scratch = tf.Graph()

    def copy(self, graph: Any, values: dict[int, Value]) -> tuple[list[tf.Tensor], dict[int, int]]:
        """Copies a graph into the one under construction.

        Args:
            graph: the graph of the body.
            values: the values of its inputs, by the id of the tensor.

        Returns:
            The results that the devices have; and for each other result, by its index, the number under which the host
            has it.

        Raises:
            LoweringError: the devices need a value that cannot leave the host.
        """
        pending = Pending(self.calls, in_loop=False)
        frame = Frame(self, pending, graph, values)
        frame.run()
        stored: dict[int, int] = {}
        results = []
        for index, output in enumerate(graph.outputs):
            value = frame.value(output)
            if value.stays_on_host:
                stored[index] = self.calls.new_number()
                pending.add(_alias(output.op, value, stored[index]))
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
        function = host_ops.PythonFunction(op)
        if function.gradient_of is None:
            self._python_calls[function.token] = self._python_calls.get(function.token, 0) + 1
        elif self._python_calls.get(function.gradient_of, 0) > 1:
            raise LoweringError(
                f"In `{self.name}`, a tf.function that contains a tf.py_function is called more than "
                f"once{at(user_line(op))}, and the gradients of the calls cannot be told apart. Call "
                "tf.py_function in the body itself, or run the function with xla.outside_compilation, which has "
                "gradients of every order."
            )

    def outputs(self, op: tf.Operation, inputs: list[Value]) -> list[Value]:
        """The outputs of a host op, for these inputs."""
        outputs = []
        for index, (tensor, shape) in enumerate(zip(op.outputs, self._shapes(op, inputs), strict=True)):
            value = Value(tensor.dtype, shape)
            value.made_of(op, inputs, index)
            value.from_host = True
            value.made_by = (op.type, user_line(op))
            value.tried_with = _tried_with(inputs)
            if unknown_shapes.is_worth_trying(op, inputs, value, self.tries_all):
                value.shape = self.samples.shape(value)
                value.tried_with = "made-up values"
            outputs.append(value)
        return outputs

    def _shapes(self, op: tf.Operation, inputs: Sequence[Value]) -> list[tf.TensorShape]:
        if host_ops.PythonFunction.is_of(op):
            return unknown_shapes.of_python_function(op, inputs, self._python_inputs)
        with self._scratch.as_default():
            stand_ins = [
                tf.constant(tf.make_ndarray(value.constant.get_attr("value")), value.dtype)
                if value.constant is not None
                else tf.compat.v1.placeholder(value.dtype, value.shape)
                for value in inputs
            ]
            return [output.shape for output in host_ops.copy_op(op, stand_ins, []).outputs]


class MoveToHost(Exception):
    """The host needs a result of a device op whose shape depends on data: start over with that op on the host."""

    def __init__(self, op: tf.Operation):
        super().__init__(op.name)
        self.op = op


class StaysOnHost(Exception):
    """A result of a branch, or of an iteration, stays on the host: build the op again with that knowledge."""

    def __init__(self, index: int):
        super().__init__(index)
        self.index = index


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

    def run(self) -> None:
        """Copies all ops that are needed."""
        for op in host_ops.needed_ops(self._graph):
            if not (op.outputs and all(id(output) in self._values for output in op.outputs)):
                self._visit(op)

    def value(self, tensor: tf.Tensor) -> Value:
        """The counterpart, in the copy, of a tensor of the original graph."""
        return self._values[id(tensor)]

    def on_devices(self, value: Value) -> tf.Tensor:
        """The tensor in the copy for a value that can leave the host."""
        if value.pending:
            self._pending.flush()
        if value.tensor is None and value.constant is not None:
            made = self._pending.constants
            if value not in made:
                made[value] = host_ops.copy_op(value.constant, [], []).outputs[0]
            return made[value]
        return value.tensor if value.tensor is not None else self._pending.fetch(value)

    def _visit(self, op: tf.Operation) -> None:
        if op.type == "Const":
            self._values[id(op.outputs[0])] = Value(op.outputs[0].dtype, op.outputs[0].shape, constant=op)
            return
        inputs = [self.value(tensor) for tensor in op.inputs]
        stuck = next((value for value in inputs if value.stays_on_host), None)
        functions = subgraphs.functions_of(op)
        if functions:
            if stuck is not None or kinds.contains_host_op(op):
                self._enter(op, functions, inputs)
            else:
                self._copy(op, inputs)
        elif kinds.is_numerics_summary(op) and stuck is None:
            self._values[id(op.outputs[0])] = Value.of(_what_is_not_finite(self.on_devices(inputs[0])))
        elif op.type in kinds.CHECKS and stuck is None and not self._pending.in_condition:
            self._check(op, inputs)
        elif (
            kinds.is_for_host(op)
            or op in self._rewriter.moved
            or (stuck is None and any(inputs[index].from_host for index in kinds.shape_inputs(op)))
        ):
            self._defer(op, inputs)
        elif stuck is None:
            self._copy(op, inputs)
        elif kinds.may_move(op) and host_ops.has_host_kernel(op):
            self._defer(op, inputs)
        else:
            by_dtype = xla_ops.is_host_only(stuck.dtype)
            described = stuck.dtype.name if by_dtype else str(stuck.shape)
            name = self._rewriter.name
            raise LoweringError.stays_on_host(name, op.type, user_line(op), described, by_dtype, *stuck.made_by)

    def _copy(self, op: tf.Operation, inputs: Sequence[Value]) -> None:
        if kinds.calls_host(op) or self._rewriter.order in inputs:
            self._pending.flush()  # the waiting calls come before the read of the next call's position
        tensors = [self.on_devices(value) for value in inputs]
        before = [self._copied[each.name] for each in op.control_inputs if each.name in self._copied]
        copied = self._copied[op.name] = host_ops.copy_op(op, tensors, before)
        self._rewriter.originals[copied.name] = op
        by_data = op.type in kinds.SHAPED_BY_DATA or any(value.depends_on_data for value in inputs)
        for index, (old, new) in enumerate(zip(op.outputs, copied.outputs, strict=True)):
            value = self._values[id(old)] = Value.of(new)
            value.made_of(op, list(inputs), index)
            value.tried_with = _tried_with(inputs)
            value.depends_on_data = by_data and not new.shape.is_fully_defined()
            value.from_host = op.type not in kinds.KNOWN_TO_XLA and any(each.from_host for each in inputs)

    def _defer(self, op: tf.Operation, inputs: list[Value]) -> None:
        self._rewriter.check_gradients(op, self._pending.in_loop)
        for tensor, value in zip(op.inputs, inputs, strict=True):
            self._check_operand(op, tensor, value)
        outputs = self._rewriter.outputs(op, inputs)
        self._values.update((id(tensor), value) for tensor, value in zip(op.outputs, outputs, strict=True))
        self._pending.add(Waiting(op, inputs, outputs))

    def _check_operand(self, op: tf.Operation, tensor: tf.Tensor, value: Value) -> None:
        """Raises an error, or MoveToHost, if a host op cannot have an input."""
        if value.tensor is None:
            return
        if value.dtype == tf.resource:
            raise LoweringError.unsupported_op(self._rewriter.name, op.type, user_line(op))
        if value.dtype == tf.variant or value.depends_on_data:
            maker = value.maker[0] if value.maker is not None else tensor.op
            if maker.type == "Placeholder" or maker in self._rewriter.moved or not kinds.may_move(maker):
                by_ids = any(each.op.type == "Unique" for each in maker.inputs)
                raise LoweringError(
                    f"In `{self._rewriter.name}`, {op.type}{at(user_line(op))} runs on the host and needs a result "
                    f"of {maker.type}{at(user_line(maker))} whose shape depends on data, or which is a list of "
                    "tensors. Such a result cannot leave the devices. Give it a static shape: use a mask, or pad "
                    f"the values to a fixed size.{' ' + ROWS_OF_UNIQUE if by_ids else ''}"
                )
            raise MoveToHost(maker)

    def _check(self, op: tf.Operation, inputs: list[Value]) -> None:
        """Makes a check on the devices. If it fails, the op runs on the host, and raises its own error."""
        self._pending.flush()
        checked = self.on_devices(inputs[0])
        passes = checked if op.type == "Assert" else tf.reduce_all(tf.math.is_finite(checked))

        def fail() -> list[tf.Tensor]:
            pending = Pending(self._rewriter.calls, self._pending.in_loop)
            pending.add(Waiting(op, inputs, [Value(output.dtype, output.shape) for output in op.outputs]))
            pending.flush()
            return []

        for tensor, value in zip(op.inputs, inputs, strict=True):
            self._check_operand(op, tensor, value)
        tf.cond(passes, lambda: [], fail)
        for output in op.outputs:
            self._values[id(output)] = inputs[0]

    def _enter(self, op: tf.Operation, functions: list[Any], inputs: list[Value]) -> None:
        """Builds a branch, a loop or a call again."""
        if op.type.endswith("PartitionedCall"):
            frame = self._inner(functions[0], inputs, self._pending)
            self._values.update(
                (id(outer), frame.value(inner)) for outer, inner in zip(op.outputs, functions[0].outputs, strict=True)
            )
            return
        self._pending.flush()
        build = self._loop if op.type.endswith("While") else self._branches
        on_host = {index for index, output in enumerate(op.outputs) if output.dtype == tf.string}
        while True:
            try:
                build(op, functions, inputs, on_host)
            except StaysOnHost as found:  # a call that the failed attempt emitted stays, and does no harm
                on_host.add(found.index)
            else:
                for value in map(self.value, op.outputs):
                    value.from_host = value.from_host or value not in inputs  # nothing more precise is known here
                return

    def _inner(self, graph: Any, inputs: Sequence[Value], pending: Pending) -> Frame:
        """Copies a function of an op."""
        values = {id(inside): value for inside, value in zip(graph.inputs, inputs, strict=True)}
        frame = Frame(self._rewriter, pending, graph, values)
        frame.run()
        return frame

    def _branches(self, op: tf.Operation, functions: list[Any], inputs: list[Value], on_host: set[int]) -> None:
        numbers = {index: self._rewriter.calls.new_number() for index in on_host}
        shapes: dict[int, tf.TensorShape] = {}

        def branch(graph: Any) -> Callable[[], list[tf.Tensor]]:
            def build() -> list[tf.Tensor]:
                pending = Pending(self._rewriter.calls, self._pending.in_loop)
                frame = self._inner(graph, inputs[1:], pending)
                for index, number in numbers.items():
                    value = frame.value(graph.outputs[index])
                    before = shapes.setdefault(index, value.shape)
                    shapes[index] = before.most_specific_compatible_shape(value.shape)
                    pending.add(_alias(graph.outputs[index].op, value, number))
                results = frame._results_but(on_host)
                pending.flush()
                return results

            return build

        branches = [branch(graph) for graph in functions]
        chosen = self.on_devices(_scalar(inputs[0]))
        if op.type.endswith("Case"):
            results = tf.switch_case(chosen, branches)
        else:
            results = tf.cond(chosen if chosen.dtype == tf.bool else tf.not_equal(chosen, 0), *branches)
        self._take(op, results, {index: (number, shapes[index]) for index, number in numbers.items()})

    def _loop(self, op: tf.Operation, functions: list[Any], inputs: list[Value], on_host: set[int]) -> None:
        condition, body = functions
        constant = {index for index in range(len(inputs)) if _is_passed_on(body, index)}
        on_host |= {index for index, value in enumerate(inputs) if value.stays_on_host}
        on_host -= constant
        carried = [index for index in range(len(inputs)) if index not in constant | on_host]
        numbers = {index: self._rewriter.calls.new_number() for index in sorted(on_host)}
        for index, number in numbers.items():
            self._pending.add(_alias(op, inputs[index], number))
        self._pending.flush(together=True)

        def values(tensors: Sequence[tf.Tensor]) -> list[Value]:
            found = list(inputs)
            for index, tensor in zip(carried, tensors, strict=True):
                host_ops.keep_shape(body.inputs[index], tensor)
                found[index] = Value.of(tensor)
            for index, number in numbers.items():
                found[index] = Value(inputs[index].dtype, body.inputs[index].shape, source=Source("stored", number))
                found[index].made_by = inputs[index].made_by
            return found

        def goes_on(*tensors: tf.Tensor) -> tf.Tensor:
            pending = Pending(self._rewriter.calls, in_loop=True, in_condition=True)
            frame = self._inner(condition, values(tensors), pending)
            result = frame.on_devices(_scalar(frame.value(condition.outputs[0])))
            pending.flush()
            return pending.hold(result)

        def step(*tensors: tf.Tensor) -> list[tf.Tensor]:
            pending = Pending(self._rewriter.calls, in_loop=True)
            frame = self._inner(body, values(tensors), pending)
            results = frame._results_but(constant | on_host)
            pending.flush()
            for index, number in numbers.items():
                pending.add(_alias(body.outputs[index].op, frame.value(body.outputs[index]), number))
            pending.flush(together=True)  # as one piece, since values may have swapped places
            return results

        begin = [self.on_devices(inputs[index]) for index in carried]
        parallel = op.get_attr("parallel_iterations")
        shapes = [_invariant(inputs[index], body, index) for index in carried]
        try:
            results = tf.while_loop(goes_on, step, begin, shape_invariants=shapes, parallel_iterations=parallel)
        except ValueError as error:
            if "shape_invariants" not in str(error):
                raise
            shapes = [body.inputs[index].shape for index in carried]  # a value's shape changes from step to step
            results = tf.while_loop(goes_on, step, begin, shape_invariants=shapes, parallel_iterations=parallel)
        for index in constant:
            self._values[id(op.outputs[index])] = inputs[index]
        on_devices = dict(zip(carried, results, strict=True))
        for index, output in enumerate(op.outputs):
            if index in on_devices:
                host_ops.keep_shape(output, on_devices[index])
                self._values[id(output)] = Value.of(on_devices[index])
            elif index in numbers:
                self._values[id(output)] = Value(output.dtype, output.shape, source=Source("stored", numbers[index]))

    def _results_but(self, on_host: set[int]) -> list[tf.Tensor]:
        """The results of a branch or an iteration that the devices have.

        Raises:
            StaysOnHost: a result that should be on the devices cannot leave the host.
        """
        results = []
        for index, output in enumerate(self._graph.outputs):
            if index not in on_host:
                if self.value(output).stays_on_host:
                    raise StaysOnHost(index)
                results.append(self.on_devices(self.value(output)))
        return results

    def _take(
        self, op: tf.Operation, results: Sequence[tf.Tensor], stored: dict[int, tuple[int, tf.TensorShape]]
    ) -> None:
        """Takes over the results of a branch that was built again."""
        on_devices = iter(results)
        for index, output in enumerate(op.outputs):
            if index in stored:
                number, shape = stored[index]
                self._values[id(output)] = Value(output.dtype, shape, source=Source("stored", number))
                self._values[id(output)].made_by = (op.type, user_line(op))
            else:
                tensor = next(on_devices)
                host_ops.keep_shape(output, tensor)
                self._values[id(output)] = Value.of(tensor)


def _tried_with(inputs: Sequence[Value]) -> str:
    """What the shape of an op's result was found with, if the shapes of its inputs were."""
    return next((value.tried_with for value in inputs if value.tried_with), "")


def _what_is_not_finite(x: tf.Tensor) -> tf.Tensor:
    """What DebugNumericSummaryV2 computes: -inf, inf and nan, each only if an element of `x` is that, and 0 else.

    XLA has no kernel for the op. On the devices, the checked result need not leave them, whatever its shape is.
    """
    found = [x == -np.inf, x == np.inf, tf.math.is_nan(x)]
    return tf.where([tf.reduce_any(each) for each in found], tf.constant([-np.inf, np.inf, np.nan]), 0.0)


def _alias(op: tf.Operation, value: Value, number: int) -> Waiting:
    """A waiting op that stores a value under another number as well."""
    return Waiting(op, [value], [Value(value.dtype, value.shape)], alias=number)


def _scalar(value: Value) -> Value:
    """A value that chooses a branch or ends a loop: always a scalar, even if its shape is unknown."""
    if value.tensor is None and value.constant is None:
        value.shape = tf.TensorShape([])
    return value


def _is_passed_on(body: Any, index: int) -> bool:
    """Whether an iteration leaves a value of a loop unchanged."""
    output = body.outputs[index]
    while output.op.type == "Identity":
        output = output.op.inputs[0]
    return output is body.inputs[index]


def _invariant(value: Value, body: Any, index: int) -> Any:
    """The shape that a value of a loop has in each iteration."""
    before, after = body.inputs[index].shape, body.outputs[index].shape
    return value.shape if before.is_fully_defined() or after == before else before
