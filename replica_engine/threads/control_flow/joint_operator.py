"""One operator of all replicas, while it is built: its graphs, and attempts to build it alone.

`Notes` and `Captures` say of the graphs that all replicas build which replica made each op, and what each replica
captures from outside. `Attempts` are what a replica does before: it enters an operator alone, and leaves it again if
there is a merge call inside. `JointOperator` is one operator for all replicas, while the coordinator builds it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.engine import Replica, Run, current_replica
from replica_engine.errors import MergeCallGraphError, StructureMismatchError
from replica_engine.process import interrupts
from replica_engine.upstream import eager, thread_state
from replica_engine.upstream.graphs import function_graphs, operators
from replica_engine.upstream.graphs.graph_walk import capture_in
from replica_engine.values.regroup import regroup

_NOTES = "_replica_engine_notes"
# Ops that pass on a value, and which input it is. The gradients of If and While keep values of branches in such ops.
_PASSING = {"Identity": 0, "IdentityN": 0, "OptionalFromValue": 0, "StopGradient": 0, "TensorListPushBack": 1}


class Notes:
    """What is known of a graph that all replicas build.

    Each replica's gradient is the gradient of its own outputs with respect to its own inputs, as a tape on its thread
    would record it. So a joint graph knows for each op which replica made it. Ops of the coordinator belong to no
    replica: for tapes the results of a merge are constants, as everywhere in `tf.distribute`.

    Attributes:
        owners: the replica that made each op, by the op's name; and the replica that a tensor of the coordinator's
            stands for, such as a loop variable, by the tensor's name.
        constants: the results of merges, through which no gradient goes.
        closures: eager tensors from outside that a replica uses, and what the graph captured for each.
        resources: the handles of variables that a replica uses.
        shared: the handles of variables that several replicas use.
    """

    def __init__(self) -> None:
        self.owners: dict[str, int] = {}
        self.constants: list[tf.Tensor] = []
        self.closures: list[tuple[int, tf.Tensor, tf.Tensor]] = []
        self.resources: list[tuple[int, tf.Tensor]] = []
        self.shared: list[tf.Tensor] = []

    @classmethod
    def on(cls, graph: Any) -> Notes:
        """The notes on a graph, which becomes a joint graph."""
        return function_graphs.kept_on(graph, _NOTES, cls)

    def owner(self, tensor: tf.Tensor) -> int | None:
        """The replica that a tensor of the graph belongs to; None for what the coordinator made."""
        while True:
            op = tensor.op
            owner = self.owners.get(tensor.name, self.owners.get(op.name))
            if owner is not None:
                return owner
            if op.type not in _PASSING:
                return owner_inside(op, "outputs", tensor.value_index)
            tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else _PASSING[op.type]]

    def give(self, replica: int, tensors: Sequence[tf.Tensor]) -> None:
        """Notes that tensors of the coordinator's ops, such as loop variables, are a replica's own."""
        for tensor in tensors:
            self.owners.setdefault(tensor.name, replica)


def find_notes(graph: Any) -> Notes | None:
    """The notes on a joint graph; None for any other graph."""
    return getattr(graph, _NOTES, None)


def is_joint(op: tf.Operation) -> bool:
    """Whether an op is an operator that all replicas entered together, or the gradient of one."""
    return any(find_notes(graph) is not None for graph in operators.graphs_inside(op))


def owner_inside(op: tf.Operation, ends: str, position: int) -> int | None:
    """The replica to which an input or output of a joint operator belongs.

    Args:
        op: the op.
        ends: "inputs" or "outputs", of the graphs inside the op.
        position: the index among them.
    """
    for graph in reversed(operators.graphs_inside(op)):  # a loop's body, which has all that its condition has
        notes, tensors = find_notes(graph), getattr(graph, ends)
        owner = notes.owner(tensors[position]) if notes is not None and 0 <= position < len(tensors) else None
        if owner is not None:
            return owner
        if ends == "outputs" and "While" in op.type:
            return None  # the condition has one output, and it belongs to nobody
    return None


class Captures:
    """What each replica of one operator uses from outside it.

    Two replicas may use the same tensor of the graph outside. Each gets an alias of its own, which is made outside, on
    the replica's device. Without it, the gradient of that tensor would be the sum over the replicas. It also avoids a
    fault of TensorFlow's graph optimizer: `identity(x)` on CPU:0 plus `identity(x)` on CPU:1 in a branch becomes an
    empty tensor. A resource has no alias, because TensorFlow orders reads and writes by the handle itself.

    Args:
        outer: the graph outside, in which the operator stands.
        replicas: the replicas.
        devices: the device of each replica, by its full name.

    Attributes:
        of_replica: for each replica, the tensors outside that it uses; aliases in the place of shared ones.
        shared: the handles of variables that several replicas use.
    """

    def __init__(self, outer: Any, replicas: Sequence[Replica], devices: Sequence[str]):
        self._outer, self._replicas, self._devices = outer, replicas, devices
        self.of_replica: list[list[tf.Tensor]] = [[] for _ in replicas]
        self._owners: dict[int, int] = {}
        self._aliases: dict[tuple[int, int], tf.Tensor] = {}
        self.shared: list[tf.Tensor] = []
        self._kept: list[Any] = []  # so that no id is used twice
        self._watched: list[Any] = []

    def watch(self, graph: Any, aliases: bool) -> None:
        """Begins to note the owners of ops in a graph that replicas build, and with `aliases` their captures."""
        if getattr(graph, "_replica_engine_captures", None) is self:
            return
        graph._replica_engine_captures = self
        self._watched.append(graph)
        notes, replicas = Notes.on(graph), self._replicas
        create, capture = graph._create_op_internal, graph.capture

        def create_noted(*args: Any, **kwargs: Any) -> Any:
            op = create(*args, **kwargs)
            replica = current_replica()
            if replica is not None and replica in replicas:
                notes.owners[op.name] = replica.index
            return op

        def capture_own(tensor: Any, name: str | None = None, shape: Any = None) -> Any:
            if getattr(tensor, "graph", None) is graph:
                return capture(tensor, name)
            replica = current_replica()
            if replica is None or replica not in replicas:
                # The coordinator captures as the replicas do, so that one tensor is one input.
                return capture(capture_in(self._outer, tensor) if find_notes(self._outer) is not None else tensor, name)
            own = capture(self._own(replica.index, tensor, notes), name)
            if own.dtype != tf.resource:  # also if the coordinator has captured the tensor before
                notes.owners.setdefault(own.op.name, replica.index)
            return own

        # On this one graph and not on its class: graphs without joint operators pay nothing.
        graph._create_op_internal = create_noted
        graph.capture = capture_own if aliases else capture

    def unwatch(self) -> None:
        """Ends all that `watch` began; the graphs keep their notes."""
        for graph in self._watched:
            del graph._create_op_internal, graph._replica_engine_captures, graph.capture
        self._watched, self._kept, self._aliases, self._owners = [], [], {}, {}

    def _own(self, replica: int, tensor: Any, notes: Notes) -> Any:
        """Returns the tensor that stands for `tensor` in this operator for one replica alone, and notes it."""
        if tensor.dtype == tf.resource:
            if self._owners.setdefault(id(tensor), replica) != replica:
                self.shared.append(tensor)
            self._kept.append(tensor)
            if all(known is not tensor or by != replica for by, known in notes.resources):
                notes.resources.append((replica, tensor))
        elif not hasattr(self._outer, "capture"):  # in eager mode
            tensor = self._eager_alias(replica, tensor, notes)
        else:
            tensor = self._alias(replica, capture_in(self._outer, tensor) if eager.is_eager(tensor) else tensor)
        if find_notes(self._outer) is not None:
            tensor = capture_in(self._outer, tensor)  # on the replica's thread, so that it is the replica's own there
        if all(tensor is not known for known in self.of_replica[replica]):
            self.of_replica[replica].append(tensor)
        return tensor

    def _alias(self, replica: int, tensor: tf.Tensor) -> tf.Tensor:
        """A tensor of the graph outside that no other replica uses."""
        self._kept.append(tensor)
        if self._owners.setdefault(id(tensor), replica) == replica:
            return tensor
        key = replica, id(tensor)
        if key not in self._aliases:
            with self._outer.as_default(), tf.control_dependencies(None), tf.device(self._devices[replica]):
                alias = self._aliases[key] = tf.identity(tensor)
            self._kept.append(alias)
            self._owners[id(alias)] = replica
        return self._aliases[key]

    def _eager_alias(self, replica: int, tensor: tf.Tensor, notes: Notes) -> tf.Tensor:
        """A copy of an eager tensor for one replica alone."""
        key = replica, id(tensor)
        if key not in self._aliases:
            self._kept.append(tensor)
            with tf.init_scope(), tf.device(self._devices[replica]):
                self._aliases[key] = tf.identity(tensor)
            notes.closures.append((replica, tensor, self._aliases[key]))
        return self._aliases[key]


def outlasting(initial_value: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside the block, a variable may be created; if an attempt creates it, it lives on when the attempt is given up.

    User code keeps the variable and does not create it again. So it gets its value now, outside the graph of the
    attempt. A tensor of that graph has no value outside it. If the initial value is such a tensor, the attempt ends
    here, before the variable is created, and the replicas create it together.

    Raises:
        MergeNeeded: the initial value is a tensor of the graph of an attempt.
    """
    attempts = getattr(tf.distribute.get_replica_context(), "attempts", None)
    if attempts is None or not attempts.active:
        return contextlib.nullcontext()
    if tf.is_tensor(initial_value) and tf.is_symbolic_tensor(initial_value):
        attempts.merge_needed()
    return tf.init_scope()


class MergeNeeded(BaseException):
    """Goes from a merge call in an attempt up to the operator. Not an Exception, because users catch those."""


class Attempts:
    """The attempts of one replica.

    Replica 0 decides for all replicas of a run which operators are joint. A decision belongs to the k-th operator that
    a replica enters and to the place of the call. The place alone is not enough: the same line may be reached once with
    merge calls and once without. The number alone is not enough: replicas may differ in operators without merge calls.

    Each trace decides for itself. What an earlier trace decided must not count: where that is wrong, the ops of a graph
    have another order, and the last bits of a training depend on what the process has trained before.

    Args:
        decisions: the places of the operators that replica 0 has found to be joint in the run, by their numbers.
        leads: whether this is replica 0.

    Attributes:
        active: whether the replica is in an attempt now.
        needed: whether a merge call has ended the attempt.
        vectorizing: whether the replica is in code that TensorFlow will vectorize, where nothing can merge.
        asked_for: the sources for which a tape on the replica's thread is being asked.
    """

    def __init__(self, decisions: dict[int, Any], leads: bool):
        self.active = self.vectorizing = False
        self._decisions, self._leads = decisions, leads
        self.asked_for: list[Any] = []
        self._number = 0
        self.needed = False
        self._begun: weakref.WeakSet[tf.GradientTape] = weakref.WeakSet()
        self._tapes: list[tuple[tf.GradientTape, Any]] = []

    def enter(self, place: Any, plain: Callable[[], Any], joint: Callable[[], Any]) -> Any:
        """Enters an operator, alone or together with the other replicas.

        Args:
            place: where the operator stands in the user's program.
            plain: enters it alone.
            joint: enters it together with the others.
        """
        if self.active:  # The operator around it is the one that the coordinator can see.
            return plain()
        self._number += 1
        if self._decisions.get(self._number) == place:
            return joint()
        done, result = self._attempt(plain)
        if self._leads and not done:
            self._decisions[self._number] = place
        return result if done else joint()

    def enter_joint(self, joint: Callable[[], Any]) -> Any:
        """Enters an operator that is known to have merge calls."""
        self._number += 1
        return joint()

    def merge_needed(self) -> None:
        """Ends the attempt, because of a merge call."""
        self.needed = True
        raise MergeNeeded

    def ends_branch(self) -> None:
        """At the end of a branch or a body: raises again what user code may have caught."""
        if self.active and self.needed:
            raise MergeNeeded

    def note_tape(self, tape: tf.GradientTape) -> None:
        """Notes that a tape of the replica begins to record."""
        self._begun.add(tape)

    def recording_tapes(self) -> list[tf.GradientTape]:
        """The tapes of the replica that record."""
        return [each for each in self._begun if operators.is_recording(each)]

    def note_gradient(self, tape: tf.GradientTape) -> None:
        """Notes that a tape is about to be asked for gradients, which ends it."""
        if self.active:
            self._tapes.append((tape, operators.as_recording(tape)))

    def _attempt(self, plain: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether `plain` ran without a merge call, and its result. If not, tapes are as they were before."""
        self.active, self.needed, self._tapes = True, False, []
        try:
            result = plain()
            if self.needed:
                raise MergeCallGraphError.swallowed()
            return True, result
        except MergeNeeded:
            for tape, before in reversed(self._tapes):
                operators.restore_tape(tape, before)
            return False, None
        finally:
            self.active, self._tapes = False, []


class ReplicaEntry(NamedTuple):
    """What one replica brings to an operator that all replicas enter together.

    Attributes:
        context: the replica's context.
        payload: what `build` needs of this replica.
        taped: whether a gradient tape records on the replica's thread.
    """

    context: Any
    payload: Any
    taped: bool


class Built(NamedTuple):
    """What one replica gets back.

    Attributes:
        value: its outputs.
        backward: what differentiates them; None if nothing can.
        inputs: the tensors on which its outputs depend.
    """

    value: Any
    backward: Any = None
    inputs: Sequence[tf.Tensor] = ()


class JointOperator:
    """Builds one operator.

    Args:
        run: the run, in a merge.
        parts: what each replica brings.

    Attributes:
        outer: the graph in which the operator stands.
        parts: what each replica brings.
        payloads: what `build` needs of each replica.
        run: the run.
        kind: the name of the operator, such as "tf.cond".
        where: the user's line.
        captures: what each replica uses from outside.
    """

    def __init__(self, run: Run, parts: Sequence[ReplicaEntry]):
        self.run, self.parts = run, parts
        self.payloads: list[Any] = [part.payload for part in parts]
        self.outer = thread_state.default_graph()
        point = run.sync_point()[0]
        self.kind, self.where = point.kind, point.where
        devices = [part.context.device for part in parts]
        self.captures = Captures(self.outer, run.replicas, devices)

    def check_equal(self, described: Sequence[str], name: str) -> None:
        """Raises StructureMismatchError if the replicas gave different kinds of an argument.

        Args:
            described: the argument of each replica, in words.
            name: the argument.
        """
        for replica, each in enumerate(described):
            if each != described[0]:
                what = f"The arguments of {self.kind} ({self.where})"
                raise StructureMismatchError.between(what, name, (0, replica), (described[0], each))

    def trace(
        self,
        calls: Sequence[Callable[[], Any]],
        own: Sequence[Any] = (),
        aliases: bool = True,
        creators: list | None = None,
    ) -> list[Any]:
        """Calls a function on each replica's thread in the default graph, one after another; they may merge.

        Args:
            calls: the function of each replica.
            own: what the coordinator's ops in the graph, such as loop variables, have for each replica.
            aliases: whether each replica gets aliases of the tensors outside that others use as well.
            creators: the stack of variable creators of the graph; None leaves it empty.

        Returns:
            What each call returned. Variables, and tensors of other graphs, became tensors of this graph.
        """
        graph = thread_state.default_graph()
        thread_state.make_stacks_thread_local(graph)
        for replica, each in enumerate(own):
            Notes.on(graph).give(replica, flat_tensors(each))
        self.captures.watch(graph, aliases)
        errands = [
            functools.partial(part.context.in_graph, graph, functools.partial(_called_in, graph, call), creators)
            for part, call in zip(self.parts, calls, strict=True)
        ]
        results = self.run.errands(errands)
        # The results stay a list, one for each replica: an operator has outputs of its own for each.
        regroup(results, f"The results of the replicas in {self.kind} ({self.where})")  # for its errors
        return results

    def building(self) -> contextlib.AbstractContextManager[object]:
        """Inside the block, gradients of joint graphs are computed by the replicas, each on its own thread."""
        return interrupts.set_for_block(_building, "operator", self)

    def inputs(self, more: Sequence[Sequence[tf.Tensor]] | None = None) -> list[list[tf.Tensor]]:
        """For each replica, what its outputs can depend on: what it captured, and `more`."""
        found = []
        for replica, captured in enumerate(self.captures.of_replica):
            tensors = {id(each): each for each in [*(more[replica] if more else ()), *captured]}
            found.append([each for each in tensors.values() if is_differentiable(each) or each.dtype == tf.resource])
        return found


_building = threading.local()


def now_building() -> JointOperator | None:
    """The operator inside whose `building` this thread is."""
    return getattr(_building, "operator", None)


def flat_tensors(structure: Any) -> list[tf.Tensor]:
    """The tensors of a structure: components of composite tensors, and the contents of TensorArrays."""
    return [
        each.flow if isinstance(each, tf.TensorArray) else each
        for each in tf.nest.flatten(structure, expand_composites=True)
        if isinstance(each, (tf.Tensor, tf.TensorArray))
    ]


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.dtype.is_floating or tensor.dtype.is_complex or tensor.dtype == tf.variant


def differentiable(structure: Any) -> list[tf.Tensor]:
    """The tensors of a structure that can have a gradient."""
    return [each for each in flat_tensors(structure) if is_differentiable(each)]


def note_constants(graph: Any, results: Any) -> None:
    """Notes in a joint graph which results of a merge the coordinator made: no gradient goes through these."""
    notes = find_notes(graph)
    if notes is not None:
        notes.constants += [
            each
            for each in tf.nest.flatten(results, expand_composites=True)
            if isinstance(each, tf.Tensor) and getattr(each, "graph", None) is graph and notes.owner(each) is None
        ]


def _called_in(graph: Any, call: Callable[[], Any]) -> Any:
    """Calls a function on a replica's thread, and makes its results the replica's own tensors of the graph."""

    def own(leaf: Any) -> Any:
        if isinstance(leaf, tf.Variable):
            return tf.convert_to_tensor(leaf)
        if isinstance(leaf, tf.Tensor) and getattr(leaf, "graph", None) is not graph:
            return graph.capture(leaf)
        return leaf

    return tf.nest.map_structure(own, call(), expand_composites=True)
