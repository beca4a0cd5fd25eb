"""The real models of the benchmarks: what users train, each built with Keras on any of its backends.

No model has dropout, because the backends of Keras draw different random numbers. Weights and batches are NumPy arrays
from a fixed seed, so all contenders start from the same numbers. Keras is imported when a model is built: its backend
is chosen before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks import shared_models
from benchmarks.shared_models import drawn

BATCH = 16  # the number of examples of all replicas together

IMAGE = (64, 64, 3)

CLASSES = 10

BERT_WORDS, BERT_LENGTH, BERT_PLACES, BERT_WIDTH, BERT_LAYERS, BERT_HEADS = 30522, 128, 512, 128, 2, 2
"""The sizes of `bert_tiny_en_uncased` in KerasHub. An example has 128 tokens, none of them padding."""

LSTM_WORDS, LSTM_LENGTH, LSTM_WIDTH, LSTM_LAYERS = 10000, 20, 200, 2
"""The sizes of the small language model of Zaremba et al. (2014) for the Penn Treebank."""


@dataclasses.dataclass(frozen=True)
class KerasModel:
    """A model and its data."""

    title: str  # the name in the table
    build: Callable[[], Any]  # makes the model; its outputs are logits
    example: tuple[int, ...]  # the shape of an example
    labels: tuple[int, ...] = ()  # the shape of the labels of an example
    classes: int = CLASSES  # the number of classes
    ids: int = 0  # the number of different tokens in the examples; 0 for examples of real numbers
    batch_norm: bool = False  # whether replicas normalize with the statistics of their own part of the batch
    # the learning rate: large enough that a wrong update changes the second loss, and small enough that rounding does
    # not change it
    rate: float = 0.01
    batch: int = BATCH  # the number of examples in a batch, of all replicas or of one chip
    batches: int = 1  # the number of batches in an epoch, of a model that `fit` trains

    def data(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """So many examples and their labels."""
        random = np.random.default_rng(1)
        return drawn(random, (count, *self.example), self.ids), drawn(random, (count, *self.labels), self.classes)


def initial(model: Any) -> Any:
    """A model with new weights: its kernels and tables are random, and its vectors stay as Keras makes them."""
    weights = model.get_weights()
    random = shared_models.initial(weight.shape for weight in weights)
    model.set_weights([new if new.ndim > 1 else old for new, old in zip(random, weights, strict=True)])
    return model


def images(kind: str, shape: tuple[int, int, int] = IMAGE, classes: int = CLASSES) -> Any:
    """A model of `keras.applications`."""
    from keras import applications

    made = getattr(applications, kind)
    return made(weights=None, input_shape=shape, classes=classes, classifier_activation=None)


def bert(width: int = BERT_WIDTH, layers_: int = BERT_LAYERS, heads: int = BERT_HEADS) -> Any:
    """The architecture of KerasHub's `BertTextClassifier`, in layers of Keras: KerasHub is not needed."""
    from keras import Input, Model, layers, ops

    class Places(layers.Layer):
        """Adds a learned vector for each place."""

        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=(BERT_PLACES, shape[-1]), name="table")

        def call(self, x: Any) -> Any:
            return x + self.table[: x.shape[1]]

    tokens = Input((BERT_LENGTH,), dtype="int32")
    x = Places()(layers.Embedding(BERT_WORDS, width)(tokens))
    x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Embedding(2, width)(ops.zeros_like(tokens)))
    for _ in range(layers_):
        attended = layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = layers.LayerNormalization(epsilon=1e-12)(x + attended)
        inner = layers.Dense(4 * width, lambda y: ops.gelu(y, approximate=True))(x)
        x = layers.LayerNormalization(epsilon=1e-12)(x + layers.Dense(width)(inner))
    pooled = layers.Dense(width, "tanh")(x[:, 0])
    return Model(tokens, layers.Dense(CLASSES)(pooled))


def _lstm() -> Any:
    from keras import Input, Sequential, layers

    recurrent = [layers.LSTM(LSTM_WIDTH, return_sequences=True) for _ in range(LSTM_LAYERS)]
    words = layers.Embedding(LSTM_WORDS, LSTM_WIDTH)
    return Sequential([Input((LSTM_LENGTH,), dtype="int32"), words, *recurrent, layers.Dense(LSTM_WORDS)])


MODELS = {
    "resnet": KerasModel("ResNet-50", partial(images, "ResNet50"), IMAGE, batch_norm=True, rate=3e-5),
    "mobilenet": KerasModel("MobileNetV2", partial(images, "MobileNetV2"), IMAGE, batch_norm=True, rate=3e-5),
    "bert": KerasModel("BERT tiny", bert, (BERT_LENGTH,), ids=BERT_WORDS),
    "lstm": KerasModel(
        "LSTM language model", _lstm, (LSTM_LENGTH,), (LSTM_LENGTH,), LSTM_WORDS, ids=LSTM_WORDS, rate=10.0
    ),
}
"""The models, by the name on the command line."""
