"""Calls from a compiled body to the host: what a program calls, and what one launch of it has to remember.

In the program a host call is a custom call. It takes the tensors that the host works on and one number more, its
position in the order of its replica's host calls, and returns the position of the next. The number is a variable
of the body, so that wherever in loops and branches the calls are, TensorFlow keeps each replica's in their order.
Position p is of replica p mod N: that is also how the host knows which replica calls.

**A host call that fails must not stop the program.** The other replicas would wait for this one in a collective, for
ever. So an exception is noted, the call returns zeros, all later calls return zeros without doing anything, and
when the program has ended the exception is raised and what the program wrote is thrown away. So a program with
calls that can fail does not donate its variables.

A loop whose condition comes from the host may never end on zeros. So after `_PATIENCE` more calls of each replica
a call does end the program. That is the same call on all replicas, if they run in step, so none waits for another.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from replica_engine._compat import thread_state, variables, xla_ops
from replica_engine.errors import add_note, note_host_failure
from replica_engine.pjrt.group import Array, DeviceGroup
from replica_engine.pjrt.markers import HOST_CALL, host_call_parameters
from replica_engine.replica.location import is_internal
from replica_engine.xla.arguments import view
from replica_engine.xla.body import HostSide, on_host
from replica_engine.xla.input_queue import InputQueue
from replica_engine.xla.resident import Resident

_LATEST = "_replica_engine_position"
_PATIENCE = 10_000  # host calls of a replica, about a second


class CallOrder(Resident):
    """The position of each replica's next host call: a variable of the body that starts anew with each launch.

    Args:
        devices: where the replicas run.
    """

    def __init__(self, devices: DeviceGroup):
        with tf.init_scope(), tf.device("CPU:0"):
            self._variable = variables.ResourceVariable(0, dtype=tf.int64, trainable=False, name="call_order")
        super().__init__([variables.raw_handle(self._variable)], devices)

    def array(self) -> Array:
        """As of any resident value; always the positions of the first calls."""
        return self._devices.put([np.array(replica) for replica in range(self._devices.size)])

    def set_array(self, array: Array) -> None:
        """What the program leaves behind is of no use."""


@dataclass
class _Failure:
    """A host call that raised.

    Attributes:
        error: what.
        replica: on which replica.
        call: in which call.
        times: how many calls of this one the replica had made, with this.
        step: in which step of a device loop, from 0; None in no loop.
    """

    error: BaseException
    replica: int
    call: HostCall
    times: int
    step: int | None


class HostRun:
    """One launch of a program with host calls.

    Args:
        devices: where it runs.
        can_fail: whether a call may raise.
        feed: the inputs of a device loop.

    Attributes:
        size: the number of replicas.
        can_fail: whether a call may raise.
        failures: calls that raised, in the order of time.
        kept: for each replica, by position, what gradients of a call need.
        steps: for each replica the step of a device loop that it is in, from 0; None in no loop.
    """

    def __init__(self, devices: DeviceGroup, can_fail: bool, feed: InputQueue | None):
        size = self.size = devices.size
        self.can_fail = can_fail
        self.failures: list[_Failure] = []
        self.kept: list[dict[int, Any]] = [{} for _ in range(size)]
        self.steps: list[int | None] = [None] * size
        self._times: dict[tuple[int, int], int] = {}
        self._made = [0] * size  # calls of each replica
        self._most: int | None = None  # how many more calls than this none may make
        self._lock = threading.Lock()
        self._devices = devices
        self._feed = feed
        # What the calls take over from the thread that launches: summary writers and the like.
        self._locals = thread_state.locals_of_thread()
        self._context = contextvars.copy_context()

    @property
    def is_over(self) -> bool:
        """Whether calls return zeros."""
        return self._most is not None

    def give_up(self) -> None:
        """Has all later calls return zeros, a device loop stop, and the program end if it does not by itself."""
        if self._feed is not None:
            self._feed.stop()
        with self._lock:
            if self._most is None:
                self._most = max(self._made) + _PATIENCE

    def enter(self, call: HostCall, replica: int) -> None:
        """A replica makes a call.

        Raises:
            RuntimeError: the run is over, and the program has had its time to end by itself.
        """
        self._made[replica] += 1
        if self._most is None:
            self._times[call.index, replica] = self._times.get((call.index, replica), 0) + 1
        elif self._made[replica] > self._most:
            raise RuntimeError("The run has failed, and its program does not end by itself.")

    def next_step(self, replica: int) -> list[np.ndarray] | None:
        """A replica goes on to the next step of a device loop: its part of the batch, or None at the end."""
        assert self._feed is not None, "launched with one"
        step = self.steps[replica]
        self.steps[replica] = 0 if step is None else step + 1
        self.kept[replica].clear()  # gradients are of calls of the same step
        return self._feed.take(replica)

    def run(self, fn: Callable[[], Any]) -> Any:
        """Runs `fn` as if on the thread that launched."""

        def inherited() -> Any:
            with thread_state.enter_locals(self._locals):
                return fn()

        return self._context.copy().run(inherited)

    def note(self, error: BaseException, replica: int, call: HostCall) -> None:
        """A call raised."""
        failure = _Failure(error, replica, call, self._times.get((call.index, replica), 0), self.steps[replica])
        with self._lock:
            self.failures.append(failure)
        self.give_up()

    def end(self, wait: Callable[[], None]) -> None:
        """Waits for the end of the program.

        Raises:
            Exception: the first that a call raised, with notes of where it and others were raised; or what `wait` raised.
        """
        try:
            wait()
        except Exception:
            if not self.failures:  # else the program ended for these
                raise
        for kept in self.kept:
            kept.clear()
        if self.failures:
            self._raise_first()

    def _raise_first(self) -> NoReturn:
        first = self.failures[0]
        for failure in self.failures[:8]:
            place = f"replica {failure.replica} of {self.size}, {self._devices.names[failure.replica]}"
            if failure.step is not None:
                place += f", iteration {failure.step} of the device loop"
            raised = None if failure is first else failure.error
            note_host_failure(first.error, place, failure.call.describe(), failure.times, raised)
        if len(self.failures) > 8:
            add_note(first.error, f"and {len(self.failures) - 8} more")
        raise first.error


class _NoCalls:
    """A launch of a program without host calls."""

    can_fail = False

    @staticmethod
    def end(wait: Callable[[], None]) -> None:
        """As of `HostRun`."""
        wait()


_NO_CALLS = _NoCalls()


class HostCalls:
    """The host calls of one traced body.

    Args:
        size: the number of replicas.
        order: the position of each replica's next call.

    Attributes:
        calls: in the order in which they were traced.
        run: the launch that is going on.
        can_fail: whether there are calls of the user's, and not only those that feed a device loop.
    """

    def __init__(self, size: int, order: CallOrder):
        self.size = size
        self.calls: list[HostCall] = []
        self.can_fail = False
        self.run: HostRun | None = None
        self._order = order
        self._gradients: dict[str, int] = {}
        self._roots = 0
        self.replica_ids: list[tf.Tensor] = []

    def new_name(self) -> str:
        """Of a cluster: "0", "1", ..."""
        self._roots += 1
        return str(self._roots - 1)

    def new_gradient_name(self, of: str) -> str:
        """Of the gradient of a cluster, or of a gradient: root.uid."""
        root = of.split(".")[0]
        uid = self._gradients[root] = self._gradients.get(root, -1) + 1
        return f"{root}.{uid}"

    def emit(
        self, call: HostCall, operands: Sequence[tf.Tensor], after: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds a call to the graph under construction.

        Args:
            call: which.
            operands: what it works on.
            after: of a gradient the position of the call that it is the gradient of. In the gradient of a loop
                TensorFlow knows a variable only by the handle that the loop has.

        Returns:
            Its position, by which the gradient knows it again, and its results.
        """
        handle = self._order.handles[0] if after is None else after.op.inputs[0]
        graph = variables.graph()
        in_condition = variables.is_in_loop_condition(graph)
        position = getattr(graph, _LATEST, None) if in_condition else None
        if position is None:
            position = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
        following, *results = xla_ops.host_marker(
            HOST_CALL,
            [position, *operands],
            host_call_parameters(call.index, call.name),
            [tf.int64, *(spec.dtype for spec in call.results)],
            [[], *(spec.shape for spec in call.results)],
        )
        if in_condition:  # XLA lets it write no variables. It has no gradient, and what comes after it does so anyway.
            setattr(graph, _LATEST, following)
        else:
            tf.raw_ops.AssignVariableOp(resource=handle, value=following)
        return position, results

    @contextlib.contextmanager
    def launched(self, devices: DeviceGroup, feed: InputQueue | None = None) -> Iterator[HostRun | _NoCalls]:
        """A program is launched, and ends, inside; one at a time."""
        if not self.calls:
            yield _NO_CALLS
            return
        if not self.replica_ids:
            with tf.init_scope(), tf.device("CPU:0"):
                self.replica_ids = [tf.constant(replica) for replica in range(self.size)]
        devices.wait_for_interrupted()  # it may be one of this body, and call the host
        self.run = HostRun(devices, self.can_fail, feed)
        try:
            yield self.run
            self.run = None
        except BaseException:  # Ctrl-C, say
            self.run.give_up()
            raise


class HostCall:
    """A call from the body to the host.

    Args:
        calls: those of the body.
        name: of the cluster.
        where: the user's line.
        results: specs of its results.

    Attributes:
        index: its number among the calls of the body.
    """

    def __init__(self, calls: HostCalls, name: str, where: str, results: Sequence[tf.TensorSpec]):
        self.calls = calls
        self.name = name
        self.where = where
        self.results = list(results)
        self.index = len(calls.calls)
        self._zeros: list[np.ndarray] | None = None
        calls.calls.append(self)

    def __call__(self, position: np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """What the program calls, on a thread of the replica's. The arrays are valid until it returns."""
        run = self.calls.run
        assert run is not None, "set before the launch"
        here = int(position)
        following = np.asarray(here + run.size)
        replica = here % run.size
        run.enter(self, replica)
        if run.is_over:
            return (following, *self.zeros)
        try:
            values = run.run(lambda: self._on_host(run, here, replica, arrays))
            return (following, *values)
        except BaseException as error:  # noqa: BLE001 (raised when the program has ended)
            run.note(error.with_traceback(_of_user(error.__traceback__)), replica, self)
            return (following, *self.zeros)

    def describe(self) -> str:
        """For messages."""
        return f"outside_compilation {self.name!r}" + (f" at {self.where}" if self.where else "")

    @property
    def zeros(self) -> list[np.ndarray]:
        """Results for nobody."""
        if self._zeros is None:
            self._zeros = [np.zeros(spec.shape, spec.dtype.as_numpy_dtype) for spec in self.results]
        return self._zeros

    def _on_host(self, run: HostRun, position: int, replica: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        with on_host(HostSide(self.calls.replica_ids[replica], run.size, self.where)):
            tensors = [tf.constant(array) for array in arrays]  # copies
            return [view(tensor) for tensor in self.compute(run, position, replica, tensors)]

    def compute(self, run: HostRun, position: int, replica: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The work: of concrete tensors the results, of exactly the dtypes and shapes of `results`."""
        raise NotImplementedError


def _of_user(frames: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame that is not the library's own; whole if there is none."""
    frame = frames
    while frame is not None and is_internal(frame.tb_frame.f_code.co_filename):
        frame = frame.tb_next
    return frame or frames
