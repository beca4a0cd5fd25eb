"""The real models of the benchmarks: what users train, each built with Keras on any of its backends.

No model has dropout, because the backends of Keras draw different random numbers. Weights and batches are NumPy arrays
from a fixed seed, so all contenders start from the same numbers. Keras is imported when a model is built: its backend
is chosen before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

BATCH = 16
"""The number of examples of all replicas together."""

IMAGE = (64, 64, 3)

CLASSES = 10

BERT_WORDS, BERT_LENGTH, BERT_PLACES, BERT_WIDTH, BERT_LAYERS, BERT_HEADS = 30522, 128, 512, 128, 2, 2
"""The sizes of `bert_tiny_en_uncased` in KerasHub. An example has 128 tokens, none of them padding."""

LSTM_WORDS, LSTM_LENGTH, LSTM_WIDTH, LSTM_LAYERS = 10000, 20, 200, 2
"""The sizes of the small language model of Zaremba et al. (2014) for the Penn Treebank."""


@dataclasses.dataclass(frozen=True)
class KerasModel:
    """A model and its data.

    Attributes:
        title: the name in the table.
        build: makes the model; its outputs are logits.
        example: the shape of an example.
        labels: the shape of the labels of an example.
        classes: the number of classes.
        ids: the number of different tokens in the examples; 0 for examples of real numbers.
        batch_norm: whether replicas normalize with the statistics of their own part of the batch.
        rate: the learning rate: large enough that a wrong update changes the second loss, and small enough that
            rounding does not change it.
    """

    title: str
    build: Callable[[], Any]
    example: tuple[int, ...]
    labels: tuple[int, ...] = ()
    classes: int = CLASSES
    ids: int = 0
    batch_norm: bool = False
    rate: float = 0.01

    def data(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """A batch and its labels."""
        random = np.random.default_rng(1)
        x: np.ndarray
        if self.ids:
            x = random.integers(self.ids, size=(batch, *self.example), dtype=np.int32)
        else:
            x = random.standard_normal((batch, *self.example), dtype=np.float32)
        return x, random.integers(self.classes, size=(batch, *self.labels), dtype=np.int32)


def initial(weights: Sequence[Any]) -> list[np.ndarray]:
    """Initial values for the weights of a model: kernels and tables are random, and vectors are as Keras makes them."""
    random = np.random.default_rng(0)
    return [
        (random.standard_normal(weight.shape) / np.sqrt(np.prod(weight.shape[:-1]))).astype(np.float32)
        if len(weight.shape) > 1
        else np.asarray(weight)
        for weight in weights
    ]


def _resnet() -> Any:
    from keras import applications

    return applications.ResNet50(weights=None, input_shape=IMAGE, classes=CLASSES, classifier_activation=None)


def _mobilenet() -> Any:
    from keras import applications

    return applications.MobileNetV2(weights=None, input_shape=IMAGE, classes=CLASSES, classifier_activation=None)


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
    "resnet": KerasModel("ResNet-50", _resnet, IMAGE, batch_norm=True, rate=3e-5),
    "mobilenet": KerasModel("MobileNetV2", _mobilenet, IMAGE, batch_norm=True, rate=3e-5),
    "bert": KerasModel("BERT tiny", bert, (BERT_LENGTH,), ids=BERT_WORDS),
    "lstm": KerasModel(
        "LSTM language model",
        _lstm,
        (LSTM_LENGTH,),
        labels=(LSTM_LENGTH,),
        classes=LSTM_WORDS,
        ids=LSTM_WORDS,
        rate=10.0,
    ),
}
"""The models, by the name on the command line."""
