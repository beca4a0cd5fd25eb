"""Probes of one step of a model: the output of each layer, and the gradient of each variable.

Both probes use ordinary features of a model: a `predict_step` that returns the outputs of layers, whose rows the
replicated model puts into the order of the batch, and an optimizer whose momentum is the gradient. They replace
attributes of the model inside a block, and put them back.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.testing.parity.state import named

_NOTHING = object()

_RATE = 2.0**-10  # a power of two, so that the division gives the gradient exactly


class LayerOutputs:
    """Makes a model's `predict_step` return the output of each layer, innermost layers first.

    It returns only outputs that have a row per sample and that the model's own call makes (not inside a loop).

    Args:
        model: the model.

    Attributes:
        layers: the layers by the names of the outputs that the first run found. Later runs return only these.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._is_first = True
        self.layers: dict[str, keras.layers.Layer] = {}

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Inside the block, the model has the `predict_step` of this class, and its layers report their outputs."""
        places = [(layer, "call", _reporting(layer)) for layer in keras_model.layers_of(self._model)]
        places.append((self._model, "predict_step", self._step))
        with _put(places):
            yield
        self._is_first = False

    def _step(self, data: Any) -> dict[str, Any]:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        graph = tf.compat.v1.get_default_graph()
        calls: list[tuple[Any, list[Any]]] = []
        token = _calls.set(calls)
        try:
            called(self._model, x)
        finally:
            _calls.reset(token)
        outputs = named(
            (layer.name if len(leaves) == 1 else f"{layer.name}[{index}]", (layer, leaf))
            for layer, leaves in calls
            for index, leaf in enumerate(leaves)
        )
        found = {name: each for name, each in outputs.items() if self._is_wanted(name, each[1], graph, x)}
        self.layers.update((name, layer) for name, (layer, _) in found.items() if self._is_first)
        return {name: tf.identity(leaf) for name, (_, leaf) in found.items()}

    _step.gives_rows = True  # type: ignore[attr-defined]

    def _is_wanted(self, name: str, leaf: Any, graph: Any, x: Any) -> bool:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return False
        if not isinstance(leaf, tf.__internal__.EagerTensor) and leaf.graph is not graph:
            return False
        sizes = {each.shape[0] for each in tf.nest.flatten(x) if isinstance(each, tf.Tensor) and each.shape.rank}
        return leaf.shape[0] in sizes if self._is_first else name in self.layers


def steps_as_in_fit(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """Inside the block, steps of the user's own get what `fit`, `evaluate` and `predict` give them.

    The methods for one batch give (x, y, None) where `fit` gives (x, y), and (x,) where `predict` gives x.
    """
    names = ("train_step", "test_step", "predict_step")
    own = [name for name in names if not keras_trainer.has_keras_step(model, name)]
    return _put([(model, name, _as_in_fit(getattr(model, name))) for name in own])


def _as_in_fit(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(step)
    def repacked(data: Any) -> Any:
        return step(keras.utils.pack_x_y_sample_weight(*keras.utils.unpack_x_y_sample_weight(data)))

    return repacked


@contextlib.contextmanager
def kept_gradients(model: keras.Model) -> Iterator[Callable[[], dict[int, Any]]]:
    """Inside the block, the optimizers of a model keep the gradients of the whole batch and train almost nothing.

    Optimizers that are attributes of layers are replaced too. Yields a function that returns the gradients of the last
    step, by the ids of the variables.
    """
    keepers = {id(each): _keeper(each) for each in keras_model.optimizers_of(model)}
    variables = model.trainable_variables  # only the step shows which of them it trains
    for keeper in keepers.values():
        keeper.build(variables)
    places = [
        (layer, name, keepers[id(value)])
        for layer in keras_model.layers_of(model)
        for name, value in vars(layer).items()
        if id(value) in keepers
    ]

    def gradients() -> dict[int, Any]:
        found: dict[int, Any] = {}
        for keeper in keepers.values():
            slots = getattr(keeper, "inner_optimizer", keeper).momentums
            for variable, slot in zip(variables, slots, strict=True):
                found[id(variable)] = found.get(id(variable), 0) - slot.numpy() / _RATE
                slot.assign(keras.ops.zeros_like(slot))
        return found

    with _put(places):
        yield gradients


def _keeper(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """An optimizer whose momentum after one step is the gradient times `-_RATE`."""
    keeper = keras.optimizers.SGD(_RATE, momentum=0.5)
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return keeper
    scale = keras.ops.convert_to_numpy(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
    return keras.optimizers.LossScaleOptimizer(keeper, initial_scale=float(scale))


@contextlib.contextmanager
def without_random_layers(model: keras.Model) -> Iterator[list[str]]:
    """Makes layers that draw random numbers behave as in inference inside the block; yields their names."""
    layers = [layer for layer in keras_model.layers_of(model, include_self=False) if _draws(layer)]
    with _put([(layer, "call", _in_inference(layer)) for layer in layers]):
        yield [layer.name for layer in layers]


def is_callable(model: keras.Model) -> bool:
    """Whether a model defines a forward pass, and not only a `train_step` that runs other models."""
    return type(model).call is not keras.Model.call


def called(model: keras.Model, x: Any) -> Any:
    """The outputs of a model in training mode."""
    parameters = inspect.signature(model.call).parameters.values()
    takes_training = any(each.name == "training" or each.kind is each.VAR_KEYWORD for each in parameters)
    return model(x, training=True) if takes_training else model(x)


_calls: contextvars.ContextVar[list[tuple[Any, list[Any]]] | None] = contextvars.ContextVar("layer_calls", default=None)


def _reporting(layer: keras.layers.Layer) -> Callable[..., Any]:
    own = layer.call

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        outputs = own(*args, **kwargs)
        calls = _calls.get()
        if calls is not None:
            calls.append((layer, tf.nest.flatten(outputs)))
        return outputs

    return call


def _in_inference(layer: keras.layers.Layer) -> Callable[..., Any]:
    own = layer.call

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **{**kwargs, "training": False})

    return call


def _draws(layer: keras.layers.Layer) -> bool:
    """Whether a layer has a random seed generator, and a `training` argument to switch it off."""
    has_seed = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return has_seed and "training" in inspect.signature(layer.call).parameters


@contextlib.contextmanager
def _put(places: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replaces attributes of objects inside the block."""
    places = list(places)
    before = [vars(target).get(name, _NOTHING) for target, name, _ in places]
    for target, name, value in places:
        vars(target)[name] = value
    try:
        yield
    finally:
        for (target, name, _), value in zip(places, before, strict=True):
            if value is _NOTHING:
                vars(target).pop(name, None)
            else:
                vars(target)[name] = value
