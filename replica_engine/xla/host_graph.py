"""Our variables in host graphs: the graphs of tf.functions that run on the host.

Such a graph runs without Python, so nothing could bring a variable up to date when it is read. So a function
that uses one of our variables does not capture the variable's handle but asks for it at each call, and the
asking brings the host's value up to date. Where compiled programs run in the same graph (a training step as a
tf.function, say), what they wrote is fetched after each run, for the variables that the graph uses itself:
those are *shared*.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from replica_engine._compat import variables
from replica_engine.xla.resident import Resident

T = TypeVar("T")


class Use:
    """One function's use of one of our variables.

    Attributes:
        placeholder: the variable's handle in the function's graph.
    """

    def __init__(self, placeholder: tf.Tensor):
        self.placeholder = placeholder

    @functools.cached_property
    def may_write(self) -> bool:
        """Whether the function may write to the variable; to be asked when its graph is finished."""
        return variables.may_write(self.placeholder)


class Shared:
    """The variables that one host function, with all functions in it, uses itself.

    Attributes:
        runs: how many compiled programs run in it so far.
        uses: the variables, and how each function uses them.
    """

    def __init__(self) -> None:
        self.runs = 0
        self.uses: dict[Resident, list[Use]] = {}

    def before_run(self, residents: list[Resident]) -> None:
        """The graph may have written to shared variables without our seeing it."""
        for resident in self._of(residents):
            if any(use.may_write for use in self.uses[resident]):
                resident.host_writes()

    def after_run(self, residents: list[Resident]) -> None:
        """The graph may go on to read shared variables, without our seeing that."""
        for resident in self._of(residents):
            resident.host_reads()

    def _of(self, residents: list[Resident]) -> list[Resident]:
        return [resident for resident in residents if resident in self.uses]


def shared() -> Shared:
    """Of the outermost function around here."""
    return _kept_on(variables.outermost_graph(variables.graph()), "_replica_engine_shared", Shared)


def handle(resident: Resident, replica: int) -> tf.Tensor:
    """The handle of a variable, for use in the host graph under construction."""
    graph = variables.graph()
    function = variables.function_graph(graph)
    raw = resident.handles[replica]
    if function is None or variables.is_saving():
        return raw
    uses: dict[Any, Use] = _kept_on(function, "_replica_engine_uses", dict)
    use = uses.get((resident, replica))
    if use is None:
        at_call = functools.partial(_at_call, resident, replica, uses)
        resident.asked.add(at_call)
        use = uses[resident, replica] = Use(variables.capture_at_call(function, raw, at_call))
    state = shared()
    known = state.uses.setdefault(resident, [])
    if use not in known:
        known.append(use)
    return _after_runs(graph, use.placeholder, state) if state.runs else use.placeholder


def used_before() -> list[tf.Tensor]:
    """Handles, for a run under construction, of the variables that were used before it."""
    return [handle(resident, replica) for resident in list(shared().uses) for replica in range(len(resident.handles))]


def token() -> tf.Tensor:
    """The handle of the variable that orders runs."""
    return variables.raw_handle(_token())


def ran() -> None:
    """A run was put into the graph under construction."""
    shared().runs += 1


@functools.cache
def _token() -> tf.Variable:
    with tf.init_scope(), tf.device("CPU:0"):
        return variables.ResourceVariable(0, trainable=False, name="replica_engine_token")


def _at_call(resident: Resident, replica: int, uses: dict[Any, Use]) -> tf.Tensor:
    """The handle of a variable for one call of a function that uses it."""
    if not tf.executing_eagerly():
        return handle(resident, replica)  # of a function that is called in another one
    if uses[resident, replica].may_write:
        resident.host_writes()
    else:
        resident.host_reads()
    return resident.handles[replica]


def _after_runs(graph: Any, placeholder: tf.Tensor, state: Shared) -> tf.Tensor:
    """A handle whose uses come after the runs so far; the same one until the next run."""
    cache = _kept_on(graph, "_replica_engine_after_runs", dict)
    key = id(placeholder), state.runs
    if key not in cache:
        ran = tf.raw_ops.ReadVariableOp(resource=token(), dtype=tf.int32)
        with tf.control_dependencies([ran]):
            cache[key] = tf.identity(placeholder)
        variables.copy_handle_data(placeholder, cache[key])
    return cache[key]


def _kept_on(graph: Any, name: str, make: Callable[[], T]) -> T:
    """Something that lives as long as a graph does."""
    kept = getattr(graph, name, None)
    if kept is None:
        kept = make()
        setattr(graph, name, kept)
    return kept
