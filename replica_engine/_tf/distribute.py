"""TensorFlow's distributed values, strategies and collectives, on which the strategies of this library build.

Checked on TensorFlow 2.21.0.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex

import tensorflow as tf

# TPUHardwareFeature: the message from which a tf.tpu.experimental.HardwareFeature is made; the class has no other
# constructor. An empty message stands for hardware without an embedding accelerator.
from tensorflow.core.protobuf.tpu.topology_pb2 import TPUHardwareFeature as _TPUHardwareFeature

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
# results of updates. value_container: below.
from tensorflow.python.distribute.distribute_utils import create_mirrored_variable as _create_mirrored_variable

# value_container: the distributed variable that a component belongs to.
from tensorflow.python.distribute.distribute_utils import is_mirrored, select_replica, update_regroup, value_container

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

from replica_engine._tf.thread_state import enter_creators, set_creators, variable_creators, variable_scope_store
from replica_engine.process import scoped

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
    is_entered = _distribute_lib._get_per_thread_mode().cross_replica_context is strategy
    return contextlib.nullcontext() if is_entered else strategy.scope()


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
    return scoped.variable(_merged, True)


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
