"""A replica body as a graph, the results of a launch as tensors, and how often each stage ran."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.diagnostics import flight_record, user_frames
from replica_engine.errors import CaptureError, HostAccessError, LoweringError, program_errors
from replica_engine.errors.base import at
from replica_engine.pjrt.device_group import Array, DeviceGroup
from replica_engine.process import shutdown
from replica_engine.upstream import distribute, eager
from replica_engine.upstream.graphs import xla_ops
from replica_engine.values.regroup import regroup
from replica_engine.xla import function_spec
from replica_engine.xla.arguments import Arguments, Outputs
from replica_engine.xla.body import Body
from replica_engine.xla.collectives import SharedSums
from replica_engine.xla.host_calls.host_call import HostCalls
from replica_engine.xla.soft_placement import graph_copy, host_op_kinds, host_piece
from replica_engine.xla.stages.collective_meetings import UnmetCollective
from replica_engine.xla.state.device_value import find_device_value

Shape = tuple[int, ...]
Column = Sequence[Any] | Callable[[], list[tf.Tensor]]
"""One result: the values of the replicas, or a function that makes a tensor of each."""

_MOST_BYTES = 1 << 14  # of a view
_VIEWED = frozenset(map(np.dtype, "?bBhHiIqQefdFD"))  # dtypes that DLPack and TensorFlow know
_counts_lock = threading.Lock()


def column(shape: tuple[int, ...], dtype: np.dtype) -> Callable[[Array], Column]:
    """How to make a column of an array with this shape and dtype on CPU devices.

    There a result stays where the program left it until somebody looks at it, since making a tensor takes about as long
    as a small program. Then small values become views of the device's memory, which no later program writes: only
    values of variables are donated. Large values are copied, as jaxlib may free the memory of a view late.

    On other devices the program may still run: who looks at a result waits for it, and gets the error if the program
    has failed (`Awaited`). Large results are fetched at once (`Compiled`).
    """
    is_viewed = dtype in _VIEWED and 0 < np.prod(shape, dtype=int) * dtype.itemsize <= _MOST_BYTES
    make, parts = (eager.tensor_from_capsule, DeviceGroup.views) if is_viewed else (_as_tensor, DeviceGroup.shards)
    return functools.partial(functools.partial, _tensors, make, parts)


def list_column_tensors(column: Column) -> list[tf.Tensor]:
    """The tensors of a column, one for each replica."""
    return column() if callable(column) else list(map(_as_tensor, column))


def _tensors(make: Callable[[Any], tf.Tensor], parts: Callable[[Array], list[Any]], array: Array) -> list[tf.Tensor]:
    with shutdown.running():  # who looks at a result late may be a daemon thread
        return list(map(make, parts(array)))


def _as_tensor(value: Any) -> tf.Tensor:
    return eager.tensor(value) if isinstance(value, np.ndarray) and value.dtype != object else tf.constant(value)


@dataclasses.dataclass(frozen=True)
class Counts:
    """How often this process has traced, lowered, compiled and launched, as `counts` returns it.

    Attributes:
        traces: how many times a Python function became a graph; twice for a function that creates variables.
        lowerings: how many times a graph became a program.
        compiles: how many times a program became an executable.
        launches: how many times an executable ran.
        cache_hits: how many executables were read from the cache folder (`set_cache_dir`) instead of compiled.
    """

    traces: int = 0
    lowerings: int = 0
    compiles: int = 0
    launches: int = 0
    cache_hits: int = 0

    def __sub__(self, other: Counts) -> Counts:
        """The counts between two moments."""
        return Counts(*(a - b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


_now = {field.name: 0 for field in dataclasses.fields(Counts)}


def counts() -> Counts:
    """Returns how often this process has traced, lowered, compiled and launched so far.

    Example:
        >>> from replica_engine import xla
        >>> before = xla.counts()
        >>> program = xla.lower(lambda x: x + 1, [[1.0], [2.0]])
        >>> xla.counts() - before
        Counts(traces=1, lowerings=1, compiles=0, launches=0, cache_hits=0)
    """
    with _counts_lock:
        return Counts(**_now)


def count(what: str) -> None:
    """Adds one to the count with this name."""
    with _counts_lock:
        _now[what] += 1


_numbers = itertools.count()
_logger = logging.getLogger("replica_engine")


class BodyGraph:
    """A replica body as a graph: its parameters, what it captures, and which ops run on the host.

    Attributes:
        name: the function's name.
        where: the file and the line of the function: "train.py:40"; "" if it has none. A body of the library has
            `_replica_engine_where`: the line of the user that it works for.
        compared: the function as workers compare it, beside the program: its `_replica_engine_compared`, or `where`.
        is_users: whether it is the user's function, and not a body of the library.
        stacked: the attribute of the function with this name; 0 if it has none.
        result_axes: the attribute of the function with this name; None if it has none.
        reads_late: the attribute of the function with this name: whether a result is never a tensor, but a value of
            each replica, of one replica too, which is read later; False if it has none.
        constants: what in its arguments is not a tensor, as pairs of path and words: the number, or the type.
        graph: the function graph. Its inputs are the slots of the arguments, captured tensors, and captured
            variables, in this order.
        body: the replicas it was traced for.
        key: the key of the arguments that it serves.
        slots: specs of the tensors among the arguments; dimensions may be unknown.
        tensors: captured tensors, eager or of an outer graph.
        captured: the indices of the captured tensors that are parameters of the program; the rest are compiled in.
        handles: handles of captured variables.
        outputs: specs of the tensors among the results.
        rebuild: builds the structure that the function returned, from other tensors.
        is_plain: whether anything may stand in their places; see `Outputs`.
        host_calls: its calls to the host.
        collectives: its cross-replica operations.
        added: by the id of a variable's handle, the user's line in which the replicas add to it.
        sums: what it adds up.
        apart: those of them that perhaps not all replicas reach.
        diverges: where a replica of several devices may take another branch than others, or as many iterations; "" if
            nowhere.
        moves: whether soft placement moves ops of it to the host.
        host_slots: the indices of the arguments that stay on the host; they are not parameters of the program.
        sparse_slots: the indices of components of sparse tensors whose values only host ops need.
        late: the variables that the function created when it was traced for the first time.
    """

    def __init__(
        self,
        source: function_spec.FunctionSpec,
        graph: Any,
        body: Body,
        arguments: Arguments,
        outputs: Outputs,
        host_calls: HostCalls,
        collectives: list[flight_record.CollectiveCall],
        added: dict[int, str],
        sums: SharedSums,
    ):
        name = self.name = source.name
        self.graph = graph
        self.body = body
        self.key = arguments.key
        self._slots = list(graph.inputs[: len(arguments.slots)])
        self.slots = [tf.TensorSpec(inside.shape, inside.dtype) for inside in self._slots]
        self.slot_names = [slot.name for slot in arguments.slots]
        self.is_sparse = [slot.is_sparse for slot in arguments.slots]
        self.outputs = [tf.TensorSpec(output.shape, output.dtype) for output in graph.outputs]
        self.rebuild = outputs.rebuild
        self.is_plain = outputs.is_plain
        self.host_calls = host_calls
        self.collectives = collectives
        self.added = added
        self.sums = sums
        self.apart: list[UnmetCollective] = []
        self.diverges = ""
        # Not the function, nor what it closes over: a trace does not keep alive what it uses.
        fn = source.fn
        self.where: str = getattr(fn, "_replica_engine_where", "") or user_frames.function_place(fn)
        self.compared: str = getattr(fn, "_replica_engine_compared", self.where)
        self.is_users = not hasattr(fn, "_replica_engine_where")
        self.stacked: int = getattr(fn, "stacked", 0)
        self.result_axes: Any = getattr(fn, "result_axes", None)
        self.reads_late: bool = getattr(fn, "reads_late", False)
        self.constants = [
            (path, repr(value) if type(value) in (bool, int, float) else type(value).__qualname__)
            for path, value in arguments.constants
        ]
        self.late: list[weakref.ref] = []
        self.writer = arguments.summary_writer
        # Without soft placement nothing stays on the host.
        slots = list(zip(arguments.slots, self._slots, strict=True)) if body.moves_ops else []
        self.sparse_slots = frozenset(
            index
            for index, (slot, inside) in enumerate(slots)
            if slot.is_sparse and host_op_kinds.is_left_on_host(inside)
        )
        strings = [index for index, (slot, _) in enumerate(slots) if xla_ops.is_host_only(slot.dtype)]
        self.host_slots = self.sparse_slots.union(strings)
        self.moves = body.moves_ops and (bool(self.host_slots) or host_op_kinds.needs_host(graph))
        if self.moves:
            host_calls.can_fail = True
            # Now, although the calls are made later: captures and `donates` must be known before the body is lowered.
            graph.capture(host_calls.order)
        captures = list(graph.captures)
        self._on_host = [each for each in captures if self.moves and _stays_on_host(*each)]
        # By identity, since `in` would compare tensors element by element.
        captures = [each for each in captures if not any(each is other for other in self._on_host)]
        data = [(outside, inside) for outside, inside in captures if inside.dtype != tf.resource]
        handles = [(outside, inside) for outside, inside in captures if inside.dtype == tf.resource]
        for outside, inside in captures:
            self._check_capture(outside, inside)
        # A host function that uses a variable of the program would wait for the program, which waits for it.
        for handle, where in host_calls.handles:
            if any(handle is outside for outside, _ in handles):
                raise HostAccessError.variable(str(xla_ops.variable_name(handle)), where)
        for index, output in enumerate(self.outputs):
            if xla_ops.is_host_only(output.dtype) and not self.moves:
                op, where = _made_by(graph.outputs[index])
                raise LoweringError(
                    f"Result {index} of `{name}`, made by {op}{at(where)}, is a string or another value that no device "
                    "can hold. Return numbers, and convert them after the run. MirroredStrategy runs the function "
                    "without changes."
                )
        self.tensors = [outside for outside, _ in data]
        self.handles = [outside for outside, _ in handles]
        self.captured = list(range(len(self.tensors)))
        self._tensors = [inside for _, inside in data]
        self._variables = [inside for _, inside in handles]
        self._registered: Any = None
        self._told = False
        self._lock = threading.Lock()

    @property
    def donates(self) -> bool:
        """Whether a launch may overwrite the old values of variables; see `BodyProgram.donates`."""
        return not self.host_calls.can_fail and self.body.limits.timeout is None

    @property
    def meetings(self) -> list[str]:
        """Its cross-replica operations as text, with their lines, those first that perhaps not all replicas reach."""
        suspects = dict.fromkeys(f"{each.name}{at(each.where)}" for each in self.apart)
        times = collections.Counter(f"{each.kind}{at(each.where)}" for each in self.collectives)
        rows = [f"{suspect} (perhaps not all replicas reach it)" for suspect in suspects]
        return rows + [
            each if count == 1 else f"{each}, {count} times" for each, count in times.items() if each not in suspects
        ]

    def forget(self) -> None:
        """Called when something that the function uses has died: TensorFlow forgets the variables that it created."""
        xla_ops.leave_collections(self.graph, [variable for ref in self.late if (variable := ref()) is not None])

    def replicas_results(self, columns: Sequence[Column]) -> list[Any]:
        """What each replica returned. `columns` has, for each result, the values of the replicas."""
        tensors = list(map(list_column_tensors, columns))
        size = len(tensors[0]) if tensors else self.body.own
        return [self.rebuild([column[replica] for column in tensors]) for replica in range(size)]

    def grouped_results(self, columns: Sequence[Column]) -> Any:
        """What the replicas returned, regrouped; see `replicas_results`."""
        if not columns or not self.is_plain:
            return regroup(self.replicas_results(columns), what="The results of the replicas")
        if self.body.own == 1 and not self.reads_late:
            return self.rebuild([tensor for (tensor,) in map(list_column_tensors, columns)])
        return self.rebuild(list(map(_distributed, columns)))

    def registered(self) -> Any:
        """The graph as a function that TensorFlow can find by name."""
        if self._registered is None:
            # The order in which the program has its parameters.
            self.graph.inputs[:] = [*self._slots, *(self._tensors[index] for index in self.captured), *self._variables]
            with tf.init_scope():
                self._registered = xla_ops.register(f"replica_body_{self.name}_{next(_numbers)}", self.graph)
        return self._registered

    def moved(self, slots: Sequence[tf.TensorSpec], tensors: Sequence[tf.TensorSpec]) -> graph_copy.MovedBody:
        """The graph with its host ops moved into host calls, for slots and captured tensors of these specs."""
        parameters = [(self._slots[index], spec) for index, spec in enumerate(slots) if index not in self.host_slots]
        parameters += [(self._tensors[index], tensors[index]) for index in self.captured]
        on_host = []
        for index in sorted(self.host_slots):
            shape = with_any_size(slots[index].shape) if index in self.sparse_slots else slots[index].shape
            on_host.append((self._slots[index], shape, host_piece.Source("argument", index)))
        on_host += [(inside, inside.shape, self._source(outside, inside)) for outside, inside in self._on_host]
        handles = list(zip(self._variables, self.handles, strict=True))
        inputs = graph_copy.Inputs(parameters, handles, on_host)
        moved = graph_copy.move(self.name, self.graph, self.host_calls, inputs)
        if moved.pieces and not self._told:  # once, for however many shapes it is lowered
            self._told = True
            _logger.info(program_errors.moved_to_host(self.name, [piece.say() for piece in moved.pieces]))
        return moved

    def check_shape(self, index: int, name: str, spec: tf.TensorSpec) -> None:
        """Raises LoweringError for a parameter, a slot or a captured tensor, whose shape is not known."""
        if index in self.host_slots or spec.shape.is_fully_defined():
            return
        if index < len(self.slots) and self.is_sparse[index]:
            raise LoweringError(
                f"{name.partition(' (component')[0]} of `{self.name}` is a sparse tensor, and the devices need "
                f"it{at(_used_at(self._slots[index]))}. Each batch may have another number of values in it, but XLA "
                "compiles for fixed shapes. Make it dense: tf.sparse.to_dense(x). In place of "
                "tf.nn.embedding_lookup_sparse, pad the ids of each row to one length, and write "
                "tf.reduce_sum(tf.gather(table, ids) * mask[..., None], axis=1). MirroredStrategy runs the function "
                "without changes."
            )
        raise LoweringError(
            f"{name} of `{self.name}` has the shape {spec.shape}, but XLA compiles for fixed shapes. "
            "Give it a fixed shape: dataset.batch(n, drop_remainder=True), tf.ensure_shape(x, ...), or pad it."
        )

    def leave_no_sparse_on_host(self) -> bool:
        """Makes sparse arguments parameters: the devices need them. Returns whether any were to stay on the host."""
        found = bool(self.sparse_slots)
        self.host_slots -= self.sparse_slots
        self.sparse_slots = frozenset()
        return found

    def _source(self, outside: Any, inside: tf.Tensor) -> host_piece.Source:
        if self.writer is not None and outside is self.writer:
            return host_piece.Source("writer", None)
        # The body writes it, so each replica needs a copy; see `HostVariables`.
        if inside.dtype == tf.resource and find_device_value(outside) is not None and eager.may_write(inside, set()):
            return host_piece.Source("variable", outside)
        return host_piece.Source("fixed", outside)

    def bake_in(self) -> bool:
        """Compiles small captured tensors in, since shapes and axes must be constants. Returns whether it found any."""
        kept = [index for index in self.captured if self._tensors[index].op.type != "Const"]
        baked = len(kept) < len(self.captured)
        self.captured, self._registered = kept, None
        return baked

    def _check_capture(self, outside: Any, inside: Any) -> None:
        if inside.dtype == tf.resource:
            described = xla_ops.variable_dtype_and_shape(outside)
            if described is None:
                kind = re.search(r'type="([^"]+)"', str(outside))  # part of the repr of a resource handle
                raise CaptureError(
                    f"`{self.name}` uses a resource that is not a variable{at(_used_at(inside))}: "
                    f"{kind[1] if kind else outside}. Lookup tables, dataset iterators and similar resources live on "
                    "the host. Use them on the host, in a function for xla.outside_compilation, or before the run."
                )
            if xla_ops.is_host_only(described[0]):
                name = xla_ops.variable_name(outside)
                raise CaptureError(
                    f"`{self.name}` uses the variable {name!r}{at(_used_at(inside))}. Its dtype is "
                    f"{described[0].name}, which no device can hold: use it on the host, in a function for "
                    "xla.outside_compilation, or before the run."
                )
            if not described[1].is_fully_defined():
                raise CaptureError(
                    f"`{self.name}` uses a variable of shape {described[1]}{at(_used_at(inside))}, but XLA "
                    "compiles for fixed shapes. Make the variable without shape=, so that it gets the shape of its "
                    "initial value."
                )
        elif xla_ops.is_host_only(inside.dtype):
            raise CaptureError(
                f"`{self.name}` uses a tensor from outside the body{at(_used_at(inside))}. Its dtype is "
                f"{inside.dtype.name}, which no device can hold: convert it to numbers before the run."
            )


def with_any_size(shape: Any) -> tf.TensorShape:
    """The shape of a component of a sparse tensor, for any number of values."""
    return tf.TensorShape([None, *shape[1:]])


def _distributed(column: Column) -> distribute.PerReplica:
    return (
        distribute.LaterPerReplica(column) if callable(column) else distribute.PerReplica(list_column_tensors(column))
    )


def _stays_on_host(outside: Any, inside: tf.Tensor) -> bool:
    """Whether only host ops use a capture: a string, a table, a summary writer."""
    if tf.is_symbolic_tensor(outside) or callable(outside):
        return False
    if inside.dtype == tf.resource:
        return host_op_kinds.is_host_resource(outside) and "Iterator" not in str(outside)
    return xla_ops.is_host_only(inside.dtype)


def _made_by(output: tf.Tensor) -> tuple[str, str]:
    """The kind of the op that made an output, and the user's line."""
    while output.op.type == "Identity":
        output = output.op.inputs[0]
    return output.op.type, user_frames.user_line(output)


def _used_at(inside: tf.Tensor) -> str:
    return next((line for op in inside.consumers() if (line := user_frames.user_line(op))), "")
