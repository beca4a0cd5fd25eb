"""One run: the function once on each replica, and its merge functions once for all.

The engine handles bodies and requests. This module turns functions in replica context into bodies, and `Merge` turns
merge functions in cross-replica context into what the engine does with requests. The path of one call:
`ThreadBackend.run` lifts a `tf.function`; `_run` leases threads and makes the bodies; each body enters the inherited
state and calls the function; `Merge` runs the merge function once for all replicas, on the thread that called `run`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import tensorflow as tf

from replica_engine.backend import Arguments, Backend, Keywords
from replica_engine.diagnostics import flight_record, misuse, observer, tracebacks, user_frames
from replica_engine.diagnostics.flight_record import SyncPointRecord, SyncPoints
from replica_engine.engine import ErrandsFailed, GroupPool, Replica, Run, SyncPoint, current_replica
from replica_engine.errors import ReplicaValueError, ScopeError, base
from replica_engine.process import setup, shutdown
from replica_engine.threads import shared_variables
from replica_engine.threads.control_flow import entering as joint_hooks
from replica_engine.threads.control_flow.joint_operator import Attempts, JointOperator, ReplicaEntry
from replica_engine.threads.inherited_state import InheritedState, find_function_record
from replica_engine.threads.merge_checks import assertions, check_alike, check_variables_and_gradients
from replica_engine.threads.replica_context import MergeRequest, ReplicaContext
from replica_engine.threads.step_marks import StepMarks
from replica_engine.traced_steps import supervised_call
from replica_engine.upstream import distribute, own_attributes, thread_state
from replica_engine.upstream.graphs import autograph, function_calls, function_graphs, graph_walk, mark_ops
from replica_engine.values.regroup import parts, regroup, spread
from replica_engine.values.structure import flatten
from replica_engine.watch import timeline

Around = Callable[[SyncPoint], contextlib.AbstractContextManager[None]]
"""Takes the sync point where the replicas have met; what it returns is entered around the merge function."""


class Merge:
    """Merges the requests of all replicas of one run.

    The merge function continues where replica 0 paused: in its name scope and variable scope, and in eager mode if the
    merge call was made under `tf.init_scope`. Ops of the merge function depend on the control inputs of all replicas.

    Args:
        strategy: the strategy.
        step_marks: the marks of the step that is traced; None if it gets none.
        around: what is entered around merge functions; None for nothing.

    Attributes:
        run: the run, which needs this object before it is made.
    """

    run: Run

    def __init__(self, strategy: tf.distribute.Strategy, step_marks: StepMarks | None, around: Around | None):
        self._strategy, self._step_marks, self._around = strategy, step_marks, around

    def __call__(self, requests: list[MergeRequest]) -> list[Any]:
        """Runs the merge function of the requests; returns what it has for each replica."""
        first, points, replicas = requests[0], self.run.sync_point(), self.run.replicas
        point = points[0]
        if isinstance(first.args, ReplicaEntry):
            return _build(requests, self.run)
        check_alike(points, replicas)
        misuse.check_lines(self._strategy, points)
        what = f"The arguments of merge_call ({point})"
        args = regroup([request.args for request in requests], what, "args")
        of_kwargs = [request.kwargs for request in requests]
        kwargs = regroup(of_kwargs, what, "kwargs") if any(of_kwargs) else {}
        step_marks, around, meeting = self._step_marks, self._around, None
        if step_marks is not None and not first.eager and mark_ops.can_mark(thread_state.default_graph()):
            meeting = step_marks.met(point, requests)
        with first.continued(requests):
            try:
                checks = [] if first.eager else assertions(point, replicas, [request.args for request in requests])
                with (
                    tf.control_dependencies(checks) if checks else contextlib.nullcontext(),
                    around(point) if around else contextlib.nullcontext(),
                ):
                    merged = first.merge_fn(self._strategy, *args, **kwargs)
                results = parts(merged, len(requests), f"the result of {point.name}")
                if meeting is not None and step_marks is not None:
                    meeting.left(results, closes=thread_state.default_graph() is not step_marks.graph)
                return results
            except BaseException as error:  # of the user's merge function; an interrupt of it gets the note too
                failure = tracebacks.as_raised(error)
        # Raised here and not in the handler: there, what AutoGraph has made of the exception would become its context.
        if isinstance(failure, Exception):
            check_variables_and_gradients(first.merge_fn, point, (args, kwargs), failure)
        place = f"raised in merge function {point.name}, in cross-replica context; the replicas met at {point.where}"
        base.add_note(failure, place)
        raise failure


def _build(requests: list[MergeRequest], run: Run) -> list[Any]:
    """Builds an operator that all replicas enter together, where replica 0 stands."""
    first = requests[0]
    with first.continued(requests):
        operator = JointOperator(run, [request.args for request in requests])
        try:
            return first.merge_fn(operator)
        except ErrandsFailed as failed:
            return list(failed.outcomes)
        except Exception as error:  # of the user's branches, bodies and gradients
            failure = tracebacks.as_raised(error)
            for replica in run.replicas:
                if replica.error is error:  # so that its note goes to the exception that leaves the run
                    replica.error = failure
        finally:
            operator.captures.unwatch()
    raise failure


_log = logging.getLogger("replica_engine")
_backends: weakref.WeakKeyDictionary[tf.distribute.Strategy, ThreadBackend] = weakref.WeakKeyDictionary()
_backends_lock = threading.Lock()
_lift_lock = threading.Lock()


class ThreadBackend(Backend):
    """Runs the replicas of a strategy on this library's threads.

    Args:
        strategy: the strategy whose variables and merge functions are used.
        devices: the full names of its devices.

    Attributes:
        pool: its replica threads, which end when the strategy is freed.
        creates_nothing: the functions (by `identity`) that ran with `concurrent=True` and created no variable.
        steps: the marks of the steps that were traced, as long as their graphs live.
    """

    compiles = False

    def __init__(self, strategy: tf.distribute.Strategy, devices: Sequence[str]):
        super().__init__(strategy)
        install()  # a strategy of TensorFlow's has not done so
        self.pool = GroupPool([short_name(device) for device in devices], type(strategy).__name__)
        self.creates_nothing: set[Any] = set()
        self.steps: weakref.WeakSet[StepMarks] = weakref.WeakSet()

    def run(self, fn: Callable[..., Any], args: Arguments = (), kwargs: Keywords = None) -> Any:
        """Same as `call_for_each_replica` of this module."""
        setup.check_not_forked()
        strategy = self.strategy
        kwargs = kwargs or {}
        if not isinstance(args, (list, tuple)) or isinstance(kwargs, distribute.DistributedValues):
            size = len(strategy.extended.worker_devices)
            args, kwargs = spread(args, size, "args"), spread(kwargs, size, "kwargs")
        with distribute.in_scope(strategy):
            if function_graphs.is_tf_function(fn) and not _collectives_inside_xla(strategy, fn):
                name, thread = getattr(fn, "__name__", "a function"), threading.current_thread()
                track = timeline.Track(type(strategy).__name__, f"coordinator ({thread.name})", thread.ident or 0)
                with timeline.span(track, name, "launch"):
                    return _lift(self, fn)(*args, **kwargs)
            if not tf.executing_eagerly():
                fn = autograph.convert(fn)
            return _run(self, fn, tuple(args), kwargs)

    def sync_points(self) -> SyncPoints:
        """The last sync points of each replica, in the order of time."""
        executions = {key: last for step in list(self.steps) for key, last in step.executions().items()}
        worker = _options(self.strategy).worker
        return flight_record.records(self.pool.record.rings, self.pool.devices, worker, executions)

    def find_host_side(self, variable: tf.Variable) -> None:
        """Always None: with replica threads, a variable holds its value itself."""


def backend_on_threads(strategy: tf.distribute.Strategy, extended: tf.distribute.StrategyExtended) -> ThreadBackend:
    """The backend that runs the replicas of a strategy on threads; `extended` is the strategy's, or will be."""
    backend = _backends.get(strategy)
    if backend is None:
        with _backends_lock:
            backend = _backends.get(strategy)
            if backend is None:
                backend = _backends[strategy] = ThreadBackend(strategy, extended.worker_devices)
    return backend


@autograph.artifact
def call_for_each_replica(
    strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: Arguments = (), kwargs: Keywords = None
) -> Any:
    """Runs `fn` once per replica of `strategy`, on this library's replica threads.

    Works for any `tf.distribute.Strategy` that has devices, such as TensorFlow's own MirroredStrategy. One replica
    runs on each of `strategy.extended.worker_devices`. A `tf.function` is lifted: it goes around the whole call,
    keeps its options, and is traced once per signature.

    Args:
        strategy: the strategy whose devices, variables and merge functions are used.
        fn: the function, called in replica context.
        args: its positional arguments. Each replica gets its own value of a `tf.distribute.DistributedValues`.
            `args` itself may be a `DistributedValues` that holds one list of arguments per replica.
        kwargs: its keyword arguments, in the same way.

    Returns:
        The results of `fn`, in their structure, with a `tf.distribute.DistributedValues` wherever replicas differ.

    Raises:
        ReplicaValueError: `strategy` is none, or `args` is neither a list nor a tuple.
        MergeCallMismatchError: the replicas did not meet at the same merge calls.
        StructureMismatchError: the replicas returned different structures.
        Exception: any exception of `fn` or of a merge function, with a note that names the replica.

    Example:
        >>> import tensorflow as tf
        >>> from replica_engine import call_for_each_replica
        >>> strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        >>> call_for_each_replica(strategy, lambda x: x + 1, args=(1,))
        2
    """
    if not hasattr(strategy, "extended"):  # those of tf.compat.v1 are of another class
        raise ReplicaValueError.no_strategy(strategy)
    return backend_on_threads(strategy, strategy.extended).run(fn, args, kwargs)


@dataclass(frozen=True)
class ReplicaOptions:
    """How the replicas of a strategy run: the `extended.replica_options` of every strategy on this engine.

    Attributes:
        concurrent: release all replicas at once in eager mode. A graph is always built one replica after another.
        timeout: the seconds that a replica may take to its next sync point, and a merge function to return, before
            ReplicaTimeoutError is raised; None only warns.
        warn_after: the seconds after which a slow replica is logged; the warning repeats at the same interval. None
            takes the environment variable REPLICA_ENGINE_WARN_AFTER, or 30 if it is not set.
        context_class: the class of each replica's context.
        graph_optimizer: how much TensorFlow's graph optimizer does to a `tf.function` in which the replicas run:
            "full", "light" or "off". None is "light" on CPU devices and "full" elsewhere.
        marks: whether a step that is traced gets marks, which tell where its replicas are while it runs. None is True
            on CPU devices and False elsewhere.
        merging: takes the sync point where the replicas have met; what it returns is entered around the merge function.
        worker: the worker that this process is, if the job has several; records of sync points say it.
    """

    concurrent: bool = False
    timeout: float | None = None
    warn_after: float | None = None
    context_class: type[ReplicaContext] = ReplicaContext
    graph_optimizer: str | None = None
    marks: bool | None = None
    merging: Around | None = None
    worker: int | None = None


def _run(backend: ThreadBackend, fn: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """Does one run of the engine: runs `fn` on every replica and regroups the results."""
    strategy = backend.strategy
    options = _options(strategy)
    devices = strategy.extended.worker_devices
    of_replicas = [*zip(parts(args, len(devices), "args"), parts(kwargs, len(devices), "kwargs"), strict=True)]
    state = InheritedState()
    source = user_frames.identity(fn)
    step_marks: StepMarks | None = None
    if not state.eager:
        first_op = len(state.graph.get_operations())
        effects_wait = _effects_after_arguments(of_replicas, state.graph)
        thread_state.make_stacks_thread_local(state.graph)
        step_marks = _marks(state.graph, options, devices, backend.pool)
        if step_marks is not None:
            backend.steps.add(step_marks)
        loops = function_calls.is_in_loop(state.graph)
        # Not the strategy, which may go.
        traced = supervised_call.TracedRun(options.timeout, options.warn_after, step_marks, loops)
        function_calls.choose(
            state.graph, options.graph_optimizer or _graph_optimizer(devices), traced, supervised_call.supervise
        )
    concurrent = options.concurrent and state.eager
    variables = shared_variables.SharedVariables(concurrent)
    known = backend.creates_nothing if concurrent else set()
    decisions: dict[int, Any] = {}
    draws = shared_variables.Draws(state.graph)
    watched = None
    if observer.current is not None:
        watched = observer.current.begin(getattr(fn, "__name__", "a function"), [*map(short_name, devices)])

    def body(replica: Replica) -> Any:
        """Runs `fn` in the inherited state and in replica context."""
        index = replica.index
        replica_id = distribute.replica_id_in_sync_group(strategy, index)
        context = options.context_class(strategy, replica_id)
        creator = variables.creator(replica, run.replicas[0])
        attempts = Attempts(decisions, index == 0)
        context.attach(replica, state, devices[index], attempts, creator, shared_variables.Seeds(draws, replica_id))
        try:
            with state.entered(index, context, devices[index], creator):
                own_args, own_kwargs = of_replicas[index]
                try:
                    if watched is not None:
                        return watched.call(index, fn, own_args, own_kwargs)
                    return fn(*own_args, **own_kwargs)
                except Exception as error:  # of the user's function
                    failure = tracebacks.as_raised(error)
                raise failure
        finally:
            context.detach()

    merge = Merge(strategy, step_marks, options.merging)
    with shutdown.running(), backend.pool.lease() as group:
        run = merge.run = Run(
            group,
            [_in_own_copy(state.context, body) for _ in devices],
            merge,
            concurrent=concurrent,
            builds=None if source in known else lambda: variables.any,
            timeout=options.timeout,
            warn_after=options.warn_after,
            traces=not state.eager,
        )
        try:
            if step_marks is not None:
                step_marks.begin(of_replicas)
            with contextlib.nullcontext() if watched is None else watched.coordinated():
                own_results = run()
            if watched is not None:
                watched.end(own_results)
            results = regroup(own_results, what=f"The results of {_described(source)}")
            if step_marks is not None:
                step_marks.end(own_results)
        except BaseException as error:  # Ctrl-C too: the note says where the replicas were
            flight_record.note_failed_run(error, backend.sync_points, run.number)
            raise
        if not variables.any:
            known.add(source)
        if not state.eager:
            misuse.check_additions(strategy, state.graph, first_op)
            effects_wait()
            _check_compiled(state.graph, devices, source)
        return results


def _in_own_copy(context: contextvars.Context, body: Callable[[Replica], Any]) -> Callable[[Replica], Any]:
    """A body in a copy of the caller's context, which Python's own function enters."""
    enter: Callable[..., Any] = context.copy().run
    return functools.partial(enter, body)


def _effects_after_arguments(of_replicas: Sequence[tuple], graph: tf.Graph) -> Callable[[], None]:
    """Returns what makes the effects of the replicas in the graph wait until the arguments of all of them are there.

    Eager code behaves so by itself. In a graph, an op without inputs need not wait: when a dataset ends, the step that
    finds no batch fails, but some of its ops have already counted an iteration or decayed weights, on some replicas
    and not on others. Keras ends each epoch over a dataset of unknown length in this way.
    """
    leaves, _ = flatten(of_replicas, what="the arguments")
    tensors = [tensor for leaf in leaves for tensor in tf.nest.flatten(leaf, expand_composites=True)]
    made = [tensor.op for tensor in tensors if getattr(tensor, "graph", None) is graph]  # an eager tensor has none
    if not made or not graph.building_function:  # no op outside a loop may reach into one of TensorFlow 1
        return lambda: None
    with tf.control_dependencies(made):
        arguments = tf.no_op("arguments")
    return functools.partial(graph_walk.effects_wait, graph, len(graph.get_operations()), arguments)


def _check_compiled(graph: Any, devices: Sequence[str], source: Any) -> None:
    """Checks that XLA does not compile replicas of several CPU devices, with their variables, for one device.

    Raises:
        ScopeError: it does; TensorFlow would fail when the function runs.
    """
    places = {outside.device for outside, _ in getattr(graph, "captures", ()) if outside.dtype == tf.resource}
    if len(devices) > 1 and len(places) > 1 and "CPU" in devices[0] and function_graphs.is_being_compiled():
        raise ScopeError(
            f"strategy.run of {_described(source)} for {len(devices)} replicas is in a function with "
            "jit_compile=True: XLA compiles that for one device, and cannot use the variables of the others. "
            "Compile the model with jit_compile=False, leave jit_compile=True out of tf.function, or let XLA "
            "compile the step for all replicas:\n"
            "    strategy = replica_engine.TPUStrategy()"
        )


def _marks(graph: Any, options: ReplicaOptions, devices: Sequence[str], pool: GroupPool) -> StepMarks | None:
    """The marks of a run that is about to be traced; None if it gets none."""
    wanted = options.marks if options.marks is not None else all("CPU" in device for device in devices)
    if not wanted or not mark_ops.can_mark(graph) or function_graphs.is_being_compiled():
        return None
    return StepMarks(devices, pool.devices, pool.name, function_calls.is_in_loop(graph))


def _graph_optimizer(devices: Sequence[str]) -> str:
    """The graph optimizer's work where the user has not chosen; layouts and memory plans matter on GPUs."""
    return function_calls.LIGHT if all("CPU" in device for device in devices) else function_calls.FULL


def _options(strategy: tf.distribute.Strategy) -> ReplicaOptions:
    return getattr(strategy.extended, "replica_options", None) or ReplicaOptions()


def _described(source: Any) -> str:
    """Names the function that replicas run, for an error message; `source` is the result of `identity`."""
    if not isinstance(source, CodeType):
        return "the replicas"
    file, line = autograph.first_line(source)
    return f"`{source.co_name}` ({file}:{line})"


def sync_points(strategy: tf.distribute.Strategy) -> list[SyncPointRecord]:
    """Returns the last sync points of each replica of a strategy, in the order in which they were reached.

    Up to 100 are kept for each replica. A step inside a `tf.function` has them once, from its trace; with marks (see
    `MirroredStrategy`) their times are those of the last execution.

    Args:
        strategy: any strategy that runs on this library's replica threads.

    Raises:
        ReplicaValueError: it is no strategy.

    Example:
        >>> import replica_engine, tensorflow as tf
        >>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
        >>> context = tf.distribute.get_replica_context
        >>> result = strategy.run(lambda: context().all_reduce("SUM", tf.ones([3])))
        >>> [(point.replica, point.name, point.dtypes, point.shapes) for point in strategy.sync_points()]
        [(0, 'all_reduce', ('float32',), ((3,),))]
    """
    if not hasattr(strategy, "extended"):
        raise ReplicaValueError.no_strategy(strategy)
    backend = _backends.get(strategy)
    return SyncPoints() if backend is None else backend.sync_points()


def _collectives_inside_xla(strategy: tf.distribute.Strategy, fn: Any) -> bool:
    """Whether `fn` is compiled as a whole on each GPU, with collectives instead of merge calls."""
    return function_graphs.is_compiled(fn) and all("GPU" in device for device in strategy.extended.worker_devices)


def short_name(device: str) -> str:
    """The short form of a device's name, for messages: "CPU:1", or "worker:0/CPU:1" for a device of another task."""
    spec = tf.DeviceSpec.from_string(device)
    name = f"{spec.device_type}:{spec.device_index}"
    return name if spec.job in (None, "localhost") else f"{spec.job}:{spec.task}/{name}"


def install() -> None:
    """Puts what replica threads need around TensorFlow's functions, once: the first strategy that has them does so."""
    supervised_call.install()
    joint_hooks.install()
    shared_variables.install()
    keep_attributes()


def keep_attributes() -> None:
    """Gives each replica its own values of the attributes that a step sets; for Keras, once it is imported."""
    own_attributes.for_each_replica(_place)


def _place() -> own_attributes.ReplicaPlace | None:
    """Where this thread is, if it runs a replica."""
    replica = current_replica()
    return (
        None if replica is None else own_attributes.ReplicaPlace(replica.run.record, replica.run.number, replica.index)
    )


def _lift(backend: ThreadBackend, fn: Any) -> Callable[..., Any]:
    """Lifts a `tf.function`: returns one like it that runs its Python function on all replicas.

    Each replica could not trace its own copy. A trace holds the function's lock, so the first replica that pauses at a
    merge call inside the function would keep all other replicas out. The merge function could not see tensors of the
    replicas' graphs either. So the library unwraps the function, all replicas trace into one graph, and the
    `tf.function`, with all its options, goes around the whole run.

    The same strategy and function give the same result each time, so that it keeps its traces.

    Args:
        backend: runs the function.
        fn: a `tf.function`.
    """
    strategy = backend.strategy
    with _lift_lock:
        lifted = find_function_record(fn).lifted
        if strategy not in lifted:
            lifted[strategy] = function_graphs.clone(fn, _around(backend, fn.python_function))
        return lifted[strategy]


def _around(backend: ThreadBackend, inner: Callable[..., Any]) -> Callable[..., Any]:
    # Weakly: the lifted function is kept by the user's, which may outlive the strategy.
    backend_ref = weakref.ref(backend)

    @autograph.artifact
    def on_all_replicas(*args: Any, **kwargs: Any) -> Any:
        alive = backend_ref()
        assert alive is not None, "called by `run`, a method of the strategy"
        return alive.run(inner, args, kwargs)

    return on_all_replicas
