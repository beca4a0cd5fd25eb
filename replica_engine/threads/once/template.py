"""The template: the graph that one replica traces for all. Everything in it that differs by replica is a placeholder.

Such a placeholder is called a hole. At each sync point, and at the end, the operations that were made since the last
one are copied for every replica to the graph of the run, replica 0 first, as if each replica had made them there in
turn. In the copies

- a hole is the value of the replica: an argument, what a merge function returned, or the replica id;
- the handle of a twin is that of the replica's component: the program got it from the distributed variable;
- a random op without a seed of its own has the seed that it would have had on the replica (`random_numbers`);
- an op without a device of its own is on the replica's device.

An op or a value that might be copied wrongly is refused (`refusal`). A refusal is kept, because user code may catch it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from itertools import filterfalse
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import components, distribute, eager, thread_state
from replica_engine._tf.graphs import copies, repeatable, source, subgraphs
from replica_engine.diagnostics.op_lines import here, user_line
from replica_engine.errors import TraceOnceError
from replica_engine.threads.once.seeds import Draws
from replica_engine.threads.once.watch import COMPONENT
from replica_engine.values.structure import open_level

_SCALARS = frozenset((bool, int, float, complex, str, bytes, type(None), tf.DType, tf.TensorShape))
# Types whose values are the same object on all replicas, or are not numbers.
_ONE_OBJECT = (
    *(str, bytes, type(None), bool, tf.DType, tf.Variable, tf.Operation, tf.TypeSpec),
    *(distribute.DistributedValues, distribute.UnreadVariable),
)
_SMALL = range(-5, 257)  # Python has one object for each of these numbers
_ID = "replica_id_in_sync_group"
_SHAPE = "a static shape that follows from the value of an argument, a merge result or the replica id,"


class Segment(NamedTuple):
    """What a replica has traced since the last sync point.

    Attributes:
        operations: the ops, in the order in which they were made.
        captures: the values that it uses from outside, each with its placeholder.
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

    Attributes:
        index: the replica.
        graph: the graph that the replica traces.
        holes: the placeholders for what differs by replica.
        creating: how many variables are being made now.
        created: the ids of the handles of variables that the replica has made.
        varying: the names of the holes whose value each replica knows while it is traced.
        made_for_variables: the names of ops that were made while a variable was being made.
        copied: how many times operations have been copied.
        draws: the seeds of its random ops.
        original: takes a tensor for each replica; returns the tensor of the graph that they are copies of, or None.
        refused: the error of the first refusal; None if nothing was refused.
    """

    def __init__(self, strategy: tf.distribute.Strategy, index: int):
        self.index = index
        self._devices = strategy.extended.worker_devices
        self._ids = [distribute.replica_id_in_sync_group(strategy, index) for index in range(len(self._devices))]
        self._outer = thread_state.default_graph()
        self._caller = here()  # the user's line on the thread that called `run`, as in a fit
        self.graph = source.new_graph(self._outer, self._see_seed)
        self._seed = self._outer.seed
        self.copied = 0
        self.creating = 0
        self.draws = Draws(
            self.graph, self._outer, self.refusal, lambda: self.creating > 0, lambda: self.has_made_variables
        )
        self.holes: list[tf.Operation] = []
        self.made_for_variables: set[str] = set()
        self.created: set[int] = set()
        self._copies = copies.Copies(self.graph, self._outer, self._devices, _refuse_gradient)
        self.original = self._copies.original
        self.refused: TraceOnceError | None = None
        self._id: tf.Tensor | None = None
        self._watched: set[int] = set()
        self._kept: list[Any] = []
        self._brought: list[tuple[tf.Tensor, dict[str, Any]]] = []  # to the last merge function, with their attributes
        self._same: dict[int, Any] = {}  # by id, Python values that are the same object on all replicas
        self.varying: set[str] = set()
        self._functions: dict[str, str | None] = {}
        self._outer_size = source.size(self._outer)
        self._collected = source.collected(self.graph)
        thread_state.make_stacks_thread_local(self.graph)
        source.on_capture(self._outer, self.graph, _refuse_kept)

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self._devices)

    @property
    def has_made_variables(self) -> bool:
        """Whether the replica has made a variable in this run."""
        return bool(self.created)

    def refusal(self, what: str, where: str | None = None) -> TraceOnceError:
        """The error for what cannot be copied; kept, because the user's code may catch it."""
        error = TraceOnceError.not_copied(what, (here() if where is None else where) or self._caller)
        self.refused = self.refused or error
        return error

    def check(self) -> None:
        """Raises what was refused, if the user's code has caught it."""
        if self.refused is not None:
            raise self.refused

    def anywhere(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, ops are on no device: copies are on that of their replica."""
        return source.on_no_device(self.graph)

    def goes_on(self) -> None:
        """The replica goes on after a sync point."""
        self.draws.begin()
        self._outer_size = source.size(self._outer)

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
        if isinstance(first, tf.Operation):
            return self._joined_operations(of_replicas, what)
        if isinstance(first, distribute.UnreadVariable):
            return self._joined_assignments(of_replicas, what)
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
        if shared or (type(first) in _SCALARS and len({(type(each), repr(each)) for each in of_replicas}) == 1):
            if shared:
                self._same[id(first)] = first
            return first
        raise self.refusal(f"{what}: Python values that differ by replica")

    def replica_id(self) -> tf.Tensor:
        """The id of the replica, as a tensor of the template."""
        if self._id is None:
            ids = []
            with self._outer.as_default(), tf.control_dependencies(None):
                for device, number in zip(self._devices, self._ids, strict=True):
                    with tf.device(device):
                        ids.append(tf.constant(number, tf.int32, name=_ID))
            self._id = self._hole(ids)
        return self._id

    def is_own(self, tensor: Any) -> bool:
        """Whether each copy of a tensor is on the device of its replica alone."""
        if eager.is_eager(tensor) or tensor.graph is not self.graph:
            return False
        of_copies = self._copies.given(tensor)
        if of_copies is None:
            return not tensor.op.device
        return all(each.device == device for each, device in zip(of_copies, self._devices, strict=True))

    def note_same(self, value: Any) -> None:
        """Notes Python values in a structure that are constants of code, which each replica would have as they are."""
        opened = open_level(value)
        if opened is not None:
            for child in opened[1]:
                self.note_same(child)
        elif type(value) in _SCALARS:
            frame = sys._getframe(1)
            while frame is not None:
                if _is_in(value, frame.f_code.co_consts):
                    self._same[id(value)] = value
                    return
                frame = frame.f_back  # type: ignore[assignment]

    def _joined_operations(self, of_replicas: Sequence[Any], what: str) -> tf.Operation:
        if not all(isinstance(each, tf.Operation) and each.graph is self._outer for each in of_replicas):
            raise self.refusal(f"{what}: an operation of another graph")
        with self.graph.as_default(), tf.control_dependencies(None), tf.device(None):
            hole = tf.no_op()
        self._copies.give_operation(hole, of_replicas)
        self.holes.append(hole)
        return hole

    def _joined_assignments(self, of_replicas: Sequence[Any], what: str) -> Any:
        """The result of an assignment. It is read where it is used, and so shows what later assignments write."""
        first = of_replicas[0]
        if not all(isinstance(each, distribute.UnreadVariable) for each in of_replicas):
            raise self.refusal(f"{what}: structures that differ by replica")
        found = components.component(first._handle)
        handle = first._handle
        own = [handle if found is None else found.of(replica) for replica in range(self.size)]
        if any(each._handle is not expected for each, expected in zip(of_replicas, own, strict=True)):
            raise self.refusal(f"{what}: results of assignments to variables that differ by replica")
        if found is not None:
            handle = components.twin_of(found, self.index)
        parent = self._joined_operations([each._parent_op for each in of_replicas], what)
        with self.graph.as_default():
            return distribute.unread(first, handle, parent)

    def _joined_tensors(self, of_replicas: Sequence[Any], shared: bool, what: str) -> tf.Tensor:
        first = of_replicas[0]
        if any(not eager.is_eager(each) and each.graph is self.graph for each in of_replicas):
            raise TraceOnceError.kept(here())
        if shared and not self._copies.is_of_one(first):
            return first
        if shared:
            raise self.refusal(f"{what}: a tensor of one replica for all, without tf.identity,")
        if not all(isinstance(each, tf.Tensor) for each in of_replicas):
            raise self.refusal(f"{what}: structures that differ by replica")
        if any(map(eager.is_eager, of_replicas)):  # Python code may ask for their values
            raise self.refusal(f"{what}: eager tensors that differ by replica")
        for each in of_replicas[1:]:
            if each.dtype != first.dtype:
                raise self.refusal(f"{what}: tensors of dtypes that differ by replica")
            if each.shape.rank != first.shape.rank or (
                each.shape.rank and each.shape.as_list() != first.shape.as_list()
            ):
                raise self.refusal(f"{what}: tensors of shapes that differ by replica")
        own = [subgraphs.capture_in(self._outer, each) for each in of_replicas]
        hole = self._copies.hole(own)
        if hole is None:
            hole = self.original(own)  # a merge function may return what it got
        if hole is None:
            hole = self._hole(own)
        of_each = [eager.attributes(each) for each in of_replicas]
        if any(each.keys() != of_each[0].keys() for each in of_each):
            raise self.refusal(f"{what}: tensors with Python attributes that differ by replica")
        for name in of_each[0]:
            setattr(hole, name, self.joined([each[name] for each in of_each], what))
        return hole

    def _joined_composites(self, of_replicas: Sequence[Any], what: str) -> Any:
        first = of_replicas[0]
        if any(getattr(each, "_type_spec", None) != first._type_spec for each in of_replicas):
            raise self.refusal(f"{what}: composite tensors of types that differ by replica")
        flats = [tf.nest.flatten(each, expand_composites=True) for each in of_replicas]
        joined = [self.joined(list(column), what) for column in zip(*flats, strict=True)]
        packed = tf.nest.pack_sequence_as(first, joined, expand_composites=True)
        if any(_attributes(each) - _attributes(packed) for each in of_replicas):
            raise self.refusal(f"{what}: composite tensors with Python attributes")
        return packed

    def _hole(self, of_replicas: Sequence[tf.Tensor]) -> tf.Tensor:
        hole = source.constant(self.graph, of_replicas)
        if hole is None:
            hole = source.placeholder(self.graph, of_replicas[0])
            if any(map(source.is_partly_known, of_replicas)):
                self.varying.add(hole.op.name)
        self._copies.give(hole, of_replicas)
        self.holes.append(hole.op)
        return hole

    # -- from the template to the replicas

    def take(self) -> Segment:
        """What the replica has traced since the last time.

        Raises:
            TraceOnceError: it cannot be copied.
        """
        self.check()
        made = source.made_since(self._outer, self._outer_size)
        if self.index == 0 and not self.created and any(map(_is_strange, made)):
            self.copied += 1  # there is no way back: what was made there stays
            raise self.refusal("the graph outside the run", user_line(made[-1]))
        captures = self._copies.new_captures()
        for outside, inside in captures:
            self._copies.give(
                inside, [subgraphs.capture_in(self._outer, each) for each in self._captured(outside, inside)]
            )
        if source.is_passed_by_reference(self.graph):
            raise self.refusal("a Python value that a tf.function looks up at each call")
        if source.control_captures(self.graph):
            raise self.refusal("a control dependency on an operation outside the run")
        if self._outer.seed != self._seed:
            raise self.refusal("tf.random.set_seed")
        new = self._copies.new_operations()
        for op in new:
            what = repeatable.refused(op, self._functions)
            if what is not None:
                raise self.refusal(what, user_line(op))
        if source.collected(self.graph) != self._collected:
            raise self.refusal("a collection of the graph")
        segment = Segment(new, captures, self.draws.of_copies(new, self._ids))
        if self.varying and not self.copied and self.index == 0:
            self._check_shapes(self._copies.rehearse(new, segment.seeds), new)
        return segment

    def _check_shapes(self, made: copies.Copies, new: Sequence[tf.Operation]) -> None:
        """Checks that Python code has seen no static shape that another replica would know, and this one does not."""
        op = next(filterfalse(components.is_of_gathering, made.better_known(new)), None)
        if op is not None:
            raise self.refusal(_SHAPE, user_line(op))

    def copy(self, segment: Segment) -> None:
        """Copies what the replica has traced, for each replica."""
        self.copied += 1
        self._copies.add(segment.operations, segment.seeds)
        self.draws.copied()
        source.hand_over(self.graph, self._outer)
        for hole in (hole for op in self.holes for hole in op.outputs):
            for name, value in eager.attributes(hole).items():  # Python code may have given it more
                for replica, own in enumerate(self._copies.given(hole) or ()):
                    setattr(own, name, self.of_replica(replica, value))
        self._brought.clear()
        self._check_shapes(self._copies, segment.operations)
        for variable in source.watched_variables(self.graph):
            if id(variable) not in self._watched:
                self._watched.add(id(variable))
                self._kept.append(variable)
                container = distribute.value_container(variable)
                self._copies.watch([] if container is variable else container._values)

    def check_values(self, value: Any, what: str, where: str) -> None:
        """Checks a structure that is brought or returned: Python values in it must be the same object on all replicas.

        Otherwise there is one for each replica: two replicas that return 0.5 return one number, and two that compute
        it return two, which a sum tells apart.

        Args:
            value: the structure.
            what: what it is, for a refusal.
            where: the user's line.
        """
        opened = None if tf.is_tensor(value) else open_level(value)
        if opened is not None:
            for child in opened[1]:
                self.check_values(child, what, where)
        elif not (
            tf.is_tensor(value)
            or isinstance(value, _ONE_OBJECT)
            or id(value) in self._same
            or (type(value) is int and value in _SMALL)
        ):
            raise self.refusal(f"a Python value of type {type(value).__name__} in {what},", where)

    def check_brought(self) -> None:
        """Checks that a merge function has set no attributes of tensors: the template's tensors would lack them."""
        for tensor, before in self._brought:
            now = eager.attributes(tensor)
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in now):
                raise self.refusal("a Python attribute that a merge function gives to a tensor")

    def of_replica(self, replica: int, value: Any) -> Any:
        """A structure with each tensor and op of the template replaced by its copy for a replica."""
        if isinstance(value, tf.Tensor):
            if eager.is_eager(value) or value.graph is not self.graph:
                return value
            known = self._copies.tensor(replica, value)
            for name, attribute in eager.attributes(value).items():
                setattr(known, name, self.of_replica(replica, attribute))
            if known.shape.rank is None or not known.shape.is_fully_defined():
                known.set_shape(value.shape)
            self._brought.append((known, eager.attributes(known)))
            return known
        if isinstance(value, tf.Operation):
            return self.operation(replica, value)
        if isinstance(value, distribute.UnreadVariable):
            return self._assignment(replica, value)
        if isinstance(value, (tf.Variable, distribute.DistributedValues)):
            return value
        if tf.is_tensor(value) and hasattr(value, "_type_spec"):
            copied = tf.nest.map_structure(lambda each: self.of_replica(replica, each), value, expand_composites=True)
            if _attributes(value) - _attributes(copied):
                raise self.refusal("a composite tensor with Python attributes")
            return copied
        opened = open_level(value)
        if opened is None:
            return value
        level, children = opened
        return level.rebuild([self.of_replica(replica, child) for child in children])

    def operation(self, replica: int, operation: tf.Operation) -> tf.Operation:
        """The copy, for a replica, of an op of the template; any other op itself."""
        known = self._copies.operation(replica, operation) if operation.graph is self.graph else None
        return operation if known is None else known

    def _assignment(self, replica: int, value: Any) -> Any:
        """A replica's copy of the result of an assignment, which is read where it is used."""
        if value._parent_op.graph is not self.graph:
            raise self.refusal("the result of an assignment outside the run", "")
        found, handle = components.component(value._handle), value._handle
        if found is not None and not (found.is_twin and found.replica == self.index):
            raise self.refusal(COMPONENT, "")
        with self._outer.as_default():
            handle = handle if found is None else found.of(replica)
            return distribute.unread(value, handle, self.operation(replica, value._parent_op))

    def _captured(self, outside: Any, inside: tf.Tensor) -> list[Any]:
        """For each replica, what the template has captured."""
        found = components.component(outside) if outside.dtype == tf.resource else None
        if found is None:
            if self._copies.is_of_one(outside):
                raise self.refusal("a tensor of one replica by itself", _first_use(inside))
            return [outside] * self.size
        if id(outside) in self.created and not found.is_twin:  # used while the variable is being made
            return [outside] * self.size
        if not found.is_twin or found.replica != self.index:
            raise self.refusal(COMPONENT, _first_use(inside))
        if self.index:
            return [found.of(self.index)] * self.size
        own = [found.of(replica) for replica in range(self.size)]
        if any(each is None for each in own):
            raise self.refusal("a variable that no longer exists, or of another strategy", _first_use(inside))
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
            self._kept += [handles, variable]
            self.created |= set(map(id, handles or [variable]))
            return variable

        return noted

    def _see_seed(self) -> None:
        """Refuses code that sets the seed of the graph."""
        raise self.refusal("tf.random.set_seed")


def _refuse_kept(_: Any) -> Any:
    """Refuses a tensor or op of the template that is used in the graph of the run or of a merge function."""
    raise TraceOnceError.kept(here())


def _is_in(value: Any, constants: tuple) -> bool:
    return any(each is value or (type(each) is tuple and _is_in(value, each)) for each in constants)


def _is_strange(op: tf.Operation) -> bool:
    """Whether an op that was made outside the run is neither a replica id nor the placeholder of a captured value."""
    return op.type != "Placeholder" and not (op.type == "Const" and _ID in op.name)


def _first_use(inside: tf.Tensor) -> str:
    """The user's line that uses a captured value."""
    return next(filter(None, map(user_line, inside.consumers())), "")


def _attributes(value: Any) -> set[str]:
    return set(getattr(value, "__dict__", ()))


def _refuse_gradient(op: tf.Operation, *upstream: Any) -> Any:
    """The gradient function of copies for which the gradient of the copied op is wrong: raises TraceOnceError."""
    kinds = {"While": "tf.while_loop", "If": "tf.cond", "Case": "tf.switch_case"}
    what = kinds.get(op.type.removeprefix("Stateless"), "tf.custom_gradient")
    raise TraceOnceError.own_gradient(what, here())
