"""Calling a function once per replica: the TensorFlow side of a run.

The engine knows bodies and requests; here they become functions in replica context and merge functions in
cross-replica context. The path of one call: `call_for_each_replica` lifts a tf.function, `_run` leases
threads and makes the bodies, each body enters the inherited state and calls the function, `_merge` runs the
merge function for all of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from replica_engine._compat import autograph, distribute, function, thread_state
from replica_engine.engine import GroupPool, Replica, Run
from replica_engine.errors import note_merge_failure
from replica_engine.replica.context import MergeRequest, ReplicaContext
from replica_engine.replica.inherited import InheritedState
from replica_engine.replica.lift import lift
from replica_engine.replica.location import identity
from replica_engine.replica.regroup import regroup, select
from replica_engine.replica.variables import SharedVariables

_pools: weakref.WeakKeyDictionary[tf.distribute.Strategy, GroupPool] = weakref.WeakKeyDictionary()
_pools_lock = threading.Lock()
# The sources of functions that a strategy has run, concurrently, without a variable being created.
_creates_nothing: weakref.WeakKeyDictionary[tf.distribute.Strategy, set] = weakref.WeakKeyDictionary()


@autograph.artifact
def call_for_each_replica(
    strategy: tf.distribute.Strategy,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Runs `fn` once per replica of `strategy`, on this library's replica threads.

    Works for any `tf.distribute.Strategy` that has devices, such as TensorFlow's own MirroredStrategy; one
    replica runs on each of `strategy.extended.worker_devices`. A `tf.function` is lifted: it goes around
    the whole call, keeps its options, and is traced once per signature.

    Args:
        strategy: whose devices, variables and merge functions are used.
        fn: the function, called in replica context.
        args: its positional arguments; of a `tf.distribute.DistributedValues` each replica gets its own.
        kwargs: its keyword arguments, likewise.

    Returns:
        What `fn` returned, in the same structure, with a `tf.distribute.DistributedValues` where replicas
        differ.

    Raises:
        MergeCallMismatchError: replicas did not meet at the same merge calls.
        StructureMismatchError: replicas returned different structures.
        Exception: whatever `fn` or a merge function raised, with a note on which replica it was.

    Example:
        >>> import tensorflow as tf
        >>> from replica_engine import call_for_each_replica
        >>> strategy = tf.distribute.MirroredStrategy(["CPU:0"])
        >>> call_for_each_replica(strategy, lambda x: x + 1, args=(1,))
        2
    """
    with strategy.scope():
        if function.is_tf_function(fn) and not _collectives_inside_xla(strategy, fn):
            return lift(strategy, fn, call_for_each_replica)(*args, **(kwargs or {}))
        if not tf.executing_eagerly():
            fn = autograph.convert(fn)
        return _run(strategy, fn, tuple(args), kwargs or {})


@dataclass(frozen=True)
class ReplicaOptions:
    """How a strategy's replicas run; a strategy on this engine has them as `extended.replica_options`.

    Attributes:
        concurrent: release all replicas at once, in eager mode. A graph is always built in order.
        timeout: seconds a replica may take to its next sync point, then a ReplicaTimeoutError; None only
            warns, every 30 seconds.
        context_class: makes each replica's context.
    """

    concurrent: bool = False
    timeout: float | None = None
    context_class: type[ReplicaContext] = ReplicaContext


def _run(strategy: tf.distribute.Strategy, fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """One run of the engine: `fn` on every replica, its results regrouped."""
    options = getattr(strategy.extended, "replica_options", None) or ReplicaOptions()
    devices = strategy.extended.worker_devices
    state = InheritedState.capture()
    if not state.eager:
        thread_state.make_stacks_thread_local(state.graph)
    concurrent = options.concurrent and state.eager
    variables = SharedVariables(concurrent)
    known = _creates_nothing.setdefault(strategy, set()) if concurrent else set()
    source = identity(fn)
    coordinator = threading.get_ident()

    def body(replica: Replica) -> Any:
        """`fn`, in the inherited state and in replica context."""
        index = replica.index
        context = options.context_class(strategy, distribute.replica_id_in_sync_group(strategy, index))
        context.attach(replica, state.graph, devices[index])
        try:
            with (
                state.entered(index, context, devices[index]),
                tf.variable_creator_scope(variables.creator(replica, run.replicas[0])),
            ):
                try:
                    return fn(*select(index, args), **select(index, kwargs))
                except Exception as error:
                    failure = autograph.as_user_raised(error, (threading.get_ident(), coordinator))
                raise failure
        finally:
            context.detach()

    def in_own_copy_of_context(replica: Replica) -> Any:
        return state.context.copy().run(body, replica)

    with _pool(strategy, devices).lease() as group:
        run = Run(
            group,
            [in_own_copy_of_context] * len(devices),
            lambda requests: _merge(strategy, requests, run.replicas),
            concurrent=concurrent,
            builds=None if source in known else lambda: variables.any,
            timeout=options.timeout,
        )
        results = run()
        if not variables.any:
            known.add(source)
        return regroup(results, what="The results of the replicas")


def _merge(strategy: tf.distribute.Strategy, requests: list[MergeRequest], replicas: list[Replica]) -> list[Any]:
    """Runs the merge function once, on the thread that called `run`, for the requests of all replicas.

    It continues where replica 0 stands: in its name scope and variable scope, and in eager mode if the call
    was made under `tf.init_scope`. Ops in it depend on the control inputs of all replicas.
    """
    first, point = requests[0], replicas[0].sync_points[-1]
    what = f"The arguments of merge_call ({point})"
    args = regroup([request.args for request in requests], what, "args")
    kwargs = regroup([request.kwargs for request in requests], what, "kwargs")
    inputs = {op for request in requests for op in request.control_inputs}
    with (
        tf.name_scope(first.name_scope + "/" if first.name_scope else ""),
        tf.control_dependencies(inputs),
        thread_state.enter_variable_scope(first.variable_scope),
        thread_state.eager_mode(first.eager),
    ):
        try:
            merged = first.merge_fn(strategy, *args, **kwargs)
            return [select(index, merged) for index in range(len(requests))]
        except Exception as error:
            failure = autograph.as_user_raised(error, (threading.get_ident(),))
    note_merge_failure(failure, point.name, point.where)
    raise failure


def _collectives_inside_xla(strategy: tf.distribute.Strategy, fn: Any) -> bool:
    """Whether `fn` is compiled as a whole on each GPU, with collectives in place of merge calls."""
    return function.is_compiled(fn) and all("GPU" in device for device in strategy.extended.worker_devices)


def _pool(strategy: tf.distribute.Strategy, devices: Sequence[str]) -> GroupPool:
    """The strategy's replica threads. They go when the strategy goes."""
    with _pools_lock:
        pool = _pools.get(strategy)
        if pool is None:
            pool = _pools[strategy] = GroupPool([_short(device) for device in devices])
        return pool


def _short(device: str) -> str:
    spec = tf.DeviceSpec.from_string(device)
    name = f"{spec.device_type}:{spec.device_index}"
    return name if spec.job in (None, "localhost") else f"{spec.job}:{spec.task}/{name}"
