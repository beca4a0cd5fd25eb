"""The replica body while it is traced, and what its trace changes in TensorFlow.

A body is traced once and stands for all replicas at once, so a replica's id is a tensor in the body. In a host call
(`outside_compilation`) the id is that of the replica that called.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replica_engine.diagnostics import flight_record, misuse, observer
from replica_engine.diagnostics.user_frames import here
from replica_engine.engine import current_replica
from replica_engine.errors import CollectiveError, GraphModeError, LoweringError, NotInBodyError
from replica_engine.errors.base import at
from replica_engine.pjrt import accelerators
from replica_engine.pjrt.device_group import DeviceGroup
from replica_engine.process import interrupts
from replica_engine.traced_steps import supervised_call
from replica_engine.upstream import eager
from replica_engine.upstream.graphs import autograph, function_graphs, graph_walk, operators, xla_ops
from replica_engine.watch import timeline, watchdog
from replica_engine.xla import corrected_ops


def install() -> None:
    """Puts the functions of this module around TensorFlow's, once. Outside a trace, TensorFlow's do as always."""
    supervised_call.install()
    operators.FREED_GRADIENT.around(_custom_gradient)
    operators.RAGGED.around(_make_ragged)
    operators.REPEAT.around(_repeat)
    operators.REPEAT_ROWS.around(_repeat)
    xla_ops.MAKE_OP.around(_make_op)


def _custom_gradient(original: Callable[..., object], fn: object, args: object, kwargs: object) -> object:
    """A function with a gradient of its own: TensorFlow would keep the gradient, and so the graph, forever."""
    results = original(fn, args, kwargs)
    if function_graphs.in_body():
        operators.keep_by_graph(results)
    return results


def _make_op(original: Callable[..., object], kind: str, name: str | None = None, **given: Any) -> object:
    """Makes an op. XLA has no kernel for some, and the host cannot compute them, because their state is on devices."""
    if kind == "StatefulRandomBinomial" and function_graphs.in_body():
        drawn = _binomial(**given)
        # As TensorFlow's function: the structure of the outputs, whether the op has a state, the op, and its outputs.
        return None, True, drawn.op, [drawn]
    return xla_ops.update_all(original, kind, name, **given)


def _binomial(
    resource: tf.Tensor, algorithm: int, shape: tf.Tensor, counts: tf.Tensor, probs: tf.Tensor, dtype: tf.DType
) -> tf.Tensor:
    """`Generator.binomial`: the generator draws a seed on the devices, as in `make_seeds`; the host draws from it."""
    one = tf.constant(1, tf.uint64)
    state = tf.raw_ops.RngReadAndSkip(resource=resource, alg=tf.cast(algorithm, tf.int32), delta=one)
    size = 1 if algorithm == tf.random.Algorithm.THREEFRY.value else 2  # of the counter; a key and padding follow
    counter, key = (tf.bitcast(part, tf.uint64) for part in (state[:size], state[size : size + 1]))
    integers = functools.partial(tf.raw_ops.StatelessRandomUniformFullIntV2, shape=[1], alg=algorithm)
    if eager.find_container(resource) is not None:  # a generator of the scope, whose state replicas share
        replica = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.uint64)
        key = integers(key=key, counter=tf.stack([replica, 0]), dtype=tf.uint64)
    seed = tf.concat([integers(key=key, counter=counter, dtype=tf.int64), [0]], 0)
    return tf.random.stateless_binomial(shape, seed, counts, probs, tf.dtypes.as_dtype(dtype))


def _make_ragged(original: Callable[..., object], self: tf.RaggedTensor, *args: object, **kwargs: object) -> None:
    """The constructor of a ragged tensor."""
    original(self, *args, **kwargs)
    xla_ops.note_values(self)


def _repeat(
    original: Callable[..., tf.Tensor], data: object, repeats: object, axis: int | None, name: str | None = None
) -> tf.Tensor:
    """`tf.repeat`, which repeats what belongs to a row of a ragged tensor for each of its values."""
    if function_graphs.in_body() and axis == 0 and (rows := xla_ops.rows_of_values(repeats)) is not None:
        return tf.gather(data, rows, name=name)
    return original(data, repeats, axis, name)


def checked() -> contextlib.AbstractContextManager[None]:
    """Inside, a write to a `tf.TensorArray` that its size may not allow raises a LoweringError when it is traced.

    An array of a compiled program keeps the size that it is made with. XLA drops a write beyond that size without a
    word, and the sum of such an array is wrong. So a write that may let its array grow is an error, and so is one at a
    known index beyond a known size. Others are not checked: that would be a call of the host in each step of a
    recurrent layer.
    """
    sizes: dict[tf.Operation, int | None] = {}  # by the write, of the array that it wrote to

    def check(write: tf.Operation) -> None:
        if write.get_attr("resize_if_index_out_of_bounds"):
            raise LoweringError(
                f"A tf.TensorArray with dynamic_size=True is written{at(here())}. Arrays of a compiled program cannot "
                "grow. Pass the largest size: tf.TensorArray(dtype, size=n). MirroredStrategy runs the function "
                "without changes."
            )
        size = sizes[write] = _size(write.inputs[0].op, sizes)
        index = tf.get_static_value(write.inputs[1])
        if size is not None and index is not None and index >= size:
            raise LoweringError(
                f"Index {index} is written{at(here())} in a tf.TensorArray of size {size}. A compiled program would "
                "drop the element without a word. Make the array large enough: tf.TensorArray(dtype, size=n)."
            )

    return graph_walk.seen({"TensorListSetItem": check})


def _size(op: tf.Operation, sizes: dict[tf.Operation, int | None]) -> int | None:
    """The size of the array that an op made or wrote to; None if it is not known."""
    while op.type == "Identity":
        op = op.inputs[0].op
    size = sizes.get(op)
    if op.type == "TensorListReserve":
        size = tf.get_static_value(op.inputs[1])
    elif op.type == "TensorListFromTensor":
        size = op.inputs[0].shape[0] if op.inputs[0].shape.rank else None
    return size


_thread = threading.local()
# These need no other replica, so they work in a branch that only some take.
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
        order: the order of its host calls, a `host_call.CallOrder`.
        name: the name of the strategy that runs it, for timelines.
        limits: how long a launch may take.
        soft: whether ops that XLA cannot compile run on the host; None takes the setting of
            `tf.config.set_soft_device_placement`.

    Attributes:
        size: the number of replicas.
        own: how many of them run in this process.
        mesh: the devices of each replica, if it has several.
        spans: whether they are of several workers.
        platform: the platform of the devices.
        launches: records of the most recent launches.
        launched: the number of launches so far.
        steps: the number of the user's steps so far that replicas make together; a device loop has several in a launch.
        random: what its random ops draw from.
        told: the causes of warnings that were given.
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
        self.platform = devices.platform
        self._kernels = accelerators.kernels_for(devices.devices[0])
        self._names = devices.names
        self.order = order
        self.name = name
        self.limits = limits
        self.launches: deque[flight_record.LaunchRecord] = deque(maxlen=_KEPT)
        self.launched = 0
        self.steps = 0
        self.random = random
        self.last_program: Callable[[], Any] | None = None
        self.told: set[Hashable] = set()
        self.shared = misuse.Named()
        self.of_strategy = name != "xla"  # the name of programs without a strategy
        self._soft = soft

    @property
    def moves_ops(self) -> bool:
        """Whether ops that XLA cannot compile run on the host."""
        return eager.soft_placement() if self._soft is None else self._soft

    @property
    def kernels(self) -> str:
        """The platform whose kernels a trace on this thread may have, for the devices or the chips of a plan; or ""."""
        kernels: str | None = getattr(_thread, "kernels", None)
        return self._kernels if kernels is None else kernels

    @property
    def settings(self) -> Hashable:
        """What a trace depends on besides its function and arguments."""
        return self.moves_ops, self.kernels, observer.current

    @property
    def device_names(self) -> Sequence[str]:
        """The names of the devices of the replicas."""
        return self._names

    def note_launch(self, collectives: list[flight_record.CollectiveCall], began: float, ended: float) -> None:
        """Records a finished launch; `began` and `ended` are times of `time.perf_counter`, in seconds."""
        self.launches.append(flight_record.LaunchRecord(self.launched, collectives, began, ended))
        self.launched += 1

    def records(self) -> list[flight_record.SyncPointRecord]:
        """The collectives of the last launches."""
        return flight_record.launch_records(self.launches, self._names, _KEPT)

    @contextlib.contextmanager
    def compiling(self, what: str, slow: Callable[[float], str] | None = None) -> Iterator[None]:
        """Inside is a stage of compiling, `what` on timelines; `slow` makes a warning of the seconds that it takes."""
        track = timeline.Track(self.name, "compile", order=-3)
        with timeline.span(track, what, "compile"), watchdog.Wait(slow, self.limits.warn_after):
            yield

    @contextlib.contextmanager
    def entered(self, host_calls: object, collectives: list[flight_record.CollectiveCall]) -> Iterator[None]:
        """Inside, new ops belong to the body. Its host calls and collectives are added to the arguments."""
        with (
            interrupts.set_for_block(_thread, "body", self),
            interrupts.set_for_block(_thread, "calls", host_calls),
            interrupts.set_for_block(_thread, "collectives", collectives),
            xla_ops.xla_context(),
            function_graphs.intercepted(
                lambda *op: corrected_ops.replacement(*op) or self.random.replacement(*op),
                lambda inputs, first: self.random.drawn_by_each(inputs, first, self.size),
                corrected_ops.KINDS,
            ),
            graph_walk.seen(corrected_ops.CHANGED),
            checked(),
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

    # Not of contextlib, which sets the traceback of an exception: one of the user's may be frozen, and refuse that.

    def __init__(self, side: HostCallSite):
        self._side = side

    def __enter__(self) -> None:
        # No body: `replica_id()` must then be the id of the replica that called, and no op of the body's graph.
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


def tracing_for(chip: accelerators.Chip) -> contextlib.AbstractContextManager[object]:
    """Inside, this thread traces bodies for chips that need not be there."""
    return interrupts.set_for_block(_thread, "kernels", chip.platform if chip.has_kernels else "")


def note_collective(kind: str, x: tf.Tensor) -> None:
    """Records a collective of `x`, and the user's line, in the body that this thread is tracing."""
    _thread.collectives.append(flight_record.CollectiveCall(kind, here(), x.dtype, x.shape))


def gathered_host_calls() -> Any:
    """The `host_call.HostCalls` that `Body.entered` collects the host calls of this thread's body in."""
    return _thread.calls


def apart() -> contextlib.AbstractContextManager[object]:
    """Inside is a branch that only some replicas take: cross-replica operations raise an error."""
    return interrupts.set_for_block(_thread, "apart", True)


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
