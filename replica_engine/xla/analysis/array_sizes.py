"""The final sizes of arrays that grow, as far as they are known while a body is traced.

A `tf.TensorArray` with `dynamic_size=True` grows when it is written to. Its array in a compiled program cannot, so it
must have the final size from the beginning. The size is found by running what decides about it: the conditions of
branches and loops, and the indices of writes. If these depend on data, the size is unknown.

An array may have its final size from the beginning only if the body cannot see the difference. So whatever else looks
at the whole array (stack, concat, size, ...) must come after its last growth.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf.graphs import host_ops, subgraphs
from replica_engine.diagnostics.op_lines import user_line
from replica_engine.errors import LoweringError
from replica_engine.errors.base import at
from replica_engine.xla.analysis.known_values import Evaluation, GraphExecution, Rule, Value, on_host
from replica_engine.xla.growing_arrays import Final, Seen

_WRITE = "TensorListSetItem"
_RESERVE = "TensorListReserve"
_LENGTH = "TensorListLength"
_FEW_STEPS = 20_000  # about 200 iterations, a tenth of a second
_NEEDS_NO_SIZE = ("TensorListGetItem", "TensorListElementShape")


class _List(NamedTuple):
    """An array as it is at one moment.

    Attributes:
        maker: the op that made it.
        size: its size; None if it is unknown.
    """

    maker: tf.Operation
    size: int | None


def find(graph: Any, seen: Seen) -> Final:
    """Finds the final sizes of the arrays of a body that grow.

    Args:
        graph: the body.
        seen: its arrays and the writes that may let them grow.

    Raises:
        LoweringError: an element is written at the index `array.size()`, and the array grows.
    """
    search = _Search(seen)
    with on_host():
        search.visit(search.evaluation.of(graph))
    search.check_bounds()
    return search.result()


def check(graph: Any, seen: Seen) -> None:
    """Looks for writes beyond the size of an array that does not grow; XLA drops such a write without a word.

    Only what surely happens is found: indices, sizes and conditions that are known while the body is traced. Long loops
    are not followed to their end, since every model with a recurrent layer has such arrays.

    Args:
        graph: the body, without arrays that grow.
        seen: its arrays.

    Raises:
        LoweringError: there is such a write.
    """
    search = _Search(seen, _FEW_STEPS)
    with on_host():
        search.visit(search.evaluation.of(graph))
    search.check_bounds()


class _Search:
    def __init__(self, seen: Seen, steps: int | None = None):
        self._seen = seen
        self._growing = {id(op) for op in seen.writes}
        self._checks = {id(op) for op in seen.checks}
        rules: dict[str, Rule] = {
            _RESERVE: Rule(lambda op, inputs: [self._made(op, None if inputs[0] is None else int(inputs[0]))], (1,)),
            "TensorListFromTensor": Rule(lambda op, inputs: [self._made(op, _rows(op.inputs[0]))], ()),
            _LENGTH: Rule(self._length, (0,)),
            _WRITE: Rule(self._write, (0, 1)),
            # Lists that a gradient makes: they never grow.
            "EmptyTensorList": Rule(lambda op, inputs: [self._made(op, None)], ()),
            "ZerosLike": Rule(lambda op, inputs: [self._made(op, None)], (), of_lists=True),
            "AddN": Rule(lambda op, inputs: [self._made(op, None)], (), of_lists=True),
            "TensorListPushBack": Rule(lambda op, inputs: [inputs[0]], (0,)),
            "TensorListPopBack": Rule(lambda op, inputs: [inputs[0], None], (0,)),
        }
        self.evaluation = Evaluation(rules, _common) if steps is None else Evaluation(rules, _common, steps)
        self._beyond: list[tuple[tf.Operation, int, int]] = []  # writes, their index and the size of their array
        self._unsure = 0  # how many branches are entered of which it is unknown whether they are taken
        self._sizes: dict[int, set[int | None]] = {}  # by the id of the maker: after each write
        self._looks: dict[int, dict[tf.Operation, int | None]] = {}  # the same: when an op looks at all of the array
        self._writes: dict[int, set[int]] = {}  # by the id of a write that may grow: the makers of its arrays
        self._shapes: dict[int, list[tf.TensorShape]] = {}  # by the id of the maker: the shapes of written elements
        self._lost = False  # an unknown array was looked at or grew
        self._of_lists = functools.cache(self._list_ops)
        self._wanted = functools.cache(self._wanted_inputs)

    def visit(self, execution: GraphExecution) -> None:
        """Looks at all ops on arrays in an execution, and in the functions that it runs."""
        for op in self._of_lists(execution.graph):
            if op.type.endswith("While"):
                condition, body = subgraphs.functions_of(op)
                before = len(self._beyond)
                count, _ = execution.iterations(op, self._wanted(condition) | self._wanted(body), self.visit)
                if count is None:  # the last iteration stood for all, of which there may be none
                    del self._beyond[before:]
            elif subgraphs.runs_functions(op):
                is_call = op.type.endswith("PartitionedCall")
                taken = 0 if is_call else execution.branch_taken(op)
                self._unsure += taken is None
                for number in range(len(subgraphs.functions_of(op))):
                    if taken in (None, number):
                        self.visit(execution.inside(op, number))
                self._unsure -= taken is None
            elif self.evaluation.rule_of(op) is not None:
                execution.value(op.outputs[0])
                if op.type == _WRITE and id(op) not in self._growing and not self._unsure:
                    self._note_bounds(op, *[execution.value(each) for each in op.inputs[:2]])
            elif op.type not in _NEEDS_NO_SIZE:
                for tensor in op.inputs:
                    if tensor.dtype == tf.variant:
                        self._look(op, execution.value(tensor))

    def _note_bounds(self, op: tf.Operation, array: _List | None, index: Value) -> None:
        if array is not None and array.size is not None and index is not None and int(index) >= array.size:
            self._beyond.append((op, int(index), array.size))

    def check_bounds(self) -> None:
        """Raises an error if an element is written beyond the size of an array that does not grow."""
        for op, index, size in self._beyond:
            raise LoweringError(
                f"Index {index} is written{at(user_line(op))} in a tf.TensorArray of size {size}. A compiled "
                "program would drop the element without a word. Make the array large enough, tf.TensorArray(dtype, "
                f"size={index + 1}), or let it grow: dynamic_size=True."
            )

    def result(self) -> Final:
        """What was found."""
        if self.evaluation.has_given_up or self._lost:
            return Final({}, {}, frozenset())
        grown = frozenset().union(*self._writes.values())
        sizes = {
            number: (
                self._final_size(maker),
                functools.reduce(tf.TensorShape.most_specific_compatible_shape, self._shapes[id(maker)]),
            )
            for number, maker in enumerate(self._seen.made)
            if id(maker) in grown
        }
        known = {id(self._seen.made[number]): size for number, (size, _) in sizes.items() if size is not None}
        writes = (
            number for number, op in enumerate(self._seen.writes) if self._writes.get(id(op), set()) <= set(known)
        )
        return Final(sizes, self._stacked(known), frozenset(writes))

    def _final_size(self, maker: tf.Operation) -> int | None:
        """The final size of an array; None if it is unknown, or if something looks at the array before it has grown."""
        found = self._sizes[id(maker)]
        known = [each for each in found if each is not None]
        if len(known) < len(found):
            return None
        looks = self._looks.get(id(maker), {})
        early = [op for op in looks if looks[op] != max(known)]
        for op in early:
            self._check_length(op)
        return None if early else max(known)

    def _stacked(self, known: dict[int, int]) -> dict[int, int]:
        """How many elements are stacked, by the number of the op that stacks one of these arrays and no other."""
        found: dict[int, int] = {}
        for number, op in enumerate(self._seen.stacks):
            sizes = {known.get(maker) for maker, looks in self._looks.items() if op in looks}
            size = sizes.pop() if len(sizes) == 1 else None
            if size is not None:
                found[number] = size
        return found

    def _check_length(self, op: tf.Operation) -> None:
        """Raises an error if the size of an array that grows is the index of a write."""
        if op.type != _LENGTH:
            return
        pending = list(op.outputs)
        while pending:
            tensor = pending.pop()
            for user in tensor.consumers():
                if user.type == "Identity":
                    pending += user.outputs
                elif id(user) in self._growing:
                    raise LoweringError(
                        "A tf.TensorArray with dynamic_size=True is written at the index "
                        f"array.size(){at(user_line(user))}. An array of a compiled program has its final size "
                        "from the beginning. Count the elements in a variable of the loop: array = "
                        "array.write(count, x); count += 1."
                    )

    def _made(self, op: tf.Operation, size: int | None) -> _List:
        self._sizes.setdefault(id(op), set()).add(size)
        return _List(op, size)

    def _length(self, op: tf.Operation, inputs: list[Value]) -> list[Value]:
        self._look(op, inputs[0])
        if inputs[0] is None or inputs[0].size is None:
            return [None]
        return [tf.constant(inputs[0].size)]

    def _write(self, op: tf.Operation, inputs: list[Value]) -> list[Value]:
        array, index = inputs
        grows = id(op) in self._growing
        if array is None:
            self._lost = self._lost or grows
            return [None]
        if not grows:
            return [array]
        size = None if index is None or array.size is None else max(array.size, int(index) + 1)
        self._sizes[id(array.maker)].add(size)
        self._writes.setdefault(id(op), set()).add(id(array.maker))
        self._shapes.setdefault(id(array.maker), []).append(op.inputs[2].shape)
        return [_List(array.maker, size)]

    def _look(self, op: tf.Operation, array: _List | None) -> None:
        if id(op) in self._checks or (op.type == _LENGTH and _is_size_of_another(op)):
            return
        if array is None:
            self._lost = True
            return
        looks = self._looks.setdefault(id(array.maker), {})
        looks[op] = array.size if looks.get(op, array.size) == array.size else None

    def _list_ops(self, graph: Any) -> list[tf.Operation]:
        """The ops of a graph on arrays, and its branches, loops and calls with such ops in them."""
        return [op for op in host_ops.needed_ops(graph) if self._is_of_lists(op)]

    def _is_of_lists(self, op: tf.Operation) -> bool:
        if subgraphs.runs_functions(op):
            return any(self._of_lists(graph) for graph in subgraphs.functions_of(op))
        if op.type in ("Identity", "IdentityN", "Placeholder") or id(op) in self._checks:
            return False
        return any(each.dtype == tf.variant for each in (*op.inputs, *op.outputs))

    def _wanted_inputs(self, graph: Any) -> frozenset[int]:
        """Which inputs of a function decide about its arrays."""
        tensors: list[tf.Tensor] = []
        for op in self._of_lists(graph):
            functions = subgraphs.functions_of(op)
            if op.type.endswith("While"):
                condition, body = functions
                wanted = self.evaluation.carried(condition, body, self._wanted(condition) | self._wanted(body))
                tensors += [op.inputs[index] for index in wanted if index < len(op.inputs)]
            elif functions:
                first = 0 if op.type.endswith("PartitionedCall") else 1
                given = list(op.inputs)[first:]
                tensors += list(op.inputs)[:first]
                tensors += [given[index] for each in functions for index in self._wanted(each) if index < len(given)]
            elif op.outputs:
                tensors += self.evaluation.inputs(op.outputs[0])
        return frozenset().union(*(self.evaluation.inputs_behind(graph, tensor) for tensor in tensors))


def _rows(tensor: tf.Tensor) -> int | None:
    """How many rows a tensor has."""
    return tensor.shape[0] if tensor.shape.rank else None


def _is_size_of_another(op: tf.Operation) -> bool:
    """Whether a size serves only to make another array of that size, as a gradient does."""
    users = [user for output in op.outputs for user in output.consumers()]
    return all(user.type == _RESERVE for user in users)


def _common(values: list[Value]) -> Value:
    """What is known of an array that may be any of these."""
    makers = {id(each.maker) for each in values if isinstance(each, _List)}
    if len(makers) != 1 or not all(isinstance(each, _List) for each in values):
        return None
    sizes = {each.size for each in values}
    return _List(values[0].maker, sizes.pop() if len(sizes) == 1 else None)
