"""Messages to the user while a step is traced, and maybe compiled, which may take longer than an epoch."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine.diagnostics.op_lines import is_scope_of
from replica_engine.errors import LoweringError, ReplicaEngineError
from replica_engine.errors.base import add_note
from replica_engine.telemetry.watchdog import Wait
from replica_engine.values import samples

PROGRESS_EVERY = 10.0
"""Seconds between log lines that report an unfinished compilation."""

_logger = logging.getLogger("replica_engine")


@contextlib.contextmanager
def compiling(model: keras.Model, what: str, compiles: bool) -> Iterator[None]:
    """Logs at level INFO that something was compiled, with the time, and at level WARNING if it takes long.

    An XLA error inside the `with` block gets a note that names the layer of the model and a remedy.

    Args:
        model: the model.
        what: a description of what the `with` block traces, compiles and runs for the first time.
        compiles: whether it is compiled; otherwise it is only traced.
    """
    started = time.monotonic()
    doing, done = ("compiling", "compiled") if compiles else ("tracing", "traced")
    before = _counts() if compiles else None
    try:
        # `of_workers`: without the rows of the other workers, on which it does not wait.
        with Wait(lambda seconds: f"still {doing} {what}: {seconds:.0f} s so far", PROGRESS_EVERY, of_workers=True):
            yield
    except LoweringError as error:
        if (layer := _guilty(model, error)) is not None:
            add_note(
                error,
                f"This is in the layer {layer.name!r} ({type(layer).__name__}) of the model {model.name!r}. The "
                "threaded strategy runs layers that XLA cannot compile: "
                "replicate_model(model, strategy=replica_engine.MirroredStrategy()).",
            )
        raise
    if before is not None and (made := _counts() - before).cache_hits > 0 and made.compiles == 0:
        done = "read the program for"
    _logger.info("%s %s, and ran it once, in %.1f s", done, what, time.monotonic() - started)


def _counts() -> Any:
    from replica_engine import xla  # not at module level: it needs jax

    return xla.counts()


@contextlib.contextmanager
def inputs_named(batch: Any) -> Iterator[None]:
    """Adds a note to an error of this library inside the `with` block: the sparse and ragged tensors of the batch."""
    try:
        yield
    except ReplicaEngineError as error:
        inputs = [(name, kind, call) for name, leaf in samples.named(batch) for kind, call in _not_dense(leaf)]
        if inputs:
            named = ", ".join(f"{name} is a {kind}" for name, kind, _ in inputs)
            calls = ", ".join(dict.fromkeys(call for _, _, call in inputs))
            add_note(
                error,
                f"{named}. XLA compiles for dense tensors of fixed shapes: make the batches dense in dataset.map, with "
                f"{calls}. Replicas on threads accept these inputs unchanged: "
                "replicate_model(model, strategy=replica_engine.MirroredStrategy()).",
            )
        raise


def _not_dense(leaf: Any) -> list[tuple[str, str]]:
    """The kind of a leaf, and the call that makes the leaf dense; empty if it is dense already."""
    if isinstance(leaf, tf.SparseTensor):
        return [(f"SparseTensor of {leaf.dtype.name}{[None, *leaf.shape[1:]]}", "tf.sparse.to_dense(x)")]
    if isinstance(leaf, tf.RaggedTensor):
        return [(f"RaggedTensor of {leaf.dtype.name}{[None, *leaf.shape[1:]]}", "x.to_tensor(shape=...)")]
    return []


def _guilty(model: keras.Model, error: LoweringError) -> keras.layers.Layer | None:
    """The layer that contains the op; otherwise the first layer that declares that XLA cannot compile it; or None."""
    layers = keras_model.layers_of(model, include_self=False)
    scopes = error.op_name.split("/")
    inside = [layer for layer in layers if any(is_scope_of(scope, layer.name) for scope in scopes)]
    unsupported = [layer for layer in layers if not layer.supports_jit]
    return inside[-1] if inside else unsupported[0] if unsupported else None
