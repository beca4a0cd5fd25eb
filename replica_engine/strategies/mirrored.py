"""MirroredStrategy: synchronous training on the devices of one machine, with one replica thread per device."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from replica_engine.errors import DeviceError, ReplicaValueError, base, device_errors
from replica_engine.strategies import argument_checks, on_backend
from replica_engine.strategies.extended import ExtendedHooks, ReplicaThreads, by_dtype
from replica_engine.threads import all_reduce, replica_run
from replica_engine.upstream import distribute
from replica_engine.upstream.graphs import function_calls
from replica_engine.values.table_rows import reduces_rows

_logger = logging.getLogger("replica_engine")

# If two groups of devices use one collective key, TensorFlow fails: "joining a group with size 2, but that group has
# size 4". TensorFlow's own strategies all start at key 1. Each strategy here starts at a different, much higher key.
_COLLECTIVE_KEYS = itertools.count(1_000_000, 16)

_OF_NCCL = frozenset((tf.float16, tf.float32, tf.float64, tf.int64))  # that TensorFlow's op for NCCL takes on a GPU


class MirroredExtended(ReplicaThreads, ExtendedHooks, distribute.MirroredExtended):
    """The extended half of `MirroredStrategy`: TensorFlow's own extended half, on this library's replica threads.

    Subclass it to change how values are reduced, how variables are made or how datasets are distributed. Then name
    your class in a strategy's `extended_class`. `docs/custom_strategy.md` shows an example.
    """

    def _initialize_strategy(self, devices: Sequence[str]) -> None:
        """The hook that sets up devices; it also picks the all-reduce if the user passed no `cross_device_ops`."""
        self._updates = on_backend.EagerUpdates()
        self._on_one_device = distribute.QuietReduction()
        default = self._cross_device_ops is None  # type: ignore[has-type]
        super()._initialize_strategy(devices)
        if default and all(tf.DeviceSpec.from_string(device).device_type == "CPU" for device in self._devices):
            self._cross_device_ops = all_reduce.CpuReduction()

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        """The hook that makes variables."""
        return self._updates.noted(super()._create_variable(next_creator, **kwargs))

    @reduces_rows
    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> list[Any]:
        """The hook that reduces many values at once, those of each dtype apart.

        TensorFlow refuses a batch that mixes int32 with other dtypes, and a batch of several int32 values. NCCL's and
        other operations of TensorFlow fail at any mix of dtypes. A value that all replicas share would count once.
        """
        if reduce_op == tf.distribute.ReduceOp.SUM and len(self.worker_devices) > 1:
            for value, _ in value_destination_pairs:
                if not isinstance(value, distribute.DistributedValues):
                    raise ReplicaValueError.sum_of_one(value, isinstance(value, tf.Variable))
        if self._sums_on_host():  # TensorFlow would first copy the options, once for each value
            return self._cross_device_ops.batch_reduce(reduce_op, value_destination_pairs, options)
        reduce = super()._batch_reduce_to
        return by_dtype(value_destination_pairs, lambda batch: reduce(reduce_op, batch, options))

    def _update(self, var: Any, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool) -> Any:
        """The hook that updates all components of a variable or none; see `on_backend`."""
        argument_checks.check_updated(var, args)
        update = super()._update
        if not tf.executing_eagerly():  # the graph will update all
            return update(var, fn, args, kwargs, group)
        return self._updates.make(var, fn, args, kwargs, lambda noted: update(var, noted, args, kwargs, group))

    def _get_cross_device_ops(self, value: Any) -> tf.distribute.CrossDeviceOps:
        """The operations that reduce one value.

        All values that another device must add share one object; TensorFlow makes one for each int32 value, and has no
        sum of bfloat16 by NCCL.
        """
        if self._sums_on_host():
            return self._cross_device_ops
        ops = super()._get_cross_device_ops(value)
        if isinstance(ops, tf.distribute.NcclAllReduce):
            first = value.values[0] if isinstance(value, distribute.DistributedValues) else value
            return ops if first.dtype in _OF_NCCL else self._on_one_device
        if not isinstance(ops, tf.distribute.ReductionToOneDevice):
            return ops
        return self._cross_device_ops if isinstance(self._cross_device_ops, type(ops)) else self._on_one_device

    def _sums_on_host(self) -> bool:
        """Whether `CpuReduction` reduces values of all dtypes."""
        return type(self._cross_device_ops) is all_reduce.CpuReduction and self._use_merge_call()

    def _use_merge_call(self) -> bool:
        """The hook that says whether replicas must meet to update a variable; inside XLA programs they cannot meet."""
        return (tf.executing_eagerly() and not distribute.is_merged()) or super()._use_merge_call()


class MirroredStrategy(on_backend.OnReplicaThreads, tf.distribute.MirroredStrategy):
    """Runs a function once per replica, with one replica per device of one machine, and keeps variables equal.

    This class is a drop-in replacement for `tf.distribute.MirroredStrategy`, and a subclass of it: `scope`, `run`,
    `reduce`, `gather`, datasets, Keras `fit`, checkpoints and `extended` work as TensorFlow documents them. Replicas
    run on this library's threads, which are made once and reused. One process can have several strategies of any size,
    several user threads can use one strategy, and errors name the replica and the line.

    Args:
        devices: device names ("CPU:0", "/gpu:1") or `tf.config.LogicalDevice`s, all of one kind. None takes
            all GPUs, or all logical CPUs on a machine without GPUs.
        cross_device_ops: a `tf.distribute.CrossDeviceOps` for reductions. None picks NCCL or ring
            collectives on GPUs, and one shared sum on CPUs.
        concurrent: in eager mode, release all replicas at once instead of one after another. This helps functions
            that do large eager work. Such functions must protect the Python state that replicas share. While a
            function still creates variables, replica 0 goes first.
        timeout: the seconds that a replica may take to reach its next sync point, and that a merge function may take
            to return, before `run` raises ReplicaTimeoutError. None waits without a limit. It applies to eager code, to
            tracing, and to the steps of a `tf.function`, which are cancelled (`docs/howto/debug_a_hang.md`).
        warn_after: the seconds after which a warning is logged, with a table of where each replica stands; the
            warning repeats at the same interval. None takes the value of the environment variable
            REPLICA_ENGINE_WARN_AFTER, or 30 if it is not set.
        graph_optimizer: how much TensorFlow's graph optimizer does to a `tf.function` in which the replicas run.
            "full" is what TensorFlow is set to do. "light" leaves out passes that do not make a step on CPUs faster,
            and makes the first step much faster. "off" leaves out all: the first step is as fast as with "light", and
            later steps may take several times as long.
            None is "light" on CPUs and "full" elsewhere. Options set with `tf.config.optimizer` stay as they are.
        marks: whether a `tf.function` in which the replicas run notes, as it runs, when each replica comes to each
            sync point. Warnings, errors and timelines then show the replicas of such a step as they show those of eager
            code, and a step that is cancelled has made each update on all replicas or on none. A mark takes about 2 us.
            None is True on CPUs and False elsewhere.

    Raises:
        DeviceError: a device does not exist, is named twice, or is of another kind than the rest; or
            `cross_device_ops` is not a `tf.distribute.CrossDeviceOps`.
        ReplicaValueError: `concurrent` or `marks` is not True or False, or `graph_optimizer` is none of its values.
        ValueError: `timeout` or `warn_after` is not positive.

    Example:
        >>> import tensorflow as tf, replica_engine
        >>> strategy = replica_engine.MirroredStrategy(["CPU:0"])
        >>> with strategy.scope():
        ...     weight = tf.Variable(2.0)
        >>> result = strategy.run(lambda x: weight * x, args=(tf.constant(3.0),))
        >>> float(strategy.reduce("SUM", result, axis=None))
        6.0
    """

    extended_class: type[MirroredExtended] = MirroredExtended
    """The class of the extended half; a subclass of the strategy may name another one."""

    def __init__(
        self,
        devices: Sequence[str | tf.config.LogicalDevice] | None = None,
        cross_device_ops: tf.distribute.CrossDeviceOps | None = None,
        *,
        concurrent: bool = False,
        timeout: float | None = None,
        warn_after: float | None = None,
        graph_optimizer: str | None = None,
        marks: bool | None = None,
        **others: NoReturn,
    ):
        argument_checks.refuse(type(self), others)
        argument_checks.check_seconds(timeout=timeout, warn_after=warn_after)
        argument_checks.check_flags(concurrent=concurrent, **({} if marks is None else {"marks": marks}))
        argument_checks.check_choice("graph_optimizer", graph_optimizer, function_calls.LEVELS)
        if cross_device_ops is not None and not isinstance(cross_device_ops, tf.distribute.CrossDeviceOps):
            raise DeviceError(
                "`cross_device_ops` must be a tf.distribute.CrossDeviceOps, such as "
                f"tf.distribute.ReductionToOneDevice(), or None; got {base.shown(cross_device_ops)}."
            )
        self._collective_key_base = next(_COLLECTIVE_KEYS)
        given = argument_checks.listed(devices)
        resolved = argument_checks.resolve_devices(given)
        if not given and resolved and [replica_run.short_name(name) for name in resolved] == ["CPU:0"]:
            _logger.warning(device_errors.warn_one_replica(type(self).__name__))
        extended = self.extended_class(self, resolved, cross_device_ops)
        named = {"timeout": timeout, "warn_after": warn_after, "graph_optimizer": graph_optimizer, "marks": marks}
        chosen: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
        options = extended.replica_options  # a subclass may have its own; the arguments of this call take precedence
        chosen["concurrent"] = concurrent or options.concurrent
        extended.replica_options = dataclasses.replace(options, **chosen)
        # Not the parent's __init__: it would make TensorFlow's own extended half.
        tf.distribute.Strategy.__init__(self, extended)
