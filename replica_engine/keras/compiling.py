"""What a user is told while a step is traced and compiled, which may take longer than an epoch."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import keras

from replica_engine._compat import keras_model
from replica_engine.errors import LoweringError, add_note

PROGRESS_EVERY = 10.0
"""Seconds after which a line says that a compilation goes on, and again after as many."""

_logger = logging.getLogger("replica_engine")


@contextlib.contextmanager
def compiling(what: str) -> Iterator[None]:
    """Says at level INFO that something was compiled, with its time, and at level WARNING that it takes long.

    Args:
        what: what is traced, compiled and run for the first time inside.
    """
    started = time.monotonic()
    done = threading.Event()

    def tell() -> None:
        while not done.wait(PROGRESS_EVERY):
            _logger.warning("still compiling %s: %.0f s so far", what, time.monotonic() - started)

    teller = threading.Thread(target=tell, name="replica_engine: compiling", daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
    _logger.info("compiled %s, and ran it once, in %.1f s", what, time.monotonic() - started)


@contextlib.contextmanager
def layers_named(model: keras.Model) -> Iterator[None]:
    """An error of XLA inside gets a note that names the layer of the model, and what to do."""
    try:
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


def _guilty(model: keras.Model, error: LoweringError) -> keras.layers.Layer | None:
    """The layer that the op is in, or else the first that says that XLA cannot compile it."""
    layers = keras_model.layers_of(model, include_self=False)
    scopes = error.op_name.split("/")
    inside = [layer for layer in layers if any(_is_of(scope, layer.name) for scope in scopes)]
    unsupported = [layer for layer in layers if not layer.supports_jit]
    return inside[-1] if inside else unsupported[0] if unsupported else None


def _is_of(scope: str, name: str) -> bool:
    """Whether a name scope is a layer's: TensorFlow adds a number to one that is entered again."""
    return scope == name or (scope.startswith(f"{name}_") and scope[len(name) + 1 :].isdigit())
