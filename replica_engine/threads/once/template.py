"""What one replica traces for all: a graph, in which all that differs by replica is a placeholder (a hole).

At each sync point, and at the end, the operations that were made since the last one are copied for every replica to the
graph of the run, replica 0 first, as if each replica had made them there in its turn. In the copies

- a hole is the value of the replica: an argument, what a merge function returned, or the replica id;
- the handle of a variable is that of the replica's component, if the program got it from the distributed variable;
- a random op without a seed of its own has the seed that it would have had on the replica (`random_numbers`);
- an op without a device of its own is on the replica's device.

What cannot be copied is refused (`refusal`), never guessed. A refusal is kept, because user code may catch it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import components, distribute, eager, thread_state
from replica_engine._tf.graphs import copies
from replica_engine.diagnostics.op_lines import here, user_line
from replica_engine.diagnostics.user_frames import WRAPPERS, is_internal
from replica_engine.errors import TraceOnceError
from replica_engine.threads.once.reach import Reach
from replica_engine.threads.once.seeds import Draws
from replica_engine.values.structure import open_level

_SCALARS = (bool, int, float, complex, str, bytes, type(None), tf.DType, tf.TensorShape)
# What cannot run twice from one definition, by the beginning of its type.
_REFUSED = {
    "EagerPyFunc": "tf.py_function",
    "Collective": "a collective operation",
    "VarHandleOp": "a variable that belongs to a graph",
    "Enter": "control flow of TensorFlow 1",
    "Switch": "control flow of TensorFlow 1",
    "RefSwitch": "control flow of TensorFlow 1",
}
_KINDS = tuple(_REFUSED)


class Segment(NamedTuple):
    """What a replica has traced since the last sync point.

    Attributes:
        operations: the ops, in the order in which they were made.
        captures: what it uses from outside, and the placeholders of these values.
        seeds: for the random ops for which seeds were drawn, by name, the seed of each replica.
    """

    operations: list[tf.Operation]
    captures: list[tuple[Any, tf.Tensor]]
    seeds: dict[str, list[int]]


class Template:
    """What one replica traces, and its copies in the graph of the run.

    Args:
        strategy: the strategy, whose devices the copies are on.
        index: the replica; only the template of replica 0 is copied.
        reach: how its replicas reach components of variables.

    Attributes:
        index: the replica.
        graph: the graph that the replica traces.
        holes: the placeholders for what differs by replica.
        made_for_variables: the names of ops that were made while a variable was.
        copied: how many times operations have been copied.
        draws: the seeds of its random ops.
        refused: what cannot be copied, if something cannot.
    """

    def __init__(self, strategy: tf.distribute.Strategy, index: int, reach: Reach):
        self.index = index
        self._devices = strategy.extended.worker_devices
        self._ids = [distribute.replica_id_in_sync_group(strategy, index) for index in range(len(self._devices))]
        self._outer = thread_state.default_graph()
        self.graph = copies.new_graph(self._outer)
        self.copied = 0
        self.creating = 0
        self.draws = Draws(
            self.graph, self._outer, self.refusal, lambda: self.creating > 0, lambda: self.has_made_variables
        )
        self.holes: list[tf.Tensor] = []
        self.made_for_variables: set[str] = set()
        self._created: set[int] = set()  # the ids of handles of variables that the replica has made
        self._copies = copies.Copies(self.graph, self._outer, self._devices, _own_gradient)
        self._reach = reach
        self.refused: TraceOnceError | None = None
        self._id: tf.Tensor | None = None
        self._watched: set[int] = set()
        self._kept: list[Any] = []
        thread_state.make_stacks_thread_local(self.graph)
        self._outside = _Outside(self.graph)
        copies.on_capture(self._outer, self._outside.seen)

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self._devices)

    @property
    def has_made_variables(self) -> bool:
        """Whether the replica has made a variable in this run."""
        return bool(self._created)

    @property
    def watcher(self) -> components.Watcher:
        """What is told of the code of the replica."""
        return components.Watcher(self._see_handle, self._see_constant)

    def refusal(self, what: str, where: str | None = None) -> TraceOnceError:
        """The error for what cannot be copied; kept, because the user's code may catch it."""
        error = TraceOnceError.not_copied(what, here() if where is None else where)
        self.refused = self.refused or error
        return error

    def check(self) -> None:
        """Raises what was refused, if the user's code has caught it."""
        if self.refused is not None:
            raise self.refused

    @contextlib.contextmanager
    def merges(self) -> Iterator[None]:
        """Inside the block, the template's tensors are those of replica 0 in the graph of the run."""
        self._outside.first = functools.partial(self._copies.tensor, 0)
        try:
            yield
        finally:
            self._outside.first = None

    # -- from the replicas to the template

    def joined(self, of_replicas: Sequence[Any], what: str) -> Any:
        """One value for the template in the place of one for each replica.

        Args:
            of_replicas: the value of each replica.
            what: what the values are, for a refusal.
        """
        first = of_replicas[0]
        shared = all(each is first for each in of_replicas)
        if isinstance(first, tf.Tensor):
            return self._joined_tensors(of_replicas, shared, what)
        if isinstance(first, distribute.UnreadVariable):
            return self.joined([tf.convert_to_tensor(each) for each in of_replicas], what)
        if isinstance(first, (tf.Variable, distribute.DistributedValues)):
            if shared:
                return first
            raise self.refusal(f"{what}: variables that differ by replica")
        if tf.is_tensor(first) and hasattr(first, "_type_spec"):
            return self._joined_composites(of_replicas, what)
        levels = [open_level(each) for each in of_replicas]
        opened = [each for each in levels if each is not None]
        if opened:
            level = opened[0][0]
            if len(opened) < self.size or any(each.key != level.key for each, _ in opened):
                raise self.refusal(f"{what}: structures that differ by replica")
            columns = zip(*(each for _, each in opened), strict=True)
            return level.rebuild([self.joined(list(column), what) for column in columns])
        if shared or (isinstance(first, _SCALARS) and len({(type(each), repr(each)) for each in of_replicas}) == 1):
            return first
        raise self.refusal(f"{what}: Python values that differ by replica")

    def replica_id(self) -> tf.Tensor:
        """The id of the replica, as a tensor of the template."""
        if self._id is None:
            ids = []
            with self._outer.as_default(), tf.control_dependencies(None):
                for device, number in zip(self._devices, self._ids, strict=True):
                    with tf.device(device):
                        ids.append(tf.constant(number, tf.int32, name="replica_id_in_sync_group"))
            self._id = self._hole(ids)
        return self._id

    def _joined_tensors(self, of_replicas: Sequence[Any], shared: bool, what: str) -> tf.Tensor:
        first = of_replicas[0]
        if shared:
            return first if eager.is_eager(first) else self._in_outer(first)
        if not all(isinstance(each, tf.Tensor) for each in of_replicas):
            raise self.refusal(f"{what}: structures that differ by replica")
        for each in of_replicas[1:]:
            if each.dtype != first.dtype:
                raise self.refusal(f"{what}: tensors of dtypes that differ by replica")
            if each.shape.rank != first.shape.rank or (
                each.shape.rank and each.shape.as_list() != first.shape.as_list()
            ):
                raise self.refusal(f"{what}: tensors of shapes that differ by replica")
        return self._hole([self._in_outer(each) for each in of_replicas])

    def _joined_composites(self, of_replicas: Sequence[Any], what: str) -> Any:
        first = of_replicas[0]
        if any(getattr(each, "_type_spec", None) != first._type_spec for each in of_replicas):
            raise self.refusal(f"{what}: composite tensors of types that differ by replica")
        flats = [tf.nest.flatten(each, expand_composites=True) for each in of_replicas]
        joined = [self.joined(list(column), what) for column in zip(*flats, strict=True)]
        return tf.nest.pack_sequence_as(first, joined, expand_composites=True)

    def _hole(self, of_replicas: Sequence[tf.Tensor]) -> tf.Tensor:
        hole = copies.placeholder(self.graph, of_replicas[0])
        self._copies.give(hole, of_replicas)
        self.holes.append(hole)
        return hole

    def _in_outer(self, tensor: Any) -> tf.Tensor:
        with self._outer.as_default():
            return self._outer.capture(tensor)

    # -- from the template to the replicas

    def take(self) -> Segment:
        """What the replica has traced since the last time.

        Raises:
            TraceOnceError: it cannot be copied.
        """
        self.check()
        captures = self._copies.new_captures()
        for outside, inside in captures:
            of_replicas = self._captured(outside) if self.index == 0 else [outside] * self.size
            self._copies.give(inside, [self._in_outer(each) for each in of_replicas])
        if copies.is_passed_by_reference(self.graph):
            raise self.refusal("a Python value that a tf.function looks up at each call")
        new = self._copies.new_operations()
        for op in new:
            kind = op.type
            if kind.startswith(_KINDS):
                what = next(what for beginning, what in _REFUSED.items() if kind.startswith(beginning))
                raise self.refusal(what, user_line(op))
        return Segment(new, captures, self.draws.of_copies(new, self._ids))

    def copy(self, segment: Segment) -> None:
        """Copies what the replica has traced, for each replica."""
        self.copied += 1
        self._copies.add(segment.operations, segment.seeds)
        self.draws.copied()
        for variable in copies.watched_variables(self.graph):
            if id(variable) not in self._watched:
                self._watched.add(id(variable))
                self._kept.append(variable)
                container = distribute.value_container(variable)
                self._copies.watch([] if container is variable else container._values)

    def of_replica(self, replica: int, value: Any) -> Any:
        """A structure of the template's tensors as that of a replica."""
        if isinstance(value, tf.Tensor):
            if eager.is_eager(value) or value.graph is not self.graph:
                return value
            known = self._copies.tensor(replica, value)
            if known.shape.rank is None or not known.shape.is_fully_defined():
                known.set_shape(value.shape)
            return known
        if isinstance(value, tf.Operation):
            return self.operation(replica, value)
        if isinstance(value, (tf.Variable, distribute.DistributedValues)):
            return value
        if tf.is_tensor(value) and hasattr(value, "_type_spec"):
            return tf.nest.map_structure(lambda each: self.of_replica(replica, each), value, expand_composites=True)
        opened = open_level(value)
        if opened is None:
            return value
        level, children = opened
        return level.rebuild([self.of_replica(replica, child) for child in children])

    def operation(self, replica: int, operation: tf.Operation) -> tf.Operation:
        """An op of the template as that of a replica."""
        known = self._copies.operation(replica, operation) if operation.graph is self.graph else None
        return operation if known is None else known

    def _captured(self, outside: Any) -> list[Any]:
        """For each replica, what the template has captured."""
        handle = outside
        while not eager.is_eager(handle) and hasattr(handle.graph, "captures"):
            inner = next((each for each, placeholder in handle.graph.captures if placeholder is handle), None)
            if inner is None:
                break
            handle = inner
        found = components.component(handle) if handle.dtype == tf.resource else None
        if found is None or (id(handle) in self._created and found.replica):
            return [outside] * self.size
        if found.replica or not self._reach.is_through_variable(handle):
            raise self.refusal("a component of a distributed variable that is used by itself", "")
        own = [outside, *(found.of(replica) for replica in range(1, self.size))]
        if any(each is None for each in own):
            raise self.refusal("a variable that no longer exists", "")
        return own

    # -- what the replica's code does

    def creator(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """A variable creator that notes what only the making of variables uses."""

        def noted(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            before = len(self.graph.get_operations())
            self.creating += 1
            try:
                variable = create(next_creator, **kwargs)
            finally:
                self.creating -= 1
                self.made_for_variables |= {op.name for op in self.graph.get_operations()[before:]}
            handles = components.handles(variable)
            self._kept.append(handles)
            self._created |= set(map(id, handles or [variable]))
            self._reach.note_created(handles)
            return variable

        return noted

    def _see_handle(self, handle: Any) -> None:
        """A handle is used: through its distributed variable, or by itself?"""
        if not self.creating and self._reach.see(handle):
            raise self.refusal("a component of a distributed variable that is used by itself")

    def _see_constant(self, tensor: tf.Tensor) -> None:
        """The value of a tensor was asked for while the replica is traced, and it is not known."""
        caller = sys._getframe(3)  # the caller of tf.get_static_value
        while caller.f_code.co_name in WRAPPERS and caller.f_back is not None:
            caller = caller.f_back
        if not is_internal(caller.f_code.co_filename):
            raise self.refusal("tf.get_static_value of a value that may differ by replica")


class _Outside:
    """What becomes of the template's tensors in the graph of the run, also when the run is over.

    Args:
        graph: the graph of the template.

    Attributes:
        first: in a merge function, what replica 0 has in the place of a tensor.
    """

    def __init__(self, graph: Any):
        self._graph = weakref.ref(graph)
        self.first: Callable[[tf.Tensor], tf.Tensor] | None = None

    def seen(self, tensor: Any) -> Any:
        """A value is used in the graph of the run."""
        if eager.is_eager(tensor) or tensor.graph is not self._graph():
            return tensor
        if self.first is None:
            raise TraceOnceError.kept(here())
        return self.first(tensor)


def _own_gradient(op: tf.Operation, *upstream: Any) -> Any:
    """The gradient, outside the replicas, of copies of ops whose gradient is none for their copies."""
    raise TraceOnceError.own_gradient("tf.while_loop" if "While" in op.type else "tf.custom_gradient", here())


def settled(value: Any) -> Any:
    """Results of assignments as tensors; on the replica's thread."""
    if isinstance(value, distribute.UnreadVariable):
        return tf.convert_to_tensor(value)
    if isinstance(value, (tf.Tensor, tf.Operation, tf.Variable, distribute.DistributedValues)):
        return value
    opened = open_level(value)
    return value if opened is None else opened[0].rebuild([settled(child) for child in opened[1]])
