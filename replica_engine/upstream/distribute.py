"""TensorFlow's distributed values, strategies and collectives, on which the strategies of this library build.

The module also has TensorFlow's reduction to one device, with changes. Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import numpy as np
import tensorflow as tf

# TPUHardwareFeature: the message from which a tf.tpu.experimental.HardwareFeature is made; the class has no other
# constructor. An empty message stands for hardware without an embedding accelerator.
from tensorflow.core.protobuf.tpu.topology_pb2 import TPUHardwareFeature as _TPUHardwareFeature

# check_destinations, get_devices_from: the devices that get a result. _simple_reduce: the sum or mean on one device.
# _simple_gather: the concatenation on one device. _devices_match: whether values are on the devices of others.
from tensorflow.python.distribute import cross_device_ops as _ops

# _push_per_thread_mode, _pop_per_thread_mode, _get_default_replica_mode: leave a strategy's scope for a while.
# require_replica_context, _require_cross_replica_or_default_context_extended: check which context is entered.
# _get_default_strategy: the strategy outside all scopes.
from tensorflow.python.distribute import distribute_lib as _distribute_lib

# The extended half of tf.distribute.MultiWorkerMirroredStrategy, to run it on replica threads.
from tensorflow.python.distribute.collective_all_reduce_strategy import (
    CollectiveAllReduceExtended as MultiWorkerMirroredExtended,
)

# resolve: the full name of a device, as TensorFlow's values and datasets spell it.
from tensorflow.python.distribute.device_util import resolve

# enter_or_assert_strategy: enters a strategy's scope, or checks that no other strategy's scope is entered.
# UpdateContext: marks the code inside as an update of one replica's component.
from tensorflow.python.distribute.distribute_lib import UpdateContext, enter_or_assert_strategy

# create_mirrored_variable: makes a distributed variable from its components, and checks synchronization and
# aggregation. is_mirrored: whether a value is the same on all replicas. select_replica, update_regroup: arguments and
# results of updates. regroup: one structure of distributed values. value_container: below.
from tensorflow.python.distribute.distribute_utils import create_mirrored_variable as _create_mirrored_variable

# value_container: the distributed variable that a component belongs to.
from tensorflow.python.distribute.distribute_utils import (
    is_mirrored,
    regroup,
    select_replica,
    update_regroup,
    value_container,
)

# The extended half of tf.distribute.MirroredStrategy: variables, datasets, updates, reductions.
from tensorflow.python.distribute.mirrored_strategy import MirroredExtended

# DistributedVariable, PerReplica and Mirrored: the types of variables, of results of `run`, and of results of
# reductions. Of these only their base class tf.distribute.DistributedValues is public; the class of that name here also
# has `values`, the value of each replica. PerReplicaSpec: the type of a PerReplica, in specs of distributed datasets.
from tensorflow.python.distribute.values import (
    DistributedValues,
    DistributedVariable,
    Mirrored,
    MirroredVariable,
    PerReplica,
    PerReplicaSpec,
    SyncOnReadVariable,
)

# _UnreadVariable: the return value of `assign` in a graph; regrouping treats it as a value, not as its variable.
from tensorflow.python.ops.resource_variable_ops import _UnreadVariable as UnreadVariable

from replica_engine.process import interrupts, ordered_sum
from replica_engine.upstream.hook import FIRST, Hook
from replica_engine.upstream.thread_state import enter_creators, set_creators, variable_creators, variable_scope_store

# Methods that TensorFlow's distributed values get. A class of this library becomes the last base of TensorFlow's class.
# So what TensorFlow's class has, or gets, stays.

_VALUES = "tensorflow.python.distribute.values"
NUMBERS = Hook(
    f"{_VALUES}.DistributedVariable",
    "__bases__",
    why="`float(variable)`, `int`, `complex`, `np.asarray(variable)` of a scalar that replicas add up",
    since=FIRST,
    until="one more base at the end, for `__float__`, `__int__`, `__complex__` and `__array__`",
)
SEVERAL = Hook(
    f"{_VALUES}.PerReplica",
    "__bases__",
    why="`float(result)`, `result + 1`, `result[0]`, `for each in result`, `result.numpy()`, `if result:` of the "
    "result of `run`: an error that says what to write",
    since=FIRST,
    until="one more base at the end; the truth of values is True as before, but for those of dtype bool",
)
_BEFORE_TENSORFLOWS = 90  # TensorFlow's own conversion of the class has priority 100


class _NumberMethods:
    """Lets float(), int() and NumPy take distributed variables, as in float(model.optimizer.learning_rate).

    NumPy finds `__array__` of the tensor behind an `ON_READ` variable otherwise, which gives no array for a scalar.
    """

    numpy: Callable[[], Any]

    def __float__(self) -> float:
        return float(self.numpy())

    def __int__(self) -> int:
        return int(self.numpy())

    def __complex__(self) -> complex:
        return complex(self.numpy())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not tf.executing_eagerly():
            raise NotImplementedError("numpy() is only available when eager execution is enabled.")  # as TensorFlow
        return np.array(self.numpy(), dtype)  # a copy, whatever `copy` is


def install_numbers() -> None:
    """Gives distributed variables the methods of `_NumberMethods`; only once per process."""
    NUMBERS.put(lambda bases: bases if _NumberMethods in bases else (*bases, _NumberMethods))


def note_writes(variable: tf.Variable, note: Callable[[tf.Variable], None]) -> tf.Variable:
    """Lets a function know of a distributed variable, and of its copies, before one is assigned or added to.

    The attributes are those of the variable: its class is TensorFlow's own, which programs compare and pickle.

    Returns:
        The variable.
    """
    if isinstance(variable, DistributedVariable):
        kind, this = type(variable), weakref.ref(variable)  # a cycle would keep the memory of the components

        def _update(*args: object, **kwargs: object) -> object:
            note(this())
            return kind._update(this(), *args, **kwargs)

        def __deepcopy__(memo: dict[int, object]) -> tf.Variable:
            return note_writes(kind.__deepcopy__(this(), memo), note)

        vars(variable).update(_update=_update, __deepcopy__=__deepcopy__)
    return variable


def refuse_several(methods: Mapping[str, Callable[..., Any]], as_tensor: Callable[..., Any]) -> None:
    """Adds methods that raise to the class of values of several replicas; only once per process.

    Args:
        methods: the methods by their names; those that the class has already, from another base than `object`, stay.
        as_tensor: raises where TensorFlow asks for a tensor, or returns NotImplemented and leaves it to TensorFlow.
    """

    def with_methods(bases: tuple[type, ...]) -> tuple[type, ...]:
        if any(base.__module__ == __name__ for base in bases):
            return bases
        tf.register_tensor_conversion_function(PerReplica, as_tensor, priority=_BEFORE_TENSORFLOWS)
        return (*bases, type("OneOfSeveral", (), {**methods, "__module__": __name__}))

    SEVERAL.put(with_methods)


# Distributed values, replica contexts and scopes.

PACKAGE = "tensorflow.python.distribute."
"""The start of the names of the modules that reduce, gather and broadcast values of replicas."""


def specs_of_replicas(spec: tf.TypeSpec) -> list[tf.TypeSpec] | None:
    """The specs of each replica's value, of the spec of a distributed value; None for any other spec."""
    return list(spec._component_specs) if isinstance(spec, PerReplicaSpec) else None


class LaterPerReplica(PerReplica):
    """A `PerReplica` whose values are made when somebody looks at them. Then it turns into a plain `PerReplica`.

    All of TensorFlow's methods look at the values as `_values`.

    Args:
        make: makes the values; called once, or by several threads that look at the same time.
    """

    def __init__(self, make: Callable[[], Sequence[object]]):
        self._make = make

    def __getattr__(self, name: str) -> Any:
        if name != "_values":  # as a plain `PerReplica`, whose class may have a method for this
            if (raising := getattr(PerReplica, "__getattr__", None)) is not None:
                return raising(self, name)
            raise AttributeError(f"'PerReplica' object has no attribute {name!r}", name=name, obj=self)
        make = vars(self).get("_make")
        if make is None:  # another thread has just made them
            return vars(self)["_values"]
        try:
            values = self._values = tuple(make())
        except AttributeError as error:  # Python would say that there is no such attribute
            raise RuntimeError("The results of a launch could not be read.") from error
        self.__class__ = PerReplica
        self.__dict__.pop("_make", None)
        return values

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        """A copy has its values."""
        len(self._values)  # makes them; from here on the class is the plain one
        return object.__reduce_ex__(self, protocol)


LaterPerReplica.__name__ = LaterPerReplica.__qualname__ = PerReplica.__name__  # as Python's own errors name it


def own_value(value: DistributedValues) -> Any:
    """The value of the replica that runs this. `_get`: as variables do it. Only in replica context."""
    return value._get()


def replica_id_in_sync_group(strategy: tf.distribute.Strategy, index: int) -> int:
    """The id of this process's replica `index` among the replicas of all processes."""
    hook = getattr(strategy.extended, "_get_replica_id_in_sync_group", None)  # one-device strategies have no hook
    return index if hook is None else int(hook(index))


def init_context(
    context: tf.distribute.ReplicaContext, strategy: tf.distribute.Strategy, index: int | tf.Tensor
) -> None:
    """Does what `ReplicaContext.__init__` does, but without its check whether an integer is a tensor (10 us)."""
    if not isinstance(index, int):
        tf.distribute.ReplicaContext.__init__(context, strategy, index)
        return
    tf.distribute.ReplicaContext.__init__(context, None, None)
    context._strategy = context._thread_context.strategy = strategy
    context._replica_id_in_sync_group = index
    context._local_replica_id = strategy.extended._get_local_replica_id(index)


def uses_merge_call(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas of a strategy meet in merge calls; otherwise each makes its own collectives."""
    return bool(strategy.extended._use_merge_call())


check_cross_replica = _distribute_lib._require_cross_replica_or_default_context_extended
"""Raises RuntimeError in replica context, and in the scope of a strategy other than that of the given extended half."""


def is_outside_scopes() -> bool:
    """Whether no strategy's scope, and no replica's context, is entered."""
    return _distribute_lib._get_per_thread_mode() is _distribute_lib._get_default_replica_mode()


check_in_replica = _distribute_lib.require_replica_context
"""Raises RuntimeError unless the given one is the current replica context."""


def hold_weakly(context: tf.distribute.ReplicaContext) -> None:
    """Makes a replica context refer to its strategy weakly; called when its run is over.

    TensorFlow's gradient of all_gather refers to the context, and TensorFlow keeps the registered gradients of every
    graph forever. Without this, a strategy that ever gathered in a graph would never be freed, nor would its threads.
    """
    strategy = weakref.proxy(context.strategy)
    context._strategy = strategy
    context._thread_context.strategy = strategy


def in_scope(strategy: tf.distribute.Strategy) -> contextlib.AbstractContextManager[object]:
    """Enters `strategy.scope()`, unless it is entered already."""
    return contextlib.nullcontext() if is_in_scope(strategy) else strategy.scope()


def is_in_scope(strategy: tf.distribute.Strategy) -> bool:
    """Whether this thread is in the scope of a strategy, and in no replica."""
    return _distribute_lib._get_per_thread_mode().cross_replica_context is strategy


def scopes() -> tuple[object, ...]:
    """What scopes of strategies this thread has entered, and what they change; for `set_scopes`."""
    graph, store = tf.compat.v1.get_default_graph(), variable_scope_store()
    return graph, [*graph._distribution_strategy_stack], variable_creators(graph), store, store.current_scope


def set_scopes(before: tuple[Any, ...]) -> None:
    """Leaves the scopes that were entered since, also where an interrupt kept TensorFlow from it."""
    graph, graph._distribution_strategy_stack, creators, store, store.current_scope = before
    if variable_creators(graph) != creators:  # TensorFlow insists on the very list that it has set
        set_creators(graph, creators)


@contextlib.contextmanager
def no_strategy() -> Iterator[None]:
    """Leaves all strategy scopes inside the block."""
    _distribute_lib._push_per_thread_mode(_distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        _distribute_lib._pop_per_thread_mode()


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Inside the block, variables are plain, as if no strategy's scope were entered.

    `no_strategy` leaves the scope but keeps the scope's variable creator on the graph. That creator would raise.
    """
    with no_strategy():
        graph = tf.compat.v1.get_default_graph()
        others = [each for each in variable_creators(graph) if not _is_of_scope(each[1])]
        with enter_creators(graph, others):
            yield


def _is_of_scope(creator: object) -> bool:
    """Whether a variable creator belongs to the scope of a strategy, including the default one, and not to the user."""
    return getattr(creator, "__module__", "") == _distribute_lib.__name__


default_strategy = _distribute_lib._get_default_strategy
"""The strategy that is current outside all scopes."""


def merged() -> contextlib.AbstractContextManager[bool]:
    """Code inside the block, in cross-replica context, makes no merge calls.

    An optimizer expects replica context and makes a merge call, unless the strategy says that none is needed.
    """
    return interrupts.variable_for_block(_merged, True)


def is_merged() -> bool:
    """Whether the code runs inside `merged`."""
    return _merged.get()


_merged: contextvars.ContextVar[bool] = contextvars.ContextVar("replica_engine_merged", default=False)


def create_variable(
    strategy: tf.distribute.Strategy,
    components: Callable[..., list[tf.Variable]],
    mirrored: type[MirroredVariable],
    on_read: type[SyncOnReadVariable],
    kwargs: dict[str, object],
) -> DistributedVariable:
    """Makes a distributed variable of one of two classes, from the components that `components(**kwargs)` returns."""
    classes = {tf.VariableSynchronization.ON_WRITE: mirrored, tf.VariableSynchronization.ON_READ: on_read}
    return _create_mirrored_variable(strategy, components, classes, {}, **kwargs)


def first_values(structure: object) -> Any:
    """The structure, with each distributed value replaced by its first value."""
    return select_replica(0, structure)


def hardware_without_embeddings() -> tf.tpu.experimental.HardwareFeature:
    """A `tf.tpu.experimental.HardwareFeature` whose `embedding_feature` is UNSUPPORTED."""
    return tf.tpu.experimental.HardwareFeature(_TPUHardwareFeature())


# Reductions. Sums of 16-bit floats are rounded once.

_NARROW = (tf.float16, tf.bfloat16)
_OPERATIONS = (tf.distribute.ReduceOp.SUM, tf.distribute.ReduceOp.MEAN)


def is_narrow(value: tf.Tensor | tf.Variable | tf.IndexedSlices) -> bool:
    """Whether a value is a tensor or a variable of 16-bit floats."""
    return not isinstance(value, tf.IndexedSlices) and value.dtype in _NARROW


def added(values: Sequence[tf.Tensor | tf.Variable]) -> tf.Tensor:
    """The sum of tensors of one dtype, on the current device; that of 16-bit floats is a float32, not yet rounded.

    It has the order of the values. In a graph, `add_n` of three and more has none: TensorFlow sorts what it adds by
    name, and begins with a value that nothing else needs any more, which depends on the moment. Of two, the order does
    not matter.
    """
    values = [tf.convert_to_tensor(value) for value in values]
    if is_narrow(values[0]):
        values = [tf.cast(value, tf.float32) for value in values]
    if len(values) < 2 or tf.executing_eagerly():
        return tf.add_n(values)
    # Behind these, TensorFlow's optimizer sees no common factor, with which it would multiply the sum instead.
    return ordered_sum(tf.identity_n(values), _add_two)


def _add_two(left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    result = tf.add_n([left, right])  # which broadcasts nothing
    # As TensorFlow's optimizer marks what it is done with; it would join the additions to an `add_n` of all.
    result.op._set_attr("_grappler_ArithmeticOptimizer_AddOpsRewriteStage", tf.compat.v1.AttrValue(b=True))
    return result


def total(values: Sequence[tf.Tensor | tf.Variable], divisor: int = 1) -> tf.Tensor:
    """The sum of tensors of one dtype, divided by a number, on the current device; 16-bit floats are rounded once.

    Rounded after each addition, a sum would depend on the order: 2048 + 1 + 1 + 1 would be 2048 or 2052.
    """
    result = added(values)
    if divisor != 1:
        result = result / divisor
    return tf.cast(result, values[0].dtype) if is_narrow(values[0]) else result


def changed(
    value: tf.Tensor | tf.IndexedSlices | None, change: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor | tf.IndexedSlices | None:
    """A tensor, or rows of a table, with other values; None stays None."""
    if value is None:
        return None
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(change(value.values), value.indices, value.dense_shape)
    return change(value)


def adds_on_one_device(value: object, destinations: object) -> bool:
    """Whether TensorFlow's mirrored strategy adds a value on one device, whatever its all-reduce is."""
    devices = _ops.get_devices_from(destinations)
    return any("cpu" in device.lower() for device in devices) or not _ops._devices_match(value, destinations)


class QuietReduction(tf.distribute.ReductionToOneDevice):
    """TensorFlow's reduction to one device, without a message for each of its first ten calls.

    `tf.distribute.ReductionToOneDevice` logs "Reduce to /job:localhost/... then broadcast to ..." at level INFO, which
    notebooks show. This class also adds 16-bit floats in float32 and rounds once.
    """

    def __init__(self) -> None:
        super().__init__(accumulation_fn=total)

    def reduce_implementation(
        self,
        reduce_op: tf.distribute.ReduceOp,
        per_replica_value: tf.distribute.DistributedValues,
        destinations: object,
        options: object,
    ) -> tf.distribute.DistributedValues:
        """The hook that reduces one value; `options` have no meaning for it."""
        device = self._first(per_replica_value, destinations)
        values = per_replica_value.values
        if reduce_op in _OPERATIONS and len(values) > 1 and is_narrow(values[0]):
            with tf.device(device):
                reduced = total(values, len(values) if reduce_op == tf.distribute.ReduceOp.MEAN else 1)
        else:
            reduced = _ops._simple_reduce(per_replica_value, device, self.accumulation_fn, reduce_op)
        return self.broadcast(reduced, destinations)

    def _gather_implementation(
        self, per_replica_value: tf.distribute.DistributedValues, destinations: object, axis: int, options: object
    ) -> tf.distribute.DistributedValues:
        """The hook that gathers one value; `options` have no meaning for it."""
        gathered = _ops._simple_gather(per_replica_value, self._first(per_replica_value, destinations), axis)
        return self.broadcast(gathered, destinations)

    def _first(self, per_replica_value: object, destinations: object) -> str:
        """The device that computes: the named one, or the first of those that get the result."""
        of = destinations if _ops.check_destinations(destinations) else per_replica_value
        return self.reduce_to_device or _ops.get_devices_from(of, self._canonicalize_devices)[0]
