"""Picks the strategy that is faster for a model on the current machine."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine.errors import BackendMissingError, ReplicateError
from replica_engine.strategies import MirroredStrategy

_SLOW_IN_XLA_ON_CPU = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.ConvLSTM1D,
    keras.layers.ConvLSTM2D,
    keras.layers.ConvLSTM3D,
)


_FAST_IN_XLA = (
    keras.layers.RNN,
    keras.layers.Bidirectional,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.MultiHeadAttention,
)


def choose(model: keras.Model, replicas: int | None) -> tuple[tf.distribute.Strategy, str]:
    """Returns the strategy for a model, and the reason.

    Args:
        model: the model.
        replicas: the number of replicas; None takes all devices.

    Raises:
        ReplicateError: there are fewer devices than replicas.
    """
    gpus, cpus = (tf.config.list_logical_devices(kind) for kind in ("GPU", "CPU"))
    mirrored, kind = (gpus, "GPU") if gpus else (cpus, "CPU")
    can_mirror = len(mirrored) >= (replicas or 1)
    layers = keras_model.layers_of(model)
    unsupported = [layer.name for layer in layers if not layer.supports_jit]
    convolutions = [layer.name for layer in layers if isinstance(layer, _SLOW_IN_XLA_ON_CPU)]
    fused = [layer.name for layer in layers if isinstance(layer, _FAST_IN_XLA)]
    if not unsupported and _has_tpus(kind.lower()):
        return compiled_strategy(replicas), "it is what TPUs run"
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
