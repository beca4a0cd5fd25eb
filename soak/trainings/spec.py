"""A training as data: enough to run it again, from JSON too."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

THREADS, COMPILED = "MirroredStrategy", "TPUStrategy"
SCOPE, REPLICATE = "scope", "replicate_model"

FEEDS = ("arrays", "dataset", "generator", "PyDataset", "train_on_batch")
"""How the batches reach the model. "dataset" is a `tf.data.Dataset` from a generator: its length is not known."""

RANDOM_LAYERS = frozenset({"Dropout", "GaussianNoise", "SpatialDropout1D", "SpatialDropout2D"})
"""Layers that draw other numbers on replicas than on one device."""


class Part(NamedTuple):
    """A Keras object: the name of its class and the arguments. A part among the arguments is an object too."""

    name: str
    options: dict[str, Any] = {}  # noqa: RUF012  # never written to


SGD = Part("SGD")


class Head(NamedTuple):
    """One output of the model."""

    labels: str  # "numbers", "binary", "one_hot" or "classes"
    loss: Part  # the loss
    metrics: tuple[Part, ...] = ()  # metrics that ignore sample weights
    weighted: tuple[Part, ...] = ()  # metrics that take them
    positive: bool = False  # whether outputs and labels are above 0
    logits: bool = False  # whether the outputs are logits


@dataclasses.dataclass(frozen=True)
class Spec:
    """A training.

    The defaults are the simplest values. `shrink.py` tries them in the place of what was drawn.
    """

    seed: int  # the seed of weights and data
    strategy: str  # MirroredStrategy or TPUStrategy
    replicas: int  # the number of replicas
    api: str  # "scope" builds the model in `strategy.scope()`; "replicate_model" replicates a plain one
    inputs: str  # "vector", "sequence", "image", "volume", "tokens", "several" or "text"
    heads: tuple[Head, ...]  # the outputs
    body: tuple[Part, ...] = ()  # the layers between inputs and heads
    optimizer: Part = SGD  # the optimizer, without its learning rate
    # the rows of each batch of an epoch. Arrays are divided by Keras: into batches of the first size.
    sizes: tuple[int, ...] = (4,)
    feed: str = "arrays"  # one of `FEEDS`
    dtype: str = "float32"  # Keras' floatx: "float32" or "float64"
    mask_zero: bool = False  # whether embeddings mask token 0
    shared: bool = False  # whether one layer is called twice at the beginning
    style: str = "functional"  # "functional", "subclass" or "own_train_step"
    rate: float = 0.05  # the learning rate
    schedule: Part | None = None  # the schedule of the learning rate, which begins with `rate`
    loss_scale: bool = False  # whether the optimizer scales the loss
    loss_weights: bool = False  # whether heads have weights
    epochs: int = 1  # the number of epochs
    limit: int | None = None  # `steps_per_epoch` of arrays
    steps_per_execution: int = 1  # as in `compile`
    run_eagerly: bool = False  # as in `compile`
    jit_compile: bool | str = False  # as in `compile`
    sample_weight: bool = False  # whether samples have weights
    class_weight: bool = False  # whether classes have weights
    validation: str | None = None  # None, "split" or "data"
    callbacks: tuple[str, ...] = ()  # names in `callbacks.py`
    # what happens between a first and a second `fit`: None for no second one, or a name in `run.py`
    between: str | None = None

    @property
    def comparable(self) -> bool:
        """Whether the numbers are those of one device, as far as the docs say: not if a layer draws random numbers."""
        return not any(part.name in RANDOM_LAYERS for part in self.body)

    def to_json(self) -> str:
        """The spec as one line of JSON, without the fields that have their default."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return json.dumps({field.name: value for field, value in values.items() if value != field.default})

    @classmethod
    def from_json(cls, text: str) -> Spec:
        """The spec that `to_json` wrote."""
        data = json.loads(text)
        data["heads"] = tuple(_head(each) for each in data["heads"])
        data["body"] = tuple(_part(each) for each in data.get("body", ()))
        for name in ("optimizer", "schedule"):
            if data.get(name) is not None:
                data[name] = _part(data[name])
        for name in ("sizes", "callbacks"):
            if name in data:
                data[name] = tuple(data[name])
        return cls(**data)

    def __str__(self) -> str:
        return f"{self.seed}: {self.strategy}({self.replicas}), {self.api}, {self.feed} of {self.inputs}"


def _part(data: list[Any]) -> Part:
    name, options = data
    return Part(name, {key: _part(value) if _is_part(value) else value for key, value in options.items()})


def _is_part(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], dict)


def _head(data: list[Any]) -> Head:
    labels, loss, metrics, weighted, positive, logits = data
    return Head(labels, _part(loss), tuple(map(_part, metrics)), tuple(map(_part, weighted)), positive, logits)
