"""The replicated model: the original model with other methods to train, evaluate and predict.

The replicated model is a second object that uses the attribute dictionary of the original. So each change of one (new
weights, a frozen layer, `compile`) is a change of both, and nothing needs to be kept in step. Its class derives from
the class of the original, so `isinstance`, custom methods and `train_step` keep working. Keras serializes it under the
name of the original's class, and called, its class makes a model of that class. So what is saved, copied or cloned is
a plain model.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine.errors import BatchError
from replica_engine.keras.replicas import Replicas
from replica_engine.telemetry import html

_RUN = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_SLOT = "_replica_engine_replicas"


def replicated(model: keras.Model, strategy: tf.distribute.Strategy) -> keras.Model:
    """Makes a second object of the same model, which runs on the replicas of `strategy`."""
    model_class: Any = type(model)
    twin: keras.Model = object.__new__(_class_of(model_class))
    object.__setattr__(twin, "__dict__", model.__dict__)
    object.__setattr__(twin, _SLOT, Replicas(model, twin, strategy))
    return twin


def is_replicated(model: keras.Model) -> bool:
    """Whether `replicated` made the model."""
    return hasattr(type(model), _SLOT)


def original_of(model: keras.Model) -> keras.Model:
    """The original of a model that `replicated` made; any other model itself."""
    original: keras.Model = getattr(model, _SLOT).original if is_replicated(model) else model
    return original


def build_for(model: keras.Model, batch: object) -> None:
    """Makes all variables of a model, its metrics and optimizer, from a batch or its specs."""
    if is_replicated(model):
        getattr(model, _SLOT).ready(batch)
    elif not keras_model.is_built(model):
        keras_model.build(model, batch)


@functools.cache
def _class_of(kind: Any) -> type[keras.Model]:
    members: dict[str, object] = {"__slots__": (_SLOT,), "__module__": kind.__module__, "__doc__": kind.__doc__}
    members.update({name: _running(kind, name) for name in _RUN})
    members.update({f"make_{name}_function": _make_nothing for name in ("train", "test", "predict")})
    members.update({f"{name}_function": _function(name) for name in ("train", "test", "predict")})
    members["reset_metrics"] = _resetting(kind)
    members["__reduce__"] = lambda self: getattr(self, _SLOT).original.__reduce__()  # which names the class
    members["strategy"] = _Strategy()
    members["_repr_html_"] = _described
    members["__repr__"] = lambda self: f"{kind.__repr__(self)} on {getattr(self, _SLOT).strategy!r}"
    # `from_config` and `clone_model` call the class.
    members["__new__"] = lambda cls, *args, **kwargs: kind(*args, **kwargs)
    return keras_model.serialized_as(type(kind.__name__, (kind,), members), kind)


def _described(self: keras.Model) -> str:
    """The replicated model in a notebook."""
    strategy = getattr(self, _SLOT).strategy
    weights = sum(math.prod(weight.shape) for weight in self.trainable_weights)
    rows = [
        ("model", f"{self.name} ({type(original_of(self)).__name__})"),
        ("replicas", strategy.num_replicas_in_sync),
        ("strategy", type(strategy).__name__),
        ("trainable weights", f"{weights:,}"),
        ("compiled", "yes" if self.compiled else "no: call compile() before fit()"),
    ]
    return html.table("replicated model", ("", ""), rows)


class _Strategy:
    """The strategy that a replicated model runs on, unless the model has an attribute of that name."""

    def __get__(self, model: keras.Model | None, kind: type | None = None) -> object:
        return self if model is None else getattr(model, _SLOT).strategy


def _running(kind: type[keras.Model], name: str) -> Callable[..., object]:
    method = getattr(kind, name)

    @functools.wraps(method)
    def wrapper(self: keras.Model, *args: object, **kwargs: object) -> object:
        replicas: Replicas = getattr(self, _SLOT)
        data = args[0] if args else kwargs.get("x")
        if isinstance(data, (tf.distribute.DistributedDataset, tf.distribute.DistributedIterator)):
            raise BatchError(
                f"{name} of a replicated model got a {type(data).__name__}, and divides each batch among the "
                "replicas itself. Pass the dataset as it is, before experimental_distribute_dataset: "
                "replicated.fit(dataset)."
            )
        try:
            with replicas.entered():
                return method(self, *args, **kwargs)
        finally:
            replicas.let_go(name)

    return wrapper


def _resetting(kind: type[keras.Model]) -> Callable[..., None]:
    @functools.wraps(kind.reset_metrics)
    def reset_metrics(self: keras.Model) -> None:
        with getattr(self, _SLOT).metrics_left():
            kind.reset_metrics(self)

    return reset_metrics


def _make_nothing(self: keras.Model, force: bool = False) -> None:
    """Replaces a method of Keras; `Replicas` makes its own functions."""


def _function(name: str) -> property:
    def get(self: keras.Model) -> Callable[..., object]:
        function = getattr(self, _SLOT).functions[name]
        return function.predict if name == "predict" else function

    def put(self: keras.Model, value: object) -> None:
        self.__dict__[f"{name}_function"] = value  # goes to the original's attribute, which compile() clears

    return property(get, put)
