"""A step with variables of every kind around sync points, and a ledger of the values that they must have.

All numbers are integers, so sums are exact in any order and variables can be compared bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.contenders import distributed
from replica_engine import xla

WIDTH = 3

BEFORE = "before the first sync point"
BETWEEN = "between two sync points"
MERGE_BEGINS = "in merge_fn, before its update"
MERGE_ENDS = "in merge_fn, after its update"
AFTER = "after the last sync point"
END = "at the end, after all updates"
UNWINDING = "in an except block, while it is unwound"
CREATING = "in a variable's initial value"
BETWEEN_CREATIONS = "between two creations of variables"
NESTED = "in a run inside merge_fn"
SKIPS = "a sync point that some replicas skip"
STRUCTURE = "results of different structure"
HOST = "in a host call, before the updates"
HOST_LATE = "in a host call, after the updates"
LOWERING = "lowering: a variable gets as many values as a text has words"


class Arm:
    """The fault to raise in a run, and the exceptions that were raised; a body may run once `for_all` replicas."""

    def __init__(self, for_all: bool) -> None:
        self._for_all = for_all
        self.set()

    def set(self, point: str = "", who: Sequence[int] = (), make: Callable[[], BaseException] = ValueError) -> None:
        """Sets the point and the replicas that raise; none without arguments. Code that runs once raises for all."""
        self.point, self.who, self.make = point, tuple(who), make
        self.raised: list[BaseException] = []
        self.made: list[tuple[str, int]] = []

    def at(self, point: str, replica: int | None = None) -> None:
        """Called at each point, by a replica, for one by a host call, or in a merge function; may raise the fault."""
        if point == self.point:
            if replica is None and not self._for_all:
                replica = replica_id()
            if replica is None or replica in self.who:
                raise self.new()

    def new(self) -> BaseException:
        """Makes the exception, and remembers it."""
        error = self.make()
        self.raised.append(error)
        return error

    def note(self, update: str) -> None:
        """Called when a replica has updated its own component of a variable."""
        if not self._for_all:
            self.made.append((update, replica_id() or 0))


def replica_id() -> int | None:
    """The replica that runs this Python code; None in cross-replica context, and in code that runs once for all."""
    context = tf.distribute.get_replica_context()
    if context is None or context.strategy.num_replicas_in_sync == 1:
        return None if context is None else 0
    found = tf.get_static_value(context.replica_id_in_sync_group)
    return None if found is None else int(found)


class Model:
    """The variables and the steps of one strategy, which compiles bodies or does not."""

    def __init__(self, strategy: tf.distribute.Strategy, compiled: bool):
        self.strategy = strategy
        self.arm = Arm(compiled)
        self.compiled = compiled
        self.hosted = compiled  # whether steps make host calls
        self.held: list[Any] = []  # variables that `creating` made
        aggregation, on_read = tf.VariableAggregation, tf.VariableSynchronization.ON_READ
        with strategy.scope():
            self.weight = tf.Variable(tf.zeros([WIDTH]), aggregation=aggregation.SUM)
            self.count = tf.Variable(0, dtype=tf.int64, aggregation=aggregation.ONLY_FIRST_REPLICA)
            self.plain = tf.Variable(tf.zeros([WIDTH]))
            self.seen = tf.Variable(tf.zeros([WIDTH]), synchronization=on_read, aggregation=aggregation.SUM)

        def on_host(point: str) -> Callable[[Any], Any]:
            def called(x: Any) -> Any:
                self.arm.at(point, int(xla.replica_id()))
                return x

            return xla.returns(tf.TensorSpec([WIDTH], tf.float32))(called) if compiled else called

        self._early, self._late = on_host(HOST), on_host(HOST_LATE)

    def step(self, x: Any) -> Any:
        """Makes the updates of all replicas, and returns twice the sum of `x`."""
        try:
            return self._step(x)
        except BaseException:
            if self.arm.point == UNWINDING:
                raise self.arm.new() from None
            raise

    def _step(self, x: Any) -> Any:
        arm = self.arm
        context = tf.distribute.get_replica_context()
        x = self._host(x)
        arm.at(BEFORE)
        total = context.all_reduce("SUM", x)
        arm.at(BETWEEN)
        if arm.point == UNWINDING and replica_id() in arm.who:
            raise arm.new()
        if arm.point == LOWERING:
            words = tf.strings.split(tf.strings.as_string(total[0]))
            self.plain.assign(tf.strings.to_number(words))  # of a length that only the host knows
        if arm.point == SKIPS and replica_id() in arm.who:
            return total
        self.weight.assign_add(x)
        merged = context.merge_call(self._merge, args=(x,))
        arm.at(AFTER)
        self.plain.assign_add(total)
        arm.note("plain")
        with tf.control_dependencies([merged]):
            self.seen.assign_add(x)
        arm.note("seen")
        if self.compiled:
            merged = xla.outside_compilation(self._late, merged)
        arm.at(END)
        if arm.point == STRUCTURE and replica_id() in arm.who:
            return [total]
        return total + merged

    def _host(self, x: Any) -> Any:
        if not self.hosted:
            return x
        if self.compiled:
            return xla.outside_compilation(self._early, x)

        def host(x: np.ndarray, replica: np.ndarray) -> np.ndarray:
            self.arm.at(HOST, int(replica))
            return x

        context = tf.distribute.get_replica_context()
        x = tf.numpy_function(host, [x, context.replica_id_in_sync_group], tf.float32)
        return tf.ensure_shape(x, [WIDTH])

    def _merge(self, strategy: tf.distribute.Strategy, x: Any) -> Any:
        self.arm.at(MERGE_BEGINS)
        if self.arm.point == NESTED:
            strategy.run(self._nested, args=(x,))
        merged = strategy.reduce("SUM", x, axis=None)
        with tf.control_dependencies([merged]):  # in a graph, nothing else orders host calls and updates
            strategy.extended.update(self.count, lambda variable: variable.assign_add(1))
        self.arm.at(MERGE_ENDS)
        return merged

    def _nested(self, x: Any) -> Any:
        total = tf.distribute.get_replica_context().all_reduce("SUM", x)
        self.arm.at(NESTED)
        return total

    def creating(self, x: Any) -> Any:
        """Creates two variables (in a graph only the first time), and returns twice the sum of `x`."""
        total = tf.distribute.get_replica_context().all_reduce("SUM", x)
        if not self.held or tf.executing_eagerly():
            first = tf.Variable(self._initial, shape=[WIDTH], dtype=tf.float32)
            self.arm.at(BETWEEN_CREATIONS)
            second = tf.Variable(tf.ones([WIDTH]))
            self.held = [first, second]
        return total + self.held[0] + tf.distribute.get_replica_context().all_reduce("SUM", self.held[1] * x)

    def _initial(self) -> tf.Tensor:
        self.arm.at(CREATING)
        return tf.zeros([WIDTH])

    def inputs(self, numbers: np.ndarray) -> Any:
        """A row of numbers for each replica."""
        return distributed(self.strategy, numbers)

    def values(self, result: Any) -> list[np.ndarray]:
        """Each replica's value of a result or a variable."""
        return [np.asarray(value) for value in self.strategy.experimental_local_results(result)]


@dataclasses.dataclass
class Ledger:
    """The values that the variables of a model must have on each replica."""

    weight: np.ndarray
    count: int
    plain: np.ndarray
    seen: np.ndarray

    @classmethod
    def new(cls, size: int) -> Ledger:
        """The ledger of a new model."""
        rows = np.zeros([size, WIDTH], np.float32)
        return cls(np.zeros([WIDTH], np.float32), 0, rows.copy(), rows.copy())

    def whole_step(self, x: np.ndarray) -> None:
        """Records a whole step."""
        self.weight = self.weight + x.sum(axis=0)
        self.count += 1
        self.plain = self.plain + x.sum(axis=0)
        self.seen = self.seen + x

    def part_of_step(self, x: np.ndarray, point: str, made: Sequence[tuple[str, int]]) -> None:
        """Records a failed eager step: earlier merges count on all replicas, the rest on none."""
        if point not in (BEFORE, BETWEEN, UNWINDING, SKIPS):
            self.weight = self.weight + x.sum(axis=0)
        if point in (MERGE_ENDS, AFTER, END, STRUCTURE):
            self.count += 1
        for update, replica in made:  # updates of a replica's own component
            if update == "plain":
                self.plain[replica] += x.sum(axis=0)
            else:
                self.seen[replica] += x[replica]

    def rows(self) -> dict[str, list[Any]]:
        """The values of each variable, one for each replica."""
        size = len(self.plain)
        merged = {"weight": [self.weight] * size, "count": [np.int64(self.count)] * size}
        return {**merged, "plain": list(self.plain), "seen": list(self.seen)}

    def differences(self, model: Model) -> list[str]:
        """The differences between the model's variables and the ledger, bit by bit."""
        wrong = []
        for name, wanted in self.rows().items():
            found = model.values(getattr(model, name))
            if model.compiled:  # the host has one copy of each variable, and all copies of `seen`
                wanted = wanted[: len(found)]
            if [each.tobytes() for each in found] != [np.asarray(row).tobytes() for row in wanted]:
                wrong.append(f"{name} is {np.stack(found).tolist()}, not {np.stack(wanted).tolist()}")
        return wrong
