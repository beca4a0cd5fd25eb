"""Variables of a strategy in host graphs: the graphs of tf.functions that run on the host.

Such a graph runs without Python, so nothing could bring a variable up to date at the moment it is read. So a function
that uses such a variable does not capture its handle. It asks for the handle at each call (`_AtCall`), and the request
brings the host's value up to date.

Compiled programs may run in the same graph: a training step as a tf.function, for example. Then, for the variables that
the graph itself uses:

- before each run, values that the graph may have written are compared with those on the devices;
- after each run, values that the program wrote are fetched.

Which variables these are is known when a function is traced, and when it is called in another function: a `HostProgram`
is the outermost function together with all functions that it calls.
"""

from __future__ import annotations

import functools
import weakref
from operator import attrgetter
from typing import Any

import tensorflow as tf

from replica_engine.diagnostics.user_frames import here
from replica_engine.errors import CaptureError, HostAccessError, base
from replica_engine.upstream import eager
from replica_engine.upstream.graphs import function_graphs, graph_walk, xla_ops
from replica_engine.xla.body import host_call_site, in_body
from replica_engine.xla.state.device_value import DeviceValue


class Use:
    """One function's use of one variable of a strategy.

    Attributes:
        placeholder: the variable's handle in the function's graph.
        on_host: whether ops of the function use the variable; False if only compiled programs in it do.
    """

    def __init__(self, placeholder: tf.Tensor):
        self.placeholder = placeholder
        self.on_host = False

    @functools.cached_property
    def may_write(self) -> bool:
        """Whether the function may write to the variable. Valid only once its graph is finished."""
        return self.on_host and eager.may_write(self.placeholder, _runs(self.placeholder.graph))


class HostProgram:
    """An outermost host function, with all functions that it calls.

    A function that was traced separately and is called in others belongs to the programs of those as well.

    Attributes:
        uses: the variables it uses, and how each function uses them.
        runs: whether compiled programs run in it.
        callers: programs that call it.
        kept: objects that must live as long as it does.
    """

    def __init__(self) -> None:
        self.uses: dict[DeviceValue, list[Use]] = {}
        self.runs = False
        self.callers: weakref.WeakSet[HostProgram] = weakref.WeakSet()
        self.kept: list[object] = []

    def before_run(self, device_values: list[DeviceValue]) -> None:
        """Called before a compiled program runs: the graph may have written to variables unnoticed."""
        for program in self._with_callers():
            for device_value in device_values:
                if any(use.may_write for use in program.uses.get(device_value, ())):
                    device_value.host_may_write()

    def after_run(self, device_values: list[DeviceValue]) -> None:
        """Called after a compiled program has run: the graph may read variables next, unnoticed."""
        for program in self._with_callers():
            for device_value in device_values:
                if any(use.on_host for use in program.uses.get(device_value, ())):
                    device_value.host_reads()

    def _with_callers(self) -> list[HostProgram]:
        return list(graph_walk.reached([self], attrgetter("callers")))


def host_program() -> HostProgram:
    """The host program that is being traced."""
    return function_graphs.kept_on(eager.outermost_graph(eager.graph()), "_replica_engine_program", HostProgram)


def handle(device_value: DeviceValue, replica: int, on_host: bool = True) -> tf.Tensor:
    """The handle of a variable, for use in the host graph under construction.

    Args:
        device_value: the variable.
        replica: the replica whose component of the variable is used.
        on_host: False for a compiled program, which already runs in order with the ops that use the variable.
    """
    function = eager.function_graph(eager.graph())
    raw = device_value.handles[replica]
    if function is None or eager.is_saving():
        return raw
    uses: dict[tuple[DeviceValue, int], Use] = function_graphs.kept_on(function, "_replica_engine_uses", dict)
    use = uses.get((device_value, replica))
    if use is None:
        at_call = _VariableAtCall(raw, host_program(), device_value, replica)
        device_value.asked.add(at_call)
        use = uses[device_value, replica] = at_call.use = Use(eager.capture_at_call(function, raw, at_call))
    use.on_host = use.on_host or on_host
    if eager.is_of_dataset(function):
        device_value.read_anywhere = True  # such a function asks only once, when the dataset is made
    known = host_program().uses.setdefault(device_value, [])
    if use not in known:
        known.append(use)
    return use.placeholder


def raw(captured: tf.Tensor | _AtCall) -> tf.Tensor:
    """A capture of a function; where the function asks for a handle at each call, the handle itself."""
    return captured._raw if isinstance(captured, _AtCall) else captured


def token() -> tf.Tensor:
    """The handle of a variable without meaning: each run writes to it, so that runs keep their order."""
    function = eager.function_graph(eager.graph())
    raw = eager.raw_handle(_token())
    if function is None:
        return raw

    def captured() -> tf.Tensor:
        return eager.capture_at_call(function, raw, _AtCall(raw, host_program()))

    return function_graphs.kept_on(function, "_replica_engine_token", captured)


def ran(op: tf.Operation) -> None:
    """Notes that an op which runs a compiled program was added to the graph under construction."""
    # Otherwise TensorFlow lets the run and reads of its variables change places.
    eager.mark_as_writing(op)
    _runs(op.graph).add(op.name)
    host_program().runs = True


class _AtCall:
    """Stands for a handle that a function captured. Each call of the function calls it to get the handle.

    To TensorFlow's savers it looks like the handle.
    """

    def __init__(self, raw: tf.Tensor, inner: HostProgram):
        self._raw = raw
        self._inner = inner

    def __call__(self) -> tf.Tensor:
        if tf.executing_eagerly():
            return self.in_eager_mode()
        outer = host_program()
        if outer is not self._inner:
            self._inner.callers.add(outer)
            outer.kept.append(self._inner)
            outer.runs = outer.runs or self._inner.runs
        return self.in_graph()

    def in_eager_mode(self) -> tf.Tensor:
        """The handle, where the function is called in eager mode."""
        return self._raw

    def in_graph(self) -> tf.Tensor:
        """The handle, where the function is called in the graph under construction."""
        return token()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class _VariableAtCall(_AtCall):
    """Stands for the handle of a variable of a strategy."""

    def __init__(self, raw: tf.Tensor, inner: HostProgram, device_value: DeviceValue, replica: int):
        super().__init__(raw, inner)
        self._device_value = device_value
        self._replica = replica
        self.use: Use  # set by `handle`: each of the two needs the other

    def in_eager_mode(self) -> tf.Tensor:
        if (side := host_call_site()) is not None:
            raise HostAccessError(
                f"The function that outside_compilation{base.at(side.where)} runs on the host calls a tf.function that "
                "uses a variable of a strategy, whose values are on the devices while the body runs. Pass the "
                "variable's value as an argument instead."
            )
        if not self.use.on_host:
            return self._raw
        if not self.use.may_write:
            self._device_value.host_reads()
        elif self._inner.runs:
            self._device_value.host_may_write()  # a loop with a run in it counts as writing even if it does not
        else:
            self._device_value.host_is_to_write()
        return self._raw

    def in_graph(self) -> tf.Tensor:
        if in_body() is not None:  # whose program takes the values on the devices
            if len(self._device_value.handles) > 1:  # the function was traced for all replicas, and the body is of one
                variable = xla_ops.variable_name(self._device_value.handles[0])
                raise CaptureError(
                    "A concrete function that was traced outside of strategy.run uses the variable "
                    f"{variable!r}{base.at(here())}. There it is one value of all replicas, and a compiled replica has "
                    "only its own. Pass the tf.function itself to strategy.run, or call it in the body: then it is "
                    "traced for a replica."
                )
            return self._raw
        return handle(self._device_value, self._replica, self.use.on_host)


@functools.cache
def _token() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return eager.ResourceVariable(0, trainable=False, name="replica_engine_token")


def _runs(graph: tf.Graph) -> set[str]:
    return function_graphs.kept_on(graph, "_replica_engine_runs", set)
