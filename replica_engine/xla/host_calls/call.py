"""Calls from a compiled body to the host: what a program calls.

In the program a host call is a custom call. It takes the tensors that the host works on and one number more, its
position in the order of its replica's host calls, and returns the position of the next. The number is a variable
of the body, so that wherever in loops and branches the calls are, TensorFlow keeps each replica's in their order.
Position p is of replica p mod N: that is also how the host knows which replica calls.

**A host call that fails must not stop the program.** The other replicas would wait for this one in a collective, for
ever. So an exception is noted, the call returns zeros, all later calls return zeros without doing anything, and
when the program has ended the exception is raised and what the program wrote is thrown away. So a program with
calls that can fail does not donate its variables.

What one launch has to remember is `Session`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine._tf import eager, variables, xla_ops
from replica_engine.errors import HostAccessError, HostResultError
from replica_engine.pjrt import abandoned
from replica_engine.pjrt.group import Array, DeviceGroup, needed_by_a_program
from replica_engine.pjrt.markers import HOST_CALL, host_call_parameters
from replica_engine.xla.body import HostSide, gathered_host_calls, on_host
from replica_engine.xla.host_calls.session import Kept, NoCalls, Session
from replica_engine.xla.infeed import InputQueue
from replica_engine.xla.signature.arguments import view
from replica_engine.xla.state.device_value import DeviceValue

_LATEST = "_replica_engine_position"


class CallOrder(DeviceValue):
    """The position of each replica's next host call: a variable of the body that each launch goes on with.

    Args:
        devices: where the replicas run.
    """

    def __init__(self, devices: DeviceGroup):
        with tf.init_scope(), tf.device("CPU:0"):
            self._variable = variables.ResourceVariable(0, dtype=tf.int64, trainable=False, name="call_order")
        super().__init__([variables.raw_handle(self._variable)], devices)

    def array(self) -> Array:
        """As any device value; the host has none, so what is not there begins anew."""
        array = self._array
        if array is None or array.is_deleted():
            array = self._array = self._devices.put([np.array(replica) for replica in range(self._devices.size)])
        return array

    def set_array(self, array: Array) -> None:
        """As any device value."""
        self._array = array

    def invalidate(self) -> None:
        """As any device value."""
        self._array = None


class HostCalls:
    """The host calls of one traced body.

    Args:
        size: the number of replicas.
        order: the position of each replica's next call.

    Attributes:
        calls: in the order in which they were traced.
        run: the launch that is going on.
        closures: of the user's calls.
        codes: of the user's functions.
        handles: of variables that these are known to use, and where.
        can_fail: whether there are calls of the user's, and not only those that feed a device loop.
    """

    def __init__(self, size: int, order: CallOrder):
        self.size = size
        self.calls: list[HostCall] = []
        self.can_fail = False
        self.closures: list[Any] = []
        self.codes: frozenset[CodeType] = frozenset()
        self.handles: list[tuple[tf.Tensor, str]] = []
        self.run: Session | None = None
        self._order = order
        self._gradients: dict[str, int] = {}
        self._roots = 0
        self._numbers = 0
        self.replica_ids: list[tf.Tensor] = []

    @property
    def order(self) -> tf.Tensor:
        """The handle of the variable that keeps the calls of each replica in their order."""
        return self._order.handles[0]

    def mark(self) -> tuple[int, int]:
        """What `rewind` takes."""
        return len(self.calls), self._roots

    def rewind(self, mark: tuple[int, int]) -> None:
        """Forgets the calls that were made since: the graph that they are in is given up."""
        count, self._roots = mark
        del self.calls[count:]

    def new_number(self) -> int:
        """Of a value that stays on the host."""
        self._numbers += 1
        return self._numbers

    def new_name(self) -> str:
        """Of a cluster: "0", "1", ..."""
        self._roots += 1
        return str(self._roots - 1)

    def new_gradient_name(self, of: str) -> str:
        """Of the gradient of a cluster, or of a gradient: root.uid."""
        root = of.split(".")[0]
        uid = self._gradients[root] = self._gradients.get(root, -1) + 1
        return f"{root}.{uid}"

    def emit(self, call: HostCall, operands: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds a call to the graph under construction, after all that were added before.

        Returns:
            The position of the next call, by which the gradient of this one knows it again, and its results.
        """
        handle = self._order.handles[0]
        graph = variables.graph()
        in_condition = variables.is_in_loop_condition(graph)
        position = getattr(graph, _LATEST, None) if in_condition else None
        if position is None:
            position = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int64)
        following, results = self.emit_anywhere(call, position, operands)
        if in_condition:  # XLA lets it write no variables. It has no gradient, and what comes after it does so anyway.
            setattr(graph, _LATEST, following)
        else:
            tf.raw_ops.AssignVariableOp(resource=handle, value=following)
        return following, results

    @staticmethod
    def emit_anywhere(
        call: HostCall, position: tf.Tensor, operands: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds a call to the graph, which happens after the one that `position` comes from."""
        following, *results = xla_ops.host_marker(
            HOST_CALL,
            [position, *operands],
            host_call_parameters(call.index, call.name),
            [tf.int64, *(spec.dtype for spec in call.results)],
            [[], *(spec.shape for spec in call.results)],
        )
        return following, results

    @contextlib.contextmanager
    def launched(self, devices: DeviceGroup, feed: InputQueue | None = None) -> Iterator[Session | NoCalls]:
        """A program is launched, and ends, inside; one at a time."""
        if not self.calls:
            yield NoCalls()
            return
        if not self.replica_ids:
            with tf.init_scope(), tf.device("CPU:0"):
                self.replica_ids = [tf.constant(replica) for replica in range(self.size)]
        devices.wait_for_interrupted()  # it may be one of this body, and call the host
        run = self.run = Session(devices, feed)
        try:
            yield run
        except BaseException:  # Ctrl-C, say
            self._order.invalidate()
            run.give_up()
            if not run.has_ended:
                abandoned.add(devices, calls_host=True)
            raise
        finally:
            if run.has_ended:
                self.run = None


def current_calls() -> HostCalls:
    """The host calls of the body that this thread is tracing."""
    calls: HostCalls = gathered_host_calls()
    return calls


class HostCall:
    """A call from the body to the host.

    Args:
        calls: those of the body.
        name: of the cluster.
        where: the user's line.
        results: specs of its results.

    Attributes:
        index: its number among the calls of the body.
        is_users: whether it runs a function of the user's.
        of_zeros: whether what it returns is known from a call with zeros.
    """

    is_users = True
    of_zeros = False

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
        replica = here % run.size
        token = self.next_position(run, here, replica)
        following = np.asarray(token)
        run.enter(self, replica)
        try:
            if run.is_over:
                return (following, *self.zeros)
            values = run.run(lambda: self._on_host(run, here, token, replica, arrays))
            return (following, *values)
        except BaseException as error:
            run.note(error, replica, self)
            return (following, *self.zeros)
        finally:
            run.leave(self, replica)

    def next_position(self, run: Session, position: int, replica: int) -> int:
        """The position of the replica's next call: another number for each call of a run."""
        return position + run.size

    def describe(self) -> str:
        """For messages."""
        return f"outside_compilation {self.name!r}" + (f" at {self.where}" if self.where else "")

    @property
    def zeros(self) -> list[np.ndarray]:
        """Results for nobody."""
        if self._zeros is None:
            self._zeros = [np.zeros(spec.shape, spec.dtype.as_numpy_dtype) for spec in self.results]
        return self._zeros

    def _on_host(
        self, run: Session, position: int, token: int, replica: int, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        side = HostSide(self.calls.replica_ids[replica], run.size, self.where)
        with on_host(side), needed_by_a_program(lambda: HostAccessError.devices(self.where)):
            tensors = [eager.tensor(array) for array in arrays]
            results = self.compute(run.kept[replica], position, token, tensors)
        values = [view(tensor) for tensor in results]
        for index, (value, wanted) in enumerate(zip(values, self.zeros, strict=True)):
            if getattr(value, "shape", None) != wanted.shape or value.dtype != wanted.dtype:
                given, declared = _described(results[index]), _described(self.results[index])
                raise HostResultError.other_tensor(self.name_of(index), given, declared, self.of_zeros)
        return values

    def name_of(self, result: int) -> str:
        """Where a result is in what the user's function returned."""
        return ""

    def compute(self, kept: Kept, position: int, token: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The work: of concrete tensors the results.

        Args:
            kept: what the replica's calls have kept for their gradients.
            position: of this call; of a gradient, the token of the call that it is the gradient of.
            token: what this call returns as the next position.
            tensors: what it works on.
        """
        raise NotImplementedError


def _described(tensor: Any) -> str:
    return f"a tensor of dtype {tensor.dtype.name} and shape {tensor.shape}"
