"""The replica body while it is traced: how many replicas there are, and which of them is running.

A body is traced once and stands for all replicas at once, so a replica's id is a tensor in the body. In a host call
(`outside_compilation`) the id is that of the replica that called.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine._tf import eager
from replica_engine._tf.graphs import autograph, made_ops, replaced_ops, xla_ops
from replica_engine.diagnostics.flight_record import CollectiveCall, LaunchRecord, SyncPointRecord, launch_records
from replica_engine.diagnostics.op_lines import here
from replica_engine.diagnostics.suspicions import Named
from replica_engine.engine import current_replica
from replica_engine.errors import CollectiveError, GraphModeError, NotInBodyError
from replica_engine.errors.base import at
from replica_engine.pjrt.group import DeviceGroup
from replica_engine.process import scoped
from replica_engine.telemetry import timeline
from replica_engine.telemetry.watchdog import Wait
from replica_engine.xla import array_writes, corrected_ops

_thread = threading.local()
_OF_ONE_REPLICA = ("replica_id", "num_replicas")
_KEPT = 100  # launches, and collectives of them


@autograph.artifact
def replica_id() -> tf.Tensor:
    """The id of the replica that runs this, from 0: a scalar int32 tensor, with a different value on each replica.

    Raises:
        NotInBodyError: called outside a replicated body.

    Example:
        >>> from replica_engine import xla
        >>> [int(result) for result in xla.replicate(xla.replica_id, num_replicas=2)]
        [0, 1]
    """
    if (side := host_call_site()) is not None:
        return side.replica
    if current("replica_id").size == 1:
        return tf.constant(0)  # known while tracing
    return xla_ops.replica_id()


@autograph.artifact
def num_replicas() -> int:
    """How many replicas run the body that is being traced.

    Raises:
        NotInBodyError: called outside a replicated body.

    Example:
        >>> from replica_engine import xla
        >>> xla.replicate(lambda: xla.num_replicas(), num_replicas=2)
        [2, 2]
    """
    if (side := host_call_site()) is not None:
        return side.size
    return current("num_replicas").size


class LaunchLimits(NamedTuple):
    """How long a launch may take.

    Attributes:
        timeout: seconds after which a launch is an error; None for no limit.
        warn_after: seconds after which there is a warning, repeated after each such time; None takes the process-wide
            setting.
    """

    timeout: float | None = None
    warn_after: float | None = None


class Body:
    """A replicated body that is being traced on this thread.

    Args:
        devices: where the replicas run.
        random: what its random ops draw from, a `state.random_numbers.RandomState`.
        order: the order of its host calls, a `host_calls.call.CallOrder`.
        name: the name of the strategy that runs it, for timelines.
        limits: how long a launch may take.
        soft: whether ops that XLA cannot compile run on the host; None takes the setting of
            `tf.config.set_soft_device_placement`.

    Attributes:
        size: the number of replicas.
        own: how many of them run in this process.
        mesh: the devices of each replica, if it has several.
        spans: whether they are of several workers.
        launches: records of the most recent launches.
        launched: the number of launches so far.
        steps: the number of the user's steps so far that replicas make together; a device loop has several in a launch.
        random: what its random ops draw from.
        told: what has been warned of.
        shared: the plain variables that have been warned of.
        last_program: a weak reference to the `Compiled` that was launched last; None before the first.
        of_strategy: whether a strategy runs it, so that variables can be made under a scope.
    """

    def __init__(
        self, devices: DeviceGroup, random: Any, order: Any, name: str, limits: LaunchLimits, soft: bool | None
    ):
        self.size = devices.replicas
        self.own = devices.size
        self.mesh = devices.mesh
        self.spans = devices.spans
        self._names = devices.names
        self.order = order
        self.name = name
        self.limits = limits
        self.launches: deque[LaunchRecord] = deque(maxlen=_KEPT)
        self.launched = 0
        self.steps = 0
        self.random = random
        self.last_program: Callable[[], Any] | None = None
        self.told: set[Hashable] = set()
        self.shared = Named()
        self.of_strategy = name != "xla"
        self._soft = soft

    @property
    def moves_ops(self) -> bool:
        """Whether ops that XLA cannot compile run on the host."""
        return eager.soft_placement() if self._soft is None else self._soft

    def note_launch(self, collectives: list[CollectiveCall], began: float, ended: float) -> None:
        """Records a finished launch; `began` and `ended` are times of `time.perf_counter`, in seconds."""
        self.launches.append(LaunchRecord(self.launched, collectives, began, ended))
        self.launched += 1

    def records(self) -> list[SyncPointRecord]:
        """The collectives of the last launches."""
        return launch_records(self.launches, self._names, _KEPT)

    @contextlib.contextmanager
    def compiling(self, what: str, slow: Callable[[float], str] | None = None) -> Iterator[None]:
        """Inside is a stage of compiling, `what` on timelines; `slow` makes a warning of the seconds that it takes."""
        track = timeline.Track(self.name, "compile", order=-3)
        with timeline.span(track, what, "compile"), Wait(slow, self.limits.warn_after):
            yield

    @contextlib.contextmanager
    def entered(self, host_calls: object, collectives: list[CollectiveCall]) -> Iterator[None]:
        """Inside, new ops belong to the body. Its host calls and collectives are added to the arguments."""
        with (
            scoped.attribute(_thread, "body", self),
            scoped.attribute(_thread, "calls", host_calls),
            scoped.attribute(_thread, "collectives", collectives),
            xla_ops.xla_context(),
            replaced_ops.intercepted(
                lambda *op: corrected_ops.replacement(*op) or self.random.replacement(*op),
                lambda inputs, first: self.random.drawn_by_each(inputs, first, self.size),
                corrected_ops.KINDS,
            ),
            made_ops.seen(corrected_ops.CHANGED),
            array_writes.checked(),
        ):
            yield


class HostCallSite(NamedTuple):
    """A host call that runs on this thread, or that is examined while its body is traced.

    Attributes:
        replica: the id of the replica that called.
        size: the number of replicas.
        where: the user's line.
    """

    replica: tf.Tensor
    size: int
    where: str


class on_host:
    """Inside, code belongs to a host call, and not to a body."""

    def __init__(self, side: HostCallSite):
        self._side = side

    def __enter__(self) -> None:
        self._before = in_body(), host_call_site()
        _thread.body, _thread.side = None, self._side

    def __exit__(self, *_: object) -> None:
        _thread.body, _thread.side = self._before


def host_call_site() -> HostCallSite | None:
    """The host call that this thread runs or examines, or None."""
    return getattr(_thread, "side", None)


def in_body() -> Body | None:
    """The body that this thread is tracing, or None."""
    return getattr(_thread, "body", None)


def note_collective(kind: str, where: str, x: tf.Tensor) -> None:
    """Records a collective of `x` in the body that this thread is tracing."""
    _thread.collectives.append(CollectiveCall(kind, where, x.dtype, x.shape))


def gathered_host_calls() -> Any:
    """The object that `Body.entered` collects host calls in. `host_calls.call.current_calls` knows its type."""
    return _thread.calls


def apart() -> contextlib.AbstractContextManager[object]:
    """Inside is a branch that only some replicas take: cross-replica operations raise an error."""
    return scoped.attribute(_thread, "apart", True)


def current(name: str) -> Body:
    """The body that this thread is tracing. `name` is the public function that needs a body.

    Raises:
        NotInBodyError: the thread is tracing no body, or runs a host call.
        CollectiveError: the function is a cross-replica operation, in a branch that only some replicas take.
    """
    if (side := host_call_site()) is not None:
        raise NotInBodyError(
            f"xla.{name}() was called in a function that outside_compilation runs on the host{at(side.where)}. "
            "Replicas meet on the devices: call it in the body and pass its result to outside_compilation."
        )
    body = in_body()
    if body is None or tf.executing_eagerly():
        raise _not_in_body(name, here())
    if getattr(_thread, "apart", False) and name not in _OF_ONE_REPLICA:
        raise CollectiveError.apart(name)
    return body


_OF_CONTEXT = {
    "replica_id": "replica_id_in_sync_group",
    "num_replicas": "num_replicas_in_sync",
    "cross_replica_sum": 'all_reduce("SUM", value)',
    "all_reduce": 'all_reduce("SUM", value)',
    "all_gather": "all_gather(value, axis)",
}
"""What a replica context has in place of functions of `xla`, on threads too."""


def _not_in_body(name: str, where: str) -> NotInBodyError:
    if current_replica() is None:
        return NotInBodyError(
            f"xla.{name}() works inside a function that runs on replicas, but it was called outside one{at(where)}. "
            "Call it from the function that is passed to xla.replicate(fn, inputs) or to TPUStrategy.run(fn)."
        )
    cure = "Exchange the values in a merge call, context.merge_call(merge_fn, args=(value,))"
    if name in _OF_CONTEXT:
        cure = f"Write, for both strategies, tf.distribute.get_replica_context().{_OF_CONTEXT[name]}"
    return NotInBodyError(
        f"xla.{name}() was called{at(where)} on a replica that runs on a thread, as those of MirroredStrategy do. The "
        f"functions of xla work in functions that TPUStrategy or xla.replicate compiles. {cure}."
    )


def check_mode() -> None:
    """Raises GraphModeError in a graph of tf.compat.v1: every entry point of compiled bodies does.

    A launch is an op around Python code that holds the strategy, and variables live on the devices. Both need eager
    mode or a `tf.function`; a session of TensorFlow 1 has neither. Without the check, such a program would build some
    of its ops and then fail in a place that tells nothing about the cause.
    """
    if not tf.executing_eagerly() and not tf.inside_function():
        raise GraphModeError(
            "TPUStrategy and compiled bodies run in eager mode and in tf.functions, not in a graph of "
            "tf.compat.v1. Remove the `with tf.Graph().as_default():` or tf.compat.v1.disable_eager_execution(). "
            "MirroredStrategy runs in such a graph."
        )
