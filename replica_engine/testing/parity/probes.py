"""Probes of one step of a model: the output of each layer, and the gradient of each variable.

Both probes use ordinary features of a model: a `predict_step` that returns the outputs of layers, whose rows the
replicated model puts into the order of the batch, and an optimizer that keeps gradients and changes nothing.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model

_NOTHING = object()


class LayerOutputs:
    """Makes a model's `predict_step` return the output of each layer, innermost layers first.

    It returns only outputs that have a row per sample and that the model's own call makes (not inside a loop).

    Args:
        model: the model.

    Attributes:
        names: the names of the outputs that the first run found. Later runs return only these.
        layers: the layer of each name.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.names: list[str] = []
        self.layers: dict[str, keras.layers.Layer] = {}
        self._is_first = True

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
        calls: list[tuple[Any, Any]] = []
        token = _calls.set(calls)
        try:
            called(self._model, x)
        finally:
            _calls.reset(token)
        found: dict[str, Any] = {}
        counts: dict[str, int] = {}
        for layer, outputs in calls:
            counts[layer.name] = counts.get(layer.name, 0) + 1
            call = layer.name if counts[layer.name] == 1 else f"{layer.name} (call {counts[layer.name]})"
            leaves = tf.nest.flatten(outputs)
            for index, leaf in enumerate(leaves):
                name = call if len(leaves) == 1 else f"{call}[{index}]"
                if self._is_wanted(name, leaf, graph, x):
                    found[name] = tf.identity(leaf)
                    self.layers.setdefault(name, layer)
        if self._is_first:
            self.names = list(found)
        return found

    _step.gives_rows = True  # type: ignore[attr-defined]

    def _is_wanted(self, name: str, leaf: Any, graph: Any, x: Any) -> bool:
        if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
            return False
        if not isinstance(leaf, tf.__internal__.EagerTensor) and leaf.graph is not graph:
            return False
        return _has_rows_of(leaf, x) if self._is_first else name in self.names


class Gradients:
    """Keeps the gradients of the whole batch that a training step applies, and does not change the weights.

    Args:
        model: the model. Inside `seen`, its optimizers are replaced, also those that are attributes of layers.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._kept = {id(each): _GradientKeeper(each) for each in keras_model.optimizers_of(model)}

    @contextlib.contextmanager
    def seen(self) -> Iterator[None]:
        """Inside the block, optimizers that keep gradients replace the model's optimizers."""
        places = [
            (layer, name, self._kept[id(value)])
            for layer in keras_model.layers_of(self._model)
            for name, value in vars(layer).items()
            if id(value) in self._kept
        ]
        for keeper in self._kept.values():
            keeper.build(self._model.trainable_variables)  # only the step shows which of them it trains
        with _put(places):
            yield

    def values(self, names: dict[int, str]) -> dict[str, Any]:
        """The gradients of the last step by the names of the variables, in the order of `names`."""
        found: dict[int, Any] = {}
        for keeper in self._kept.values():
            for variable, gradient in keeper.kept():
                found[id(variable)] = found[id(variable)] + gradient if id(variable) in found else gradient
        return {name: found[key] for key, name in names.items() if key in found}


class _Slots:
    """Variables and the variables that keep their gradients, in an object that Keras does not search for variables."""

    pairs: Sequence[tuple[Any, Any]] = ()


class _GradientKeeper(keras.optimizers.Optimizer):
    """An optimizer that changes nothing and keeps the gradient of each variable."""

    def __init__(self, optimizer: keras.optimizers.Optimizer):
        super().__init__(learning_rate=0.0, name="gradient_keeper")
        self._slots = _Slots()
        is_scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        self._scale = float(optimizer.initial_scale) if is_scaling else 1.0
        if is_scaling and optimizer.built:
            self._scale = float(keras.ops.convert_to_numpy(optimizer.dynamic_scale))

    def build(self, variables: Any) -> None:
        super().build(variables)
        slots = [self.add_variable_from_reference(variable, name="gradient") for variable in variables]
        self._slots.pairs = list(zip(variables, slots, strict=True))

    def kept(self) -> list[tuple[Any, Any]]:
        return [(variable, slot.numpy()) for variable, slot in self._slots.pairs]

    def scale_loss(self, loss: Any) -> Any:
        return loss * self._scale

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        slot = self._slots.pairs[keras_model.index_of(self, variable)][1]
        dense = tf.convert_to_tensor(gradient)  # for rows of a table too: each row is the sum of its gradients
        self.assign(slot, tf.cast(dense, slot.dtype) / self._scale)

    def get_config(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def without_random_layers(model: keras.Model) -> Iterator[list[str]]:
    """Makes layers that draw random numbers behave as in inference inside the block; yields their names."""
    layers = [layer for layer in keras_model.layers_of(model, include_self=False) if _draws(layer)]
    with _put([(layer, "call", _in_inference(layer)) for layer in layers]):
        yield [layer.name for layer in layers]


_calls: contextvars.ContextVar[list[tuple[Any, Any]] | None] = contextvars.ContextVar("layer_calls", default=None)


def _reporting(layer: keras.layers.Layer) -> Callable[..., Any]:
    own = layer.call

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        outputs = own(*args, **kwargs)
        calls = _calls.get()
        if calls is not None:
            calls.append((layer, outputs))
        return outputs

    return call


def _in_inference(layer: keras.layers.Layer) -> Callable[..., Any]:
    own = layer.call

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(own).bind(*args, **kwargs)
        bound.arguments["training"] = False
        return own(*bound.args, **bound.kwargs)

    return call


def _draws(layer: keras.layers.Layer) -> bool:
    """Whether a layer has a random seed generator, and a `training` argument to switch it off."""
    has_seed = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return has_seed and "training" in inspect.signature(layer.call).parameters


def is_callable(model: keras.Model) -> bool:
    """Whether a model defines a forward pass, and not only a `train_step` that runs other models."""
    return type(model).call is not keras.Model.call


def called(model: keras.Model, x: Any) -> Any:
    """The outputs of a model in training mode."""
    return model(x, training=True) if _takes_training(model) else model(x)


def _takes_training(model: keras.Model) -> bool:
    parameters = inspect.signature(model.call).parameters.values()
    return any(each.name == "training" or each.kind is each.VAR_KEYWORD for each in parameters)


def _has_rows_of(leaf: tf.Tensor, x: Any) -> bool:
    sizes = {each.shape[0] for each in tf.nest.flatten(x) if isinstance(each, tf.Tensor) and each.shape.rank}
    return leaf.shape[0] in sizes


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
