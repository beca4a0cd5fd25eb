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
    """One output of the model.

    Attributes:
        labels: "numbers", "binary", "one_hot" or "classes".
        loss: the loss.
        metrics: metrics that ignore sample weights.
        weighted: metrics that take them.
        positive: whether outputs and labels are above 0.
        logits: whether the outputs are logits.
    """

    labels: str
    loss: Part
    metrics: tuple[Part, ...] = ()
    weighted: tuple[Part, ...] = ()
    positive: bool = False
    logits: bool = False


@dataclasses.dataclass(frozen=True)
class Spec:
    """A training.

    The defaults are the simplest values. `shrink.py` tries them in the place of what was drawn.

    Attributes:
        seed: the seed of weights and data.
        strategy: MirroredStrategy or TPUStrategy.
        replicas: the number of replicas.
        api: "scope" builds the model in `strategy.scope()`; "replicate_model" replicates a plain one.
        inputs: "vector", "sequence", "image", "volume", "tokens", "several" or "text".
        optimizer: the optimizer, without its learning rate.
        heads: the outputs.
        body: the layers between inputs and heads.
        sizes: the rows of each batch of an epoch. Arrays are divided by Keras: into batches of the first size.
        feed: one of `FEEDS`.
        dtype: Keras' floatx: "float32" or "float64".
        mask_zero: whether embeddings mask token 0.
        shared: whether one layer is called twice at the beginning.
        style: "functional", "subclass" or "own_train_step".
        rate: the learning rate.
        schedule: the schedule of the learning rate, which begins with `rate`.
        loss_scale: whether the optimizer scales the loss.
        loss_weights: whether heads have weights.
        epochs: the number of epochs.
        limit: `steps_per_epoch` of arrays.
        steps_per_execution: as in `compile`.
        run_eagerly: as in `compile`.
        jit_compile: as in `compile`.
        sample_weight: whether samples have weights.
        class_weight: whether classes have weights.
        validation: None, "split" or "data".
        callbacks: names in `callbacks.py`.
        between: what happens between a first and a second `fit`: None for no second one, or a name in `run.py`.
    """

    seed: int
    strategy: str
    replicas: int
    api: str
    inputs: str
    heads: tuple[Head, ...]
    body: tuple[Part, ...] = ()
    optimizer: Part = SGD
    sizes: tuple[int, ...] = (4,)
    feed: str = "arrays"
    dtype: str = "float32"
    mask_zero: bool = False
    shared: bool = False
    style: str = "functional"
    rate: float = 0.05
    schedule: Part | None = None
    loss_scale: bool = False
    loss_weights: bool = False
    epochs: int = 1
    limit: int | None = None
    steps_per_execution: int = 1
    run_eagerly: bool = False
    jit_compile: bool | str = False
    sample_weight: bool = False
    class_weight: bool = False
    validation: str | None = None
    callbacks: tuple[str, ...] = ()
    between: str | None = None

    @property
    def comparable(self) -> bool:
        """Whether the numbers are those of one device, as far as the docs say: not if a layer draws random numbers."""
        return not any(part.name in RANDOM_LAYERS for part in self.body)

    def to_json(self) -> str:
        """The spec as one line of JSON, without the fields that have their default."""
        fields = {field.name: field for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in fields}
        return json.dumps({name: value for name, value in values.items() if value != fields[name].default})

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
