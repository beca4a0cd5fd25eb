"""TensorFlow's collectives between processes: their server, their launches, and how they are ended.

A worker of a job on GPUs runs a gRPC server, at which the others fetch what they need for a collective. On CPUs only
the numbers of launches are from here. TensorFlow can also start a coordination service, with heartbeats of its own. It
is left out: a job has heartbeats already, and one of two would end a step with a text that names nobody. Measured on
TensorFlow 2.21.0: a worker whose leader is killed lives on, waiting or idle, and its collectives end with an
UnavailableError about "the leader task".
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import tensorflow as tf

# CollectiveReplicaLauncher: makes the collective ops of one device. Its _next_instance_key gives the number of one
# collective, which must be equal on all workers: eagerly at once, in a tf.function at each call of the function.
from tensorflow.python.distribute.cross_device_utils import CollectiveReplicaLauncher as _Launcher

# context: abort_collective_ops, configure_coordination_service, coordination_service.
from tensorflow.python.eager import context as _context

# core: _status_to_exception makes the exception of an op that failed, of a _NotOkStatusException.
from tensorflow.python.eager import core as _core

from replica_engine.upstream.hook import Hook, StandIn

_JOINED = "the first `MultiWorkerMirroredStrategy` of several workers"
_NOT_FAILED = "passes on to TensorFlow for all other errors"
STATUS = Hook(
    "tensorflow.python.eager.core",
    "_status_to_exception",
    why="an op that fails because a worker is lost raises WorkerLostError",
    since=_JOINED,
    until=_NOT_FAILED,
)
EXECUTE = Hook(
    "tensorflow.python.eager.execute",
    "pywrap_tfe",
    why="a `tf.function`, or the making of a variable, that fails because a worker is lost raises WorkerLostError",
    since=_JOINED,
    until=_NOT_FAILED,
)

Launched = Callable[[], int | None]
"""Is called when a collective is about to be launched. It returns the number of the collective; None leaves that to
TensorFlow, which counts."""

Describe = Callable[[str, tf.Tensor], Launched]
"""Takes the kind of a collective ("all_reduce") and its operand, where it is made: eagerly or in a graph."""


def start_no_coordination_service() -> None:
    """Keeps an extended half from starting TensorFlow's coordination service, by configuring one of no type."""
    context = _context.context()
    if context.coordination_service is None:
        context.configure_coordination_service(service_type="")


def abort(message: str) -> None:
    """Ends all collectives of this process, also those to come, with an UnavailableError."""
    _context.context().abort_collective_ops(tf.errors.UNAVAILABLE, message)


def defer_in_branches(cross_device_ops: tf.distribute.CrossDeviceOps) -> None:
    """Lets a function with collectives be called in a branch of `tf.cond`, which TensorFlow fails at.

    Args:
        cross_device_ops: what makes the collectives, if it is TensorFlow's `CollectiveAllReduce`.
    """
    for each in getattr(cross_device_ops, "_launchers", ()):
        # The class is changed because TensorFlow makes the launchers itself, and takes no class for them.
        each.__class__ = _DeferringLauncher


def note_launches(cross_device_ops: tf.distribute.CrossDeviceOps, describe: Describe) -> None:
    """Calls `describe` for each collective that the first device makes, which stands for all devices of the worker.

    Args:
        cross_device_ops: TensorFlow's `CollectiveAllReduce`.
        describe: returns a function to call whenever the collective is launched.
    """
    first, *others = cross_device_ops._launchers
    first.__class__ = _NotedLauncher
    first.describe = describe
    first.has_own_keys = not others  # the numbers of all devices of a worker must be equal, and the others count


class _DeferringLauncher(_Launcher):
    """Looks up the numbers of collectives when the outermost function is called."""

    def _next_instance_key(self) -> int | tf.Tensor:
        graph = _function_graph()
        return super()._next_instance_key() if graph is None else _at_call(graph, self._next_instance_key)


class _NotedLauncher(_DeferringLauncher):
    """Describes each collective before it launches it."""

    describe: Describe
    has_own_keys: bool
    _launched: Launched | None = None

    def all_reduce(self, input_tensor: tf.Tensor, control_input: object = None, options: object = None) -> tf.Tensor:
        self._launched = self.describe("all_reduce", input_tensor)
        with made():
            return super().all_reduce(input_tensor, control_input, options)

    def _all_gather(self, input_tensor: tf.Tensor, options: object) -> tf.Tensor:
        self._launched = self.describe("all_gather", input_tensor)
        with made():
            return super()._all_gather(input_tensor, options)

    def _next_instance_key(self) -> int | tf.Tensor:
        launched, self._launched = self._launched, None
        graph = _function_graph()
        if launched is None or graph is None:
            key = None if launched is None else launched()
            if key is None or not self.has_own_keys:
                return super()._next_instance_key()
            with tf.device("CPU:0"):
                return tf.convert_to_tensor(key, tf.int32)

        def at_call() -> int | tf.Tensor:
            self._launched = launched
            return self._next_instance_key()

        return _at_call(graph, at_call)


def number(launched: Callable[[], int]) -> int | tf.Tensor:
    """The number that a function returns: now, or in the graph of a function at each call of the outermost one."""
    graph = _function_graph()
    return launched() if graph is None else _at_call(graph, launched)


def _function_graph() -> tf.Graph | None:
    """The graph of the function that is being traced; None in eager mode, and in a graph of v1."""
    if tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        return None
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):  # branches and loops cannot look up a value at each call
        graph = graph.outer_graph
    return graph if graph.building_function else None


def _at_call(graph: tf.Graph, number: Callable[[], int | tf.Tensor], key: object = None) -> tf.Tensor:
    """A number that a function looks up each time when it is called eagerly.

    If another function calls it, TensorFlow passes the look-up on to the graph of that call. A branch cannot look up
    anything: "You must feed a value for placeholder tensor". So here the graph of the function around it gets it.
    """
    key = object() if key is None else key
    look_ups = graph._function_captures.by_ref_external
    is_there = key in look_ups
    with graph.as_default():
        placeholder = graph.capture_call_time_value(number, tf.TensorSpec([], tf.int32), key=key)
    if not is_there:
        own = look_ups[key]

        @functools.wraps(own)
        def passed_on() -> object:
            outer = _function_graph()
            return own() if outer is None else [_at_call(outer, number, key)]

        look_ups[key] = passed_on
    return placeholder


@contextlib.contextmanager
def made() -> Iterator[None]:
    """Around a collective that runs eagerly, or is put into a graph, where this does nothing."""
    if not tf.executing_eagerly():
        yield
        return
    try:
        yield
        ended()
    except BaseException as error:  # an interrupt too: others may wait for this collective
        left(error)
        raise


def begun() -> None:
    """Notes that others are about to be told of a collective, which may not run here if this thread is interrupted."""
    _begun.add(threading.get_ident())


def ended() -> None:
    """Notes that this thread owes nothing: each collective that it told others of has run, or runs by itself."""
    _begun.discard(threading.get_ident())


def left(error: BaseException) -> None:
    """Notes that an exception has ended a call; if collectives of it may not have run, `on_left` is called."""
    if threading.get_ident() in _begun:
        ended()
        for each in _on_left:
            each(error)


def running() -> bool:
    """Whether a thread is in a call with collectives that others were told of."""
    return bool(_begun)


def on_left(call: Callable[[BaseException], None]) -> None:
    """Calls a function with each exception that may leave others waiting for a collective of this process."""
    _on_left.append(call)


_begun: set[int] = set()  # idents of threads: others, which read data for example, may raise meanwhile
_on_left: list[Callable[[BaseException], None]] = []


def translate_failures(translate: Callable[[int, str], BaseException | None]) -> None:
    """Replaces TensorFlow's exception where an op or a function has failed; only once per process.

    Args:
        translate: takes the code and the text of an error of TensorFlow; returns the exception to raise, or None.
    """

    def translated(of_status: Callable[[object], BaseException], status: _core._NotOkStatusException) -> BaseException:
        return translate(status.code, status.message) or of_status(status)

    STATUS.around(translated)
    EXECUTE.put(lambda own: own if isinstance(own, _WithStatuses) else _WithStatuses(own))


class _WithStatuses(StandIn):
    """TensorFlow's module of C functions, for the module that runs functions, and ops that have no quicker way.

    It raises statuses, of which `_status_to_exception` makes exceptions, as the quicker way to run an op does.
    Functions and ops such as the collective that makes a variable come this way. The exception that it raises itself
    could only be replaced in a frame of this library, which then stood in the traceback of every failed op.
    """

    def TFE_Py_Execute(self, *args: object) -> object:
        """Runs a function or an op."""
        return _raising_statuses(self._own.TFE_Py_Execute, args)

    def TFE_Py_ExecuteCancelable(self, *args: object) -> object:
        """The same, for what can be ended."""
        return _raising_statuses(self._own.TFE_Py_ExecuteCancelable, args)


def _raising_statuses(execute: Callable[..., object], args: tuple[object, ...]) -> object:
    try:
        return execute(*args)
    except tf.errors.OpError as error:
        status = _core._NotOkStatusException(error.message, error.error_code, error.experimental_payloads)
    raise status
