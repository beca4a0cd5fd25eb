"""The replica context on a thread, and the gradient of its all-reduce.

`ReplicaContext` is what `tf.distribute.get_replica_context()` returns inside a replica.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from replica_engine.diagnostics import flight_record, observer, user_frames
from replica_engine.engine import Replica, SyncPoint, current_replica
from replica_engine.errors import CollectiveError, MergeCallGraphError, NotInReplicaError, ReplicaValueError
from replica_engine.errors.run_errors import elsewhere
from replica_engine.threads.control_flow.joint_operator import Attempts, ReplicaEntry, note_constants
from replica_engine.threads.control_flow.joint_ops import recorded
from replica_engine.threads.inherited_state import Creator, InheritedState
from replica_engine.threads.merge_checks import check_divides, check_reducible
from replica_engine.threads.shared_variables import Seeds
from replica_engine.upstream import distribute, eager, thread_state
from replica_engine.upstream.graphs import autograph, function_calls, function_graphs, operators
from replica_engine.values import replica_weights, structure

_STRATEGIES = "_replica_engine_all_reduces"  # of a graph: op name -> weak reference to the all-reduce's strategy
_names = map(f"ReplicaEngineAllReduce_{uuid.uuid4().hex}_{{}}".format, itertools.count())  # unique also after a reload


def differentiable(
    context: Any, operation: tf.distribute.ReduceOp, tensors: Sequence[tf.Tensor], reduced: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns the results of an all-reduce in a graph as tensors that have a gradient.

    On a replica the gradient is an all-reduce of the upstream gradients. It is for tapes inside a replica, and for
    `tf.gradients` inside it. A tape outside the replicas, for example around a `tf.function`, sees all replicas at
    once. Such a tape differentiates through the ops that the all-reduce consists of, as through any other ops. Its
    result is the sum of the gradients of the replicas.

    Args:
        context: the replica's context.
        operation: the operation of the all-reduce.
        tensors: the inputs of the all-reduce.
        reduced: the results of the all-reduce.
    """
    name = _registered(operation, tuple((tensor.dtype, str(tensor.shape)) for tensor in tensors))
    known = function_graphs.with_gradient(
        reduced, tensors, name, lambda *upstream: context.all_reduce(operation, list(upstream)), context.in_order
    )
    graph = tf.compat.v1.get_default_graph()
    strategies: dict[str, Any] = function_graphs.kept_on(graph, _STRATEGIES, dict)
    strategies[known[0].op.name] = weakref.ref(context.strategy)
    return known


@functools.cache
def _registered(operation: tf.distribute.ReduceOp, signature: tuple) -> str:
    """The name of the gradient for `tf.gradients`: one per signature, as a saved model has one function for each."""
    name = next(_names)
    count = len(signature)

    @tf.RegisterGradient(name)
    def gradient(op: tf.Operation | None, *upstream: Any) -> list[Any]:
        """The gradient of an op that passes on the reduced values, followed by the tensors that were reduced."""
        wanted = upstream[:count]
        context = tf.distribute.get_replica_context()
        if op is None or context is None or context.strategy is not _find_op_strategy(op):
            return [*wanted] + [None] * count
        found = iter(context.all_reduce(operation, [each for each in wanted if each is not None]))
        return [None] * count + [None if each is None else next(found) for each in wanted]

    return name


def _find_op_strategy(op: tf.Operation) -> tf.distribute.Strategy | None:
    reference = getattr(op.graph, _STRATEGIES, {}).get(op.name)
    return None if reference is None else reference()


_OPERATIONS = dict(tf.distribute.ReduceOp.__members__)
_EXTREMES = {"MAX": tf.reduce_max, "MIN": tf.reduce_min}
_DEFAULT_OPTIONS = tf.distribute.experimental.CommunicationOptions()


class MergeRequest(NamedTuple):
    """What one replica brings to a merge call, and the state in which the merge function continues.

    Attributes:
        merge_fn: the function that the replica gave to `merge_call`.
        args: its positional arguments, of this replica.
        kwargs: its keyword arguments, of this replica.
        name_scope: the name scope of TensorFlow in which the replica paused.
        variable_scope: the variable scope of TensorFlow 1 in which it paused.
        control_inputs: the operations on which the replica's next operations depend.
        eager: whether the replica runs eagerly, and does not build a graph.
    """

    merge_fn: Callable[..., Any]
    args: Any
    kwargs: Any
    name_scope: str
    variable_scope: Any
    control_inputs: Iterable
    eager: bool

    def continued(self, requests: Sequence[MergeRequest]) -> contextlib.AbstractContextManager[Any]:
        """Continues where this request's replica paused, after the control inputs of all requests."""
        nameless = not self.name_scope and not self.variable_scope.name and not tf.get_current_name_scope()
        if nameless and self.eager and tf.executing_eagerly():
            return thread_state.enter_variable_scope(self.variable_scope)
        return self._continued({op for request in requests for op in request.control_inputs})

    @contextlib.contextmanager
    def _continued(self, inputs: set) -> Iterator[None]:
        with (
            tf.name_scope(self.name_scope + "/" if self.name_scope else ""),
            tf.control_dependencies(inputs),
            thread_state.enter_variable_scope(self.variable_scope),
            thread_state.eager_mode(self.eager),
        ):
            yield


class ReplicaContext(tf.distribute.ReplicaContext):
    """A `tf.distribute.ReplicaContext` whose merge calls pause a replica thread of this library.

    Replicas get it from `tf.distribute.get_replica_context()`. The author of a strategy may subclass it and name the
    subclass in `ReplicaOptions.context_class`.

    Args:
        strategy: the strategy whose replica this is.
        replica_id_in_sync_group: the index of the replica, from 0.

    Attributes:
        device: the full name of the replica's device.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
        >>> def fn():
        ...     context = tf.distribute.get_replica_context()
        ...     return context.merge_call(lambda strategy, x: x + 1, args=(1,))
        >>> strategy.run(fn)
        2
    """

    _replica: Replica | None = None
    _graph: tf.Graph | None = None
    _scope_store: Any = None
    device: str | None = None
    _detail: tuple = ()
    _creator: Creator | None = None
    _tokens: dict[int, Any] = {}  # noqa: RUF012  # the last token of each graph; replaced, never changed here
    _is_over = False
    attempts: Any = None
    draws: Seeds | None = None

    def __init__(self, strategy: tf.distribute.Strategy, replica_id_in_sync_group: Any):
        distribute.init_context(self, strategy, replica_id_in_sync_group)

    if not TYPE_CHECKING:  # a type checker would take each name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Called for an attribute that is not found: says what to write for one that the strategy has."""
            return elsewhere(self, "replica", name)

    def attach(
        self, replica: Replica, state: InheritedState, device: str, attempts: Attempts, creator: Creator, draws: Seeds
    ) -> None:
        """Binds the context to an engine replica and what belongs to it.

        Args:
            replica: the replica.
            state: the state of the caller of `run`.
            device: the full name of the replica's device.
            attempts: the replica's attempts at entering operators alone.
            creator: the replica's variable creator.
            draws: the seeds of its random ops.
        """
        self._replica = replica
        self._graph, self._scope_store = state.graph, state.scope_store
        self.device = device
        self.attempts, self._creator, self.draws = attempts, creator, draws
        self._tokens = {}

    def detach(self) -> None:
        """Unbinds the context at the end of the replica's body; it keeps only a weak reference to the strategy."""
        self._replica = self._graph = self._scope_store = self.attempts = self._creator = self.draws = None
        self._tokens = {}
        self._is_over = True
        distribute.hold_weakly(self)

    def in_order(self, outputs: Sequence[Any], inputs: Sequence[Any], backward: Callable[..., Any]) -> tuple:
        """Makes tapes compute the gradients of sync points in the reverse order of the sync points, on each replica.

        A tape is free to choose among gradients that do not depend on each other. If two replicas chose differently,
        each would wait in another sync point, or two different gradients would be summed. So each sync point has one
        more output for the tape, a token, which is an input of the next one in the same graph.

        Args:
            outputs: the outputs that the tape is told of.
            inputs: the inputs.
            backward: computes the gradients of `inputs` from those of `outputs`.

        Returns:
            The three, with tokens.
        """
        # By id: a token is a tensor of its graph and keeps it alive, so no other graph gets the id.
        graph = id(thread_state.default_graph())
        before = [] if graph not in self._tokens else [self._tokens[graph]]
        self._tokens[graph] = token = tf.zeros([])

        def ordered(*upstream: Any) -> list[Any]:
            return [*backward(*upstream[:-1]), *[None for _ in before]]

        return [*outputs, token], [*inputs, *before], ordered

    def runs(self, replica: Replica) -> bool:
        """Whether this is the context of a replica that is running."""
        return self._replica is replica

    @property
    def replica(self) -> Replica:
        """The replica that runs in this context."""
        assert self._replica is not None, "asked by code that runs in the replica"
        return self._replica

    @property
    def index(self) -> int:
        """The index of the replica that runs in this context."""
        return self.replica.index

    def here(self) -> str:
        """The user's line, as "file:line in function"."""
        filename, lineno, function = user_frames.user_location(self.replica)
        return f"{filename}:{lineno} in {function}"

    def in_graph(self, graph: Any, call: Callable[[], Any], creators: list | None) -> Any:
        """Calls a function on the replica's thread in a graph that all replicas build; merge calls work there."""
        before = self._graph, self._scope_store
        index, creator = self.index, self._creator
        scope = tf.name_scope(f"replica_{index}/" if index else "")
        with thread_state.in_graph_of_others(graph), tf.device(self.device), scope:
            if creators is not None and creator is not None:
                thread_state.set_creators(graph, thread_state.creators_with(creators, creator))
            try:
                self._graph, self._scope_store = graph, thread_state.variable_scope_store()
                return call()
            finally:
                self._graph, self._scope_store = before

    def enter_operator(self, kind: str, build: Callable[..., Any], payload: Any, of: object = None) -> Any:
        """Enters an operator together with the other replicas.

        Args:
            kind: the name of the operator, such as "tf.cond".
            build: builds it for all replicas, on the coordinator; takes a `JointOperator`, and returns what `recorded`
                takes for each replica.
            payload: what `build` needs of this replica.
            of: what is differentiated; replicas meet only in the gradient of the same operator.

        Returns:
            This replica's outputs.
        """
        is_trial = kind == "tf.while_loop" and thread_state.default_graph() is not self._graph
        if not is_trial:
            self._check_graph()
        taped = operators.has_tape()
        part = ReplicaEntry(self, payload, taped)
        place = user_frames.user_location(self.replica)
        eager = tf.executing_eagerly()
        point = SyncPoint(kind, *place, (kind, place, id(of)), kind, traced=not eager)
        built = self.replica.pause(point, self._request(build, part, {}, eager, is_trial))
        return recorded(self, built) if taped else built.value

    @autograph.artifact
    def merge_call(self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None) -> Any:
        """Waits for all replicas, runs `merge_fn` once for all of them, and returns this replica's part of the result.

        Works like `tf.distribute.ReplicaContext.merge_call`.

        Args:
            merge_fn: the function to call in cross-replica context, with the strategy and the regrouped arguments; it
                must be the same function on every replica.
            args: the positional arguments after the strategy.
            kwargs: the keyword arguments.

        Raises:
            ReplicaValueError: `args` is not a list or tuple.
            MergeCallMismatchError: the replicas do not meet here. `run` raises it, not this call.
        """
        if not isinstance(args, (list, tuple)):
            raise ReplicaValueError.no_positional(args)
        with _detailed(self, *self._detail, user_frames.identity(merge_fn)):
            if not autograph.is_out_of_play():
                return super().merge_call(merge_fn, args, kwargs)
            distribute.check_in_replica(self)
            return self._merge_call(merge_fn, args, {} if kwargs is None else kwargs)

    def _merge_call(self, merge_fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Pauses this replica until all replicas are here and `merge_fn` has run; returns this replica's part.

        Raises:
            MergeCallGraphError: the call is inside an inner graph, whose tensors the merge function could not see.
            NotInReplicaError: the calling thread is not running this replica.
        """
        replica = self._replica
        # A thread that a replica has started has the context too, but no turn: a pause there would stop the wrong
        # thread.
        if replica is None or current_replica() is not replica:
            raise NotInReplicaError(
                f"merge_call was called on the thread {threading.current_thread().name!r}, which is not running a "
                "replica of this context. Call it from the function that strategy.run runs, on the thread that "
                "runs it: another thread can compute values, and the replica's thread passes them to merge_call."
            )
        self._check_graph()
        eager = tf.executing_eagerly()
        point = user_frames.sync_point(merge_fn, replica, self._detail, flight_record.brought(args, kwargs), eager)
        result = replica.pause(point, self._request(merge_fn, args, kwargs, eager))
        if not eager:
            note_constants(self._graph, result)
        return result

    def _check_graph(self) -> None:
        """Checks that the replica stands in the graph where the coordinator merges.

        Raises:
            MergeNeeded: it does not, and the replica has entered an operator as an attempt.
            MergeCallGraphError: it does not.
        """
        if self.attempts.vectorizing:
            raise MergeCallGraphError(
                f"`merge_call` called in code that TensorFlow vectorizes, by {self.replica}, at {self.here()}: "
                "tf.vectorized_map, or jacobian and batch_jacobian of a tape. TensorFlow rewrites the ops of one "
                "element for all elements, and cannot rewrite what other replicas compute; the result would be wrong. "
                "Write instead:\n"
                "    tape.jacobian(y, x, experimental_use_pfor=False)   # in eager mode: "
                "tf.GradientTape(persistent=True)\n"
                "and tf.map_fn in the place of tf.vectorized_map, or one merge call for all elements outside."
            )
        if thread_state.default_graph() is not self._graph:
            if function_calls.in_dataset():
                raise MergeCallGraphError(
                    f"`merge_call` called in a function of tf.data, by {self.replica}, at {self.here()}. tf.data runs "
                    "its functions on threads of its own, apart from the step; a `for` over a tf.data.Dataset in a "
                    "tf.function is such a function too. Loop over an iterator, whose steps belong to the replica:\n"
                    "    iterator = iter(dataset)            # outside the tf.function\n"
                    "    for _ in tf.range(steps):\n"
                    "        train(next(iterator))\n"
                    "or over strategy.experimental_distribute_dataset(dataset), around strategy.run."
                )
            if self.attempts.active:
                self.attempts.merge_needed()
            raise MergeCallGraphError(
                f"`merge_call` called while defining a new graph or a tf.function, by {self.replica}, at "
                f"{self.here()}. The merge function runs where all replicas stand and cannot see tensors of a graph "
                "that one replica builds for itself: get_concrete_function, tf.init_scope, tf.py_function, or the "
                "gradient of a tf.cond or tf.while_loop that has no merge call itself. Call the function itself, or "
                "make the merge call outside: all_reduce the value before, or the gradient after."
            )

    def _request(
        self, merge_fn: Callable[..., Any], args: Any, kwargs: Any, eager: bool, elsewhere: bool = False
    ) -> MergeRequest:
        """What the replica brings to a sync point; `elsewhere` says that it stands in a graph that is thrown away."""
        name_scope = "" if elsewhere else tf.get_current_name_scope()
        control_inputs = () if eager or elsewhere else thread_state.control_inputs(self._graph)
        return MergeRequest(merge_fn, args, kwargs, name_scope, self._scope_store.current_scope, control_inputs, eager)

    @autograph.artifact
    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduces `value` over all replicas; each replica gets the result.

        Like `tf.distribute.ReplicaContext.all_reduce`, with two differences: a tensor that is the very same object on
        all replicas counts once per replica, and Python numbers count as tensors.

        Args:
            reduce_op: "SUM", "MEAN", "MIN" or "MAX", or a `tf.distribute.ReduceOp`. The gradient of a minimum or
                maximum goes in equal parts to the replicas that hold it.
            value: a tensor, `tf.IndexedSlices` or nested structure of them, with equal shapes on all replicas.
            options: `tf.distribute.experimental.CommunicationOptions`.

        Returns:
            The reduced value, in the structure of `value`.

        Raises:
            CollectiveError: `reduce_op` is not a reduction, or the dtype cannot be reduced.
        """
        name = str(getattr(reduce_op, "value", reduce_op)).upper()
        operation = _OPERATIONS.get(name)
        if operation is None:
            if name not in _EXTREMES:
                raise CollectiveError.unknown_reduction(reduce_op, sorted([*_OPERATIONS, *_EXTREMES]))
            reduce = functools.partial(self._extreme, name, options)
        else:
            reduce = functools.partial(self._all_reduce, operation, name, options)
        result = replica_weights.reduced(value, reduce)
        if observer.current is not None:
            observer.current.reduced(name, value, result)
        return result

    def _all_reduce(self, operation: Any, name: str, options: Any, value: Any) -> Any:
        with _detailed(self, "all_reduce", name):
            own = self._own(value) if isinstance(value, tf.Tensor) else tf.nest.map_structure(self._own, value)
            tensors = [own] if isinstance(own, tf.Tensor) else tf.nest.flatten(own)
            if not tensors:
                return own
            if not distribute.uses_merge_call(self._strategy):
                check_reducible(name, tensors, self.here)
                return super().all_reduce(operation, own, options)
            if self._needs_gradient(tensors):
                reduced = self._merged_with_gradient(operation, tensors, options)
            else:
                reduced = self._merged(operation, tensors, options)
            return reduced[0] if own is tensors[0] else tf.nest.pack_sequence_as(own, reduced)

    def _extreme(self, name: str, options: Any, value: Any) -> Any:
        """The minimum or maximum over replicas: TensorFlow has none across devices, so each replica takes it of all."""

        def row(leaf: Any) -> tf.Tensor:
            own = self._own(leaf)
            check_reducible(name, [own], self.here)
            return tf.convert_to_tensor(own)[tf.newaxis]

        with _detailed(self, "all_reduce", name):  # a MAX meets no MIN and no all_gather
            own = tf.nest.map_structure(row, value)
            rows = super().all_gather(own, 0, options) if tf.nest.flatten(own) else own
            return tf.nest.map_structure(lambda each: _EXTREMES[name](each, axis=0), rows)

    @staticmethod
    def _needs_gradient(tensors: list[Any]) -> bool:
        """Whether a tape may need the gradient of an all-reduce; never for sparse values."""
        if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
            return False
        return not all(map(eager.is_eager, tensors)) or eager.is_watched(tensors)

    def _merged_with_gradient(self, operation: Any, tensors: list[Any], options: Any) -> list[Any]:
        """Like `_merged`, with a gradient: an all-reduce of the upstream gradients with the same operation."""
        if not tf.executing_eagerly():
            return differentiable(self, operation, tensors, self._merged(operation, tensors, options))

        @tf.custom_gradient
        def reduced_eagerly(*values: Any) -> tuple:
            def gradient(*upstream: Any) -> Any:
                return self.all_reduce(operation, list(upstream))

            return self._merged(operation, list(values), options), gradient

        return tf.nest.flatten(reduced_eagerly(*tensors))

    def _merged(self, operation: Any, tensors: list[Any], options: Any) -> list[Any]:
        """Reduces in a merge call; the merge call is the same one whether or not this replica needs a gradient."""
        chosen = options or _DEFAULT_OPTIONS

        def batch_all_reduce(strategy: tf.distribute.Strategy, *values: Any) -> Any:
            return strategy.extended._batch_reduce_to(operation, [(value, value) for value in values], chosen)

        distribute.check_in_replica(self)
        reduced = self._merge_call(batch_all_reduce, tensors, {})
        # With one replica the result may be the input itself. A tape needs two tensors to tell them apart.
        return [
            tf.identity(new) if new is old and isinstance(new, tf.Tensor) else new
            for new, old in zip(reduced, tensors, strict=True)
        ]

    @autograph.artifact
    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenates `value` of all replicas along `axis`; each replica gets the result.

        Like `tf.distribute.ReplicaContext.all_gather`, with the differences that `all_reduce` describes.

        Args:
            value: a tensor or nested structure of tensors; shapes may differ only along `axis`.
            axis: the dimension to concatenate along.
            options: `tf.distribute.experimental.CommunicationOptions`.

        Raises:
            ReplicaValueError: `axis` is not an int.
            CollectiveError: a tensor has no such dimension.
        """
        axis = structure.as_axis("all_gather", axis)
        return replica_weights.reduced(value, functools.partial(self._all_gather, axis, options))

    def _all_gather(self, axis: int, options: Any, value: Any) -> Any:
        with _detailed(self, "all_gather", axis):
            own = tf.nest.map_structure(self._own, value)
            return super().all_gather(own, axis, options) if tf.nest.flatten(own) else own

    @autograph.artifact
    def reduce_scatter(self, value: Any, axis: int = 0) -> Any:
        """The sum of `value` over all replicas, divided along `axis`: replica i gets part i. It has a gradient.

        Args:
            value: a tensor or nested structure of tensors, of equal shapes on all replicas.
            axis: the dimension to divide; its size must be a multiple of the number of replicas.

        Raises:
            CollectiveError: a tensor has no such dimension, or its size does not divide, or cannot be summed.
        """

        def part(leaf: Any) -> tf.Tensor:
            tensor = structure.as_tensor(leaf, "A value of reduce_scatter")
            divided = check_divides("reduce_scatter", tensor, axis, self.num_replicas_in_sync)
            return self._part(self.all_reduce("SUM", tensor), divided)

        return tf.nest.map_structure(part, value)

    @autograph.artifact
    def all_to_all(self, value: Any, split_axis: int, concat_axis: int) -> Any:
        """Sends part i along `split_axis` to replica i, and joins the received parts along `concat_axis`.

        It has a gradient. The parts are joined in the order of the replicas.

        Args:
            value: a tensor or nested structure of tensors, of equal shapes on all replicas.
            split_axis: the dimension to split; its size must be a multiple of the number of replicas.
            concat_axis: the dimension to concatenate along.

        Raises:
            CollectiveError: a tensor has no such dimension, or its size does not divide.
        """

        def exchanged(leaf: Any) -> tf.Tensor:
            tensor = structure.as_tensor(leaf, "A value of all_to_all")
            split = check_divides("all_to_all", tensor, split_axis, self.num_replicas_in_sync)
            concat = check_divides("all_to_all", tensor, concat_axis, 1)
            gathered = self.all_gather(tensor[tf.newaxis], 0)
            rows = self._part(gathered, split + 1 if split >= 0 else split)  # negative if the rank is unknown
            return tf.concat(tf.unstack(rows, num=self.num_replicas_in_sync), concat)

        return tf.nest.map_structure(exchanged, value)

    def _part(self, whole: tf.Tensor, axis: int) -> tf.Tensor:
        """This replica's part of a tensor along an axis."""
        parts = tf.split(whole, self.num_replicas_in_sync, axis)
        number = tf.get_static_value(self._replica_id_in_sync_group)
        return tf.stack(parts)[self._replica_id_in_sync_group] if number is None else parts[int(number)]

    def _own(self, value: Any) -> Any:
        """Returns `value` as a tensor that only this replica has.

        Regrouping treats one object on all replicas as one value, not as N equal values, and the sum over replicas of
        one value is that value: TensorFlow returns x where the caller means N * x.
        """
        if isinstance(value, tf.IndexedSlices):
            shape = value.dense_shape  # a tuple is not a tensor, which a branch of TensorFlow's collectives wants
            shape = shape if shape is None else tf.convert_to_tensor(shape)
            return tf.IndexedSlices(self._own(value.values), tf.convert_to_tensor(value.indices), shape)
        tensor = structure.as_tensor(value, "A value of all_reduce")
        if tensor.device == self.device and (tf.executing_eagerly() or not eager.is_eager(tensor)):
            return tensor  # Only this replica runs on this device, so no other replica has this tensor.
        return tf.identity(tensor)

    @property
    def devices(self) -> list:
        """The device of this replica, in a list inside a list, as `tf.distribute` has it."""
        return super().devices if self.device is None else [[self.device]]


class _detailed:
    """Adds a detail to the merge calls inside; calls with different details do not meet: a SUM never meets a MEAN."""

    __slots__ = ("_before", "_context", "_detail")

    def __init__(self, context: ReplicaContext, *detail: Any):
        self._context, self._detail = context, detail

    def __enter__(self) -> None:
        if self._context._is_over:
            raise NotInReplicaError.used_after_run()
        self._before, self._context._detail = self._context._detail, self._detail

    def __exit__(self, *_: object) -> None:
        self._context._detail = self._before
