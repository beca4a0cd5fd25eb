"""`replicate_model`: runs a Keras model on N replicas, with one line of code, by the strategy that is faster for it."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from replica_engine.backend import find_backend
from replica_engine.diagnostics.user_frames import FOLDERS
from replica_engine.errors import BackendMissingError, ReplicateError
from replica_engine.errors.base import brief, positive_int, shown
from replica_engine.keras import lent_model, shard_hooks
from replica_engine.strategies import MirroredStrategy, argument_checks
from replica_engine.upstream.hook import hide_frames
from replica_engine.upstream.keras import keras_models, keras_training

_logger = logging.getLogger("replica_engine")

_SLOW_IN_XLA_ON_CPU = (
    *(keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D),
    *(keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose),
    *(keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D),
    *(keras.layers.SeparableConv1D, keras.layers.SeparableConv2D),
    *(keras.layers.ConvLSTM1D, keras.layers.ConvLSTM2D, keras.layers.ConvLSTM3D),
)

# Layers of many small operations, which XLA compiles to a few large ones.
_FAST_IN_XLA = (
    keras.layers.RNN,
    keras.layers.Bidirectional,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.MultiHeadAttention,
)


@argument_checks.names_keywords("replicate_model")
def replicate_model(
    model: keras.Model, replicas: int | None = None, strategy: tf.distribute.Strategy | None = None
) -> keras.Model:
    """Makes a Keras model that trains, evaluates and predicts on N replicas; it shares everything with the original.

    `fit`, `evaluate`, `predict` and their `_on_batch` forms split each batch over the replicas, whatever its size.
    Losses and metrics are means over all samples, as on one device. Predictions come in the order of the inputs.
    Everything else (weights, layers, optimizer, `compile`, `save`, `summary`) belongs to both models: each change of
    one is a change of the other. If the model has its own `train_step`, that step runs on each replica, on the
    replica's shard of the batch; its gradients are averaged over all samples.

    Args:
        model: a built Keras 3 model: functional, sequential or subclassed, compiled or not.
        replicas: the number of replicas. None takes all devices of the strategy.
        strategy: a strategy of this library to run on, or one of your own with `ReplicaThreads`. None picks the faster
            one for the model on this machine; a message at level INFO of the logger "replica_engine" names it and the
            reason. Without `replicas` as well, that line is printed.

    Returns:
        The replicated model, an instance of the model's class.

    Raises:
        ReplicateError: the model is not built, is already replicated or was built under a strategy, or there are fewer
            devices than replicas.

    Example:
        >>> import keras, numpy as np
        >>> from replica_engine.keras import replicate_model
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> replicated = replicate_model(model, replicas=2)
        >>> x, y = np.ones((10, 4), "float32"), np.ones((10, 1), "float32")
        >>> history = replicated.fit(x, y, batch_size=7, verbose=0)
        >>> replicated.predict(x, verbose=0).shape
        (10, 1)
    """
    _check(model)
    if isinstance(replicas, tf.distribute.Strategy):
        raise ReplicateError(
            "The second argument of replicate_model is the number of replicas; got "
            f"{brief(replicas)}. Write replicate_model(model, strategy=strategy)."
        )
    count = positive_int(replicas)
    if count is None and replicas is not None:
        raise ReplicateError(f"replicas must be a positive int, or None for all devices; got {shown(replicas)}.")
    if strategy is None:
        strategy, reason = _choose(model, count)
        chosen = f"replicate_model: {model.name!r} on {strategy!r}: {reason}"
        _logger.info("%s", chosen)
        if replicas is None:  # nobody said how many, so the reader is to see it
            print(chosen)
    backend = find_backend(strategy)
    if backend is None:
        raise ReplicateError(
            "strategy must be a MirroredStrategy, MultiWorkerMirroredStrategy or TPUStrategy of replica_engine, or "
            "one of your own whose extended class has ReplicaThreads, or None to let replicate_model choose; got "
            f"{brief(strategy)}."
        )
    present = strategy.num_replicas_in_sync
    if count is not None and count != present:
        raise ReplicateError(
            f"{count} replicas were requested, but the {type(strategy).__name__} that was given has {present}. "
            "Leave out `replicas`, or pass a strategy with that many devices."
        )
    _check_inputs(model, present)
    hide_frames(FOLDERS)
    shard_hooks.extend_losses_and_gradients()
    lent_model.extend_functions()
    twin = lent_model.replicated(model, strategy)
    if backend.saving is not None:
        strategy.leave_files_to_chief(model, twin)
    return twin


def _check(model: Any) -> None:
    if keras.backend.backend() != "tensorflow":
        raise ReplicateError(
            f"Replicas run TensorFlow, but Keras runs on the backend {keras.backend.backend()!r} in this process. "
            "Set KERAS_BACKEND=tensorflow in the environment before keras is imported."
        )
    if not isinstance(model, keras.Model):
        raise ReplicateError(f"replicate_model takes a Keras 3 model (keras.Model); got {brief(model)}.")
    if lent_model.is_replicated(model):
        raise ReplicateError(
            f"The model {model.name!r} is replicated already. Replicate the original one, with other replicas."
        )
    if keras_training.find_strategy(model) is not None:
        raise ReplicateError(
            f"The model {model.name!r} was built under strategy.scope(), so it already runs on the replicas of "
            "that strategy. Build it outside of the scope to replicate it."
        )
    unbuilt = keras_models.unbuilt_layers(model)
    if unbuilt:
        whose = "" if unbuilt[-1] == model.name else f" (its layer {unbuilt[-1]!r} is not)"
        raise ReplicateError(
            f"The model {model.name!r} is not built{whose}: it has no variables yet that the replicas could share. "
            "Give it a keras.Input, or call it on a batch, model(x[:1]), before you replicate it."
        )
    if own := keras_training.makes_functions(model):
        raise ReplicateError(
            f"The model {model.name!r} overrides {own}, but replicate_model replaces this method. Override "
            "train_step, test_step or predict_step instead: they run on each replica."
        )


def _check_inputs(model: keras.Model, replicas: int) -> None:
    for name, size in keras_models.input_sizes(model) if replicas > 1 else ():
        raise ReplicateError(
            f"The input {name!r} has a fixed batch size of {size}, but each of {replicas} replicas "
            f"would get {-(-size // replicas)} samples. Build the model with keras.Input(shape), without a "
            "batch size."
        )


def _choose(model: keras.Model, replicas: int | None) -> tuple[tf.distribute.Strategy, str]:
    """Returns the strategy for a model, and the reason.

    Args:
        model: the model.
        replicas: the number of replicas; None takes all devices.

    Raises:
        ReplicateError: there are fewer devices than replicas.
    """
    gpus, cpus = (tf.config.list_logical_devices(kind) for kind in ("GPU", "CPU"))
    mirrored, kind = (gpus, "GPU") if gpus else (cpus, "CPU")
    # Threads need a logical device for each replica, and TensorFlow makes none once it has started. XLA makes its own.
    can_mirror = len(mirrored) >= (replicas or 1)
    layers = keras_models.list_layers(model)
    unsupported = [layer.name for layer in layers if not layer.supports_jit]
    convolutions = [layer.name for layer in layers if isinstance(layer, _SLOW_IN_XLA_ON_CPU)]
    fused = [layer.name for layer in layers if isinstance(layer, _FAST_IN_XLA)]
    if not unsupported and _has_tpus(kind.lower()):
        return compiled_strategy(replicas), "it is what TPUs run"
    # Before all questions of speed: TensorFlow runs every layer, and XLA does not.
    if unsupported:
        reason = f"XLA cannot compile the layer {unsupported[0]!r}"
    elif gpus:
        reason = "TensorFlow has GPUs, and runs on them directly"
    elif convolutions and can_mirror and len(cpus) > 1:
        reason = f"XLA is slow at convolutions on CPU, such as {convolutions[0]!r}"
    elif not fused and can_mirror and len(cpus) > 1:
        reason = "XLA wins nothing on CPU where a step is matrix products for the most part"
    else:
        why = f"XLA is fast at layers such as {fused[0]!r}" if fused else "it makes its own CPU devices"
        try:
            return compiled_strategy(replicas), why
        except BackendMissingError as error:
            reason = f"TPUStrategy cannot be used: {' '.join(str(error).split())}"
            if kind == "CPU" and len(cpus) == 1:
                reason += ". replica_engine.logical_devices(n) makes n devices of this CPU, before TensorFlow starts"
    if not can_mirror:
        present = len(mirrored)
        more = (
            "TensorFlow can make more CPU devices only before it starts: call "
            f"replica_engine.logical_devices({replicas or 1}) first in the program"
            if kind == "CPU"
            else f"Ask for {present} or fewer"
        )
        raise ReplicateError(
            f"{replicas or 1} replicas need {replicas or 1} {kind} devices, but this process has {present}. {more}."
        )
    return MirroredStrategy(mirrored[:replicas]), reason


def compiled_strategy(devices: int | None, distribution: Any = None) -> tf.distribute.Strategy:
    """A TPUStrategy on so many devices.

    Args:
        devices: how many; None takes all, or those of the mesh that `distribution` has.
        distribution: what `TPUStrategy(distribution=...)` takes, for one replica of all these devices.

    Raises:
        BackendMissingError: jax is not installed.
    """
    from replica_engine.strategies.tpu import TPUStrategy  # not at module level: it needs jax

    return TPUStrategy(num_cores=devices, distribution=distribution)


def is_divided(strategy: tf.distribute.Strategy) -> bool:
    """Whether a replica of a strategy has several devices."""
    group = getattr(strategy.extended, "device_group", None)
    return group is not None and group.mesh is not None


def _has_tpus(instead: str) -> bool:
    try:
        from replica_engine.pjrt.devices import has_accelerators
    except BackendMissingError:
        return False
    return has_accelerators("tpu", instead)
