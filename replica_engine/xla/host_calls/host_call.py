"""Calls from a compiled body to the host, as the program makes them.

In the program a host call is a custom call. Its operands are the tensors that the host works on and one more number:
its position in the order of its replica's host calls. Its first result is the position of the next call. The number
is a variable of the body, so TensorFlow keeps each replica's calls in order, wherever in loops and branches they are.
Position p belongs to replica p mod N, which tells the host which replica calls.

**A host call that fails must never stop the program.** The other replicas would wait for this one in a collective, for
ever. So the exception is noted, the call returns zeros, and all later calls return zeros without doing anything. When
the program has ended, the exception is raised and the values that the program wrote are thrown away. So a program with
calls that can fail does not donate its variables.

`Session` holds the state of one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CodeType

import numpy as np
import tensorflow as tf

from replica_engine.errors import HostAccessError, HostResultError, base
from replica_engine.errors.program_errors import at_result
from replica_engine.pjrt import device_group
from replica_engine.pjrt.stablehlo.markers import HOST_CALL, host_call_parameters
from replica_engine.upstream import eager
from replica_engine.upstream.graphs import xla_ops
from replica_engine.xla import arguments, body
from replica_engine.xla.host_calls import closures, session
from replica_engine.xla.state.device_value import DeviceValue

_LATEST = "_replica_engine_position"


class CallOrder(DeviceValue):
    """The position of each replica's next host call: a variable of the body, which each launch continues.

    Args:
        devices: where the replicas run.
    """

    def __init__(self, devices: device_group.DeviceGroup):
        with tf.init_scope(), tf.device("CPU:0"):
            self._variable = eager.ResourceVariable(0, dtype=tf.int64, trainable=False, name="call_order")
        super().__init__([eager.raw_handle(self._variable)], devices)

    def array(self) -> device_group.Array:
        """The positions on the devices. The host has no copy of them: if they are gone, each replica starts over."""
        array = self.on_devices
        if array is None or array.is_deleted():
            array = self.on_devices = self._devices.put([np.array(replica) for replica in range(self._devices.size)])
        return array

    def invalidate(self) -> None:
        """Drops the positions: the next launch starts over."""
        self.on_devices = None


class HostCalls:
    """The host calls of one traced body.

    Args:
        size: the number of replicas.
        order: the position of each replica's next call.

    Attributes:
        calls: the calls, in the order in which they were traced.
        run: the launch in progress, if there is one.
        closures: the closures of the user's calls.
        codes: the code of the user's functions.
        handles: handles of variables that these functions are known to use, each with the user's line.
        can_fail: whether there are calls, or will be when the body is lowered.
    """

    def __init__(self, size: int, order: CallOrder):
        self.size = size
        self.calls: list[HostCall] = []
        self.can_fail = False
        self.closures: list[closures.Closure] = []
        self.codes: frozenset[CodeType] = frozenset()
        self.handles: list[tuple[tf.Tensor, str]] = []
        self.run: session.Session | None = None
        self._order = order
        self._gradients: dict[str, int] = {}
        self._roots = 0
        self._numbers = 0
        self.replica_ids: list[tf.Tensor] = []

    @property
    def order(self) -> tf.Tensor:
        """The handle of the variable that keeps each replica's calls in order."""
        return self._order.handles[0]

    def new_number(self) -> int:
        """A number for one value that stays on the host, unique in the body."""
        self._numbers += 1
        return self._numbers

    def new_name(self) -> str:
        """The name of a new cluster: "0", "1", ..."""
        self._roots += 1
        return str(self._roots - 1)

    def new_gradient_name(self, of: str) -> str:
        """The name of the gradient of a cluster, or of the gradient of a gradient: root.uid."""
        root = of.split(".")[0]
        uid = self._gradients[root] = self._gradients.get(root, -1) + 1
        return f"{root}.{uid}"

    def emit(self, call: HostCall, operands: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds a call to the graph under construction, after all calls that were added before.

        Returns:
            The position of the next call, by which the gradient of this call refers to it; and the call's results.
        """
        graph = eager.graph()
        in_condition = eager.is_in_loop_condition(graph)
        position = getattr(graph, _LATEST, None) if in_condition else None
        if position is None:
            position = tf.raw_ops.ReadVariableOp(resource=self.order, dtype=tf.int64)
        following, results = self.emit_anywhere(call, position, operands)
        if in_condition:
            # XLA does not let a loop condition write variables. It has no gradient, and later ops follow it anyway.
            setattr(graph, _LATEST, following)
        else:
            tf.raw_ops.AssignVariableOp(resource=self.order, value=following)
        return following, results

    @staticmethod
    def emit_anywhere(
        call: HostCall, position: tf.Tensor, operands: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Adds a call to the graph. It happens after the call that `position` comes from."""
        specs = [tf.TensorSpec([], tf.int64), *call.results]
        dtypes, shapes = [spec.dtype for spec in specs], [spec.shape for spec in specs]
        parameters = host_call_parameters(call.index, call.name)
        following, *results = xla_ops.marker(
            HOST_CALL, [position, *operands], parameters, dtypes, shapes, has_effect=True
        )
        return following, results

    def begin(self, devices: device_group.DeviceGroup, step: int | None, beat: Callable[[], None]) -> session.Session:
        """Called before one program of this body, which has calls, is launched; never two at once. `end` follows."""
        if not self.replica_ids:
            with tf.init_scope(), tf.device("CPU:0"):
                self.replica_ids = [tf.constant(devices.first + replica) for replica in range(devices.size)]
        devices.wait_for_interrupted()  # an abandoned program may be of this body, and still call the host
        run = self.run = session.Session(devices, step, beat)
        return run

    def end(self, run: session.Session, devices: device_group.DeviceGroup, failed: bool) -> None:
        """Called when the launch is over; `failed` if it raised, for example because of Ctrl-C."""
        try:
            if failed:
                run.leave_wait()  # again: a second exception may have come while it was left
                self._order.invalidate()
                run.give_up()
                if not run.has_ended:
                    device_group.add(devices, calls_host=True)
        finally:
            # Otherwise an abandoned program of this body still calls the host, and its calls find their session here.
            if run.has_ended:
                self.run = None


class HostCall:
    """A call from the body to the host.

    Args:
        calls: the host calls of the body.
        name: the name of the cluster.
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
        # The index is in the program, by which it finds this call: no call may ever be taken out.
        calls.calls.append(self)

    def __call__(self, position: np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """Called by the program, on a thread of the replica. The arrays are valid until it returns."""
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
        # Whatever it is, an interrupt too: the other replicas would wait for this one forever.
        except BaseException as error:
            run.note(error, replica, self)
            return (following, *self.zeros)
        finally:
            run.leave(self, replica)

    def next_position(self, run: session.Session, position: int, replica: int) -> int:
        """The position of the replica's next call: a different number for each call of a run."""
        return position + run.size

    def describe(self) -> str:
        """The call as text, with the user's line, for messages."""
        raise NotImplementedError

    @functools.cached_property
    def zeros(self) -> list[np.ndarray]:
        """Results that nothing uses: zeros of the declared shapes and dtypes."""
        return [np.zeros(spec.shape, spec.dtype.as_numpy_dtype) for spec in self.results]

    def _on_host(
        self, run: session.Session, position: int, token: int, replica: int, arrays: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        side = body.HostCallSite(self.calls.replica_ids[replica], self.calls.size, self.where)
        with body.on_host(side), device_group.needed_by_a_program(self._devices_used):
            tensors = [eager.tensor(array) for array in arrays]
            results = self.compute(run.kept[replica], position, token, tensors)
        values = [arguments.view(tensor) for tensor in results]
        # The program takes the bytes as they are: those of another shape or dtype would be other numbers.
        for index, (value, wanted) in enumerate(zip(values, self.zeros, strict=True)):
            if getattr(value, "shape", None) != wanted.shape or value.dtype != wanted.dtype:
                given, declared = _described(results[index]), _described(self.results[index])
                raise self.unlike(index, given, declared)
        return values

    def _devices_used(self) -> HostAccessError:
        return HostAccessError(
            f"The function that outside_compilation{base.at(self.where)} runs on the host uses devices: it runs a "
            "compiled body, or accesses a variable of a strategy. The devices run one program at a time, and the "
            "running program waits for this function. Use the devices before or after the run."
        )

    def unlike(self, result: int, given: str, wanted: str) -> HostResultError:
        """The error for a result that is not as the body was compiled for; `given` and `wanted` describe tensors."""
        return HostResultError(
            f"The host function returned {given}{at_result(self.result_name(result))}, but the body was compiled for "
            f"{wanted}. A host function must return the same dtype and shape each time: cast or pad the result, or "
            "declare it, @xla.returns(tf.TensorSpec(shape, dtype))."
        )

    def result_name(self, result: int) -> str:
        """The path of a result in the structure that the user's function returned."""
        return ""

    def compute(self, kept: session.Kept, position: int, token: int, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Does the work: computes the results from concrete tensors.

        Args:
            kept: the data that the replica's calls keep for their gradients.
            position: the position of this call; for a gradient, the token of the call that it differentiates.
            token: the number that this call returns as the next position.
            tensors: the operands.
        """
        raise NotImplementedError


def _described(tensor: tf.Tensor) -> str:
    return f"a tensor of dtype {tensor.dtype.name} and shape {tensor.shape}"
