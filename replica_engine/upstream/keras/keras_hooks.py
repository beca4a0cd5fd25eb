"""What this library replaces in Keras, for models in a scope and for `replicate_model`.

`strategies.keras_scopes` and `keras.shard_hooks` go around functions of Keras. Here are those hooks, and what takes the
place of attributes that are no functions. Nothing happens until Keras is imported, or a second time. A replacement
passes on to Keras wherever no strategy of this library is concerned. Checked on Keras 3.15.1; a name that Keras does
not have is left out. This module does not import Keras.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

import tensorflow as tf

from replica_engine.upstream.hook import FIRST_SCOPE, REPLICATED, Hook, StandIn
from replica_engine.upstream.keras import keras_training

_OTHERS = "passes on to Keras for models of other strategies"
_SHARDS = "passes on to Keras outside the steps of models on replicas"
_NOT_SHARDS = "passes on to TensorFlow outside the steps of models on replicas"
_ELSEWHERE = "passes on to Keras outside the replicas of this library's strategies"
_FIRST_VARIABLE = "the first variable that a strategy makes once Keras is imported"
_TRAINERS, _OPTIMIZERS = (
    f"{keras_training.MODULE}.{keras_training.TRAINER}",
    f"{keras_training._BASE_OPTIMIZER}.{keras_training.OPTIMIZER}",
)
_LOSSES, _AVERAGES = "keras.src.losses.loss", "tensorflow.python.ops.nn_impl_distribute"
_NORMALIZATION = "keras.src.layers.normalization.batch_normalization.BatchNormalization"
_ONE_REPLICA = "in a shard, one device has one replica and the whole batch"
_INSIDE = f"{_NOT_SHARDS}. The function stays, and what it calls inside is replaced"
_CHANGED = "gradients that a step changes are known"

_scope_hook = functools.partial(Hook, since=FIRST_SCOPE, until=_OTHERS)
_variable_hook = functools.partial(Hook, since=_FIRST_VARIABLE, until=_ELSEWHERE)
_shard_hook = functools.partial(Hook, since=f"{REPLICATED}, or the first step of a model in a scope", until=_SHARDS)

MAKE_FUNCTION = _scope_hook(
    _TRAINERS, keras_training.METHOD, why="a batch of any size is divided, and gives the numbers of one device"
)
MAKE_PREDICT = _scope_hook(_TRAINERS, "make_predict_function", why="a batch of any size is divided")
COMPILE = _scope_hook(
    f"{keras_training.COMPILES}.{keras_training.BASE}",
    "compile",
    why="metrics, and an optimizer that is given by its name, are made in the scope of the model",
)
BUILD = _scope_hook(
    _TRAINERS,
    "_maybe_symbolic_build",
    why="models are built from one replica's part; whole batches come to those that divide them; errors are explained",
)
ITERATE = _scope_hook(
    "keras.src.trainers.epoch_iterator.EpochIterator",
    "_enumerate_iterator",
    why="`predict` gets whole batches",
    # Called before the hook of backups, which looks whether the iterator gives whole batches.
    order=1,
)
COMBINE = _scope_hook(
    keras_training.MODULE,
    keras_training.REDUCE,
    why="logs are means over replicas of all workers, not those of replica 0",
    since="the first scope of a strategy",
)
APPLY = _variable_hook(
    _OPTIMIZERS,
    keras_training.APPLY,
    why="gradients are summed before they are clipped; accumulated ones only in the last step of a group",
)
ADD_VARIABLE = _variable_hook(
    _OPTIMIZERS,
    keras_training.ADD_VARIABLE,
    why="each replica has its own accumulators of gradients, which are saved as their sum",
    until="passes on to Keras for all other variables",
)
CHECK_FINITE = _variable_hook(
    "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer",
    "check_finite",
    why="an overflow on one replica counts for all; Keras asks replica 0 alone",
)
REDUCE_LOSSES = _shard_hook(_LOSSES, "reduce_weighted_values", why="a shard's loss counts by its samples")
# What scale_loss_for_distribution and unscale_loss_for_distribution ask first.
BACKEND = _shard_hook(_LOSSES, "backend", why="the losses of shards are scaled once")
MEAN = _shard_hook(
    "keras.src.metrics.reduction_metrics", "reduce_to_samplewise_values", why="means over shards count by samples"
)
AVERAGE_LOSS = _shard_hook(_AVERAGES, "compute_average_loss", why=_ONE_REPLICA, until=_INSIDE)
REGULARIZATION = _shard_hook(_AVERAGES, "scale_regularization_loss", why=_ONE_REPLICA, until=_INSIDE)
MOMENTS_OF_WHOLE = _shard_hook(
    _NORMALIZATION,
    "_moments",
    why="replicas that have the whole batch do not add up its statistics, which would round",
    order=1,
)
TAPE_GRADIENT = _shard_hook(
    "tensorflow.python.eager.backprop.GradientTape", "gradient", why=_CHANGED, until=_NOT_SHARDS
)
GRADIENTS = _shard_hook(
    "tensorflow.python.ops.gradients_util", "_GradientsHelper", why=_CHANGED, until=_NOT_SHARDS, order=1
)

ATTENTION = Hook(
    "keras.src.backend.tensorflow.nn",
    "dot_product_attention",
    why="attention in bodies for TPUs and GPUs is the platform's kernel, and flash_attention=True works",
    since=FIRST_SCOPE,
    until="passes on to Keras in all other bodies and on threads",
)
WITHOUT_KERNELS = [
    Hook(
        f"keras.src.layers.attention.{module}",
        "__init__",
        why="the layer knows of flash_attention=False, which Keras takes for None",
        since=FIRST_SCOPE,
        until="the layer of Keras, as before",
    )
    for module in ("multi_head_attention.MultiHeadAttention", "grouped_query_attention.GroupedQueryAttention")
]


def obey_no_flash_attention() -> None:
    """Has Keras' attention layers keep `flash_attention=False`, once Keras is imported; only once per process."""
    for each in WITHOUT_KERNELS:
        each.put(_keeping_false)


def _keeping_false(own: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(own)

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if signature.bind(self, *args, **kwargs).arguments.get("flash_attention") is False:
            self._flash_attention = False

    # Keras asks for the parameters in a way that does not look behind `functools.wraps`.
    init.__signature__ = signature  # type: ignore[attr-defined]
    return init


def combine_logs(strategies: type) -> None:
    """Makes Keras combine the values of replicas, under strategies of a class, by their method `combined`.

    It is called as `combined(own, values, reduction)`, with Keras' own function.
    """

    def combined(
        own: Callable[..., object], values: object, strategy: tf.distribute.Strategy, reduction: str
    ) -> object:
        ours = isinstance(strategy, strategies)
        return strategy.combined(own, values, reduction) if ours else own(values, strategy, reduction)

    COMBINE.around(combined)


def scale_losses_once(shard: Callable[[], object]) -> None:
    """Keeps Keras from scaling the losses of a shard for a strategy.

    Args:
        shard: the shard that is being computed; None outside.
    """
    BACKEND.put(lambda own: own if isinstance(own, _UndividedBackend) else _UndividedBackend(own, shard))


class _UndividedBackend(StandIn):
    """Keras' backend for its losses, which has no distribution in a shard: what is scaled for one stays as it is.

    Args:
        own: the module.
        shard: the shard that is being computed; None outside.
    """

    def __init__(self, own: ModuleType, shard: Callable[[], object]):
        super().__init__(own)
        self._shard = shard

    def backend(self) -> str:
        """The name of the backend, by which losses know whether TensorFlow distributes them."""
        return self._own.backend() if self._shard() is None else ""


def is_of_graph(*args: object, **kwargs: object) -> bool:
    """Whether what `GRADIENTS` gets behind `ys, xs` names a graph.

    Loops, branches and functions name the graph that they differentiate, and have gradients of their own.
    """
    return len(args) >= _BEFORE_GRAPH or "src_graph" in kwargs


_BEFORE_GRAPH = 8  # arguments of `_GradientsHelper` between `ys, xs` and `src_graph`, with which it calls itself


# The losses that layers add (`add_loss`, `activity_regularizer`), for replicas that share the layers.

LOSSES = Hook(
    "keras.src.layers.layer.Layer",
    "_losses",
    why="each replica on a thread has its own list of the losses that layers add",
    since=FIRST_SCOPE,
    until="outside replicas, the list of the layer, as before",
)
"""The attribute of a layer with the losses that it has added."""


class _OfThreads:
    """Stands for the attribute of `LOSSES`.

    Args:
        shares: whether the calling thread runs a replica that must not touch the list of the layer.
    """

    def __init__(self, shares: Callable[[], bool]):
        self._shares = shares
        self._of_thread = threading.local()

    def __get__(self, layer: object | None, owner: type) -> object:
        if layer is None:
            return self
        if self._shares():
            # By identity, since a layer may define equality. An id is free again when its layer is gone.
            lists: dict[int, tuple[weakref.ref[object], list[object]]] = vars(self._of_thread).setdefault("lists", {})
            known, number = lists.get(id(layer)), id(layer)
            if known is None or known[0]() is not layer:
                known = lists[number] = weakref.ref(layer, lambda _: lists.pop(number, None)), []
            return known[1]
        try:
            return vars(layer)[LOSSES.name]
        except KeyError:
            raise AttributeError(LOSSES.name) from None

    def __set__(self, layer: object, value: object) -> None:
        vars(layer)[LOSSES.name] = value

    def __delete__(self, layer: object) -> None:
        del vars(layer)[LOSSES.name]


def for_each_replica(shares: Callable[[], bool]) -> None:
    """Gives each replica on a thread its own list of added losses, once Keras is imported; only once per process.

    A layer keeps what it added in a list, which the next call of the model empties. Replicas on threads call one model.
    If they meet between a call and the sum of its losses (a synchronized batch normalization, a masked loss), the list
    is that of the replica which called last. So replica 0 has the layer's list, and each other one a list of its
    thread. After a run, `model.losses` are those of replica 0.

    Args:
        shares: whether the calling thread runs a replica other than the first.
    """
    LOSSES.put(lambda there: there or _OfThreads(shares))


MOMENTS = Hook(
    _NORMALIZATION,
    "_moments",  # returns the mean and the variance of what it gets
    why="a synchronized normalization that gets a mask has the statistics of all replicas",
    since=FIRST_SCOPE,
    until="passes on to Keras outside the replicas of this library's strategies",
)
