"""The data of a spec: arrays, and batches in every form that `fit` takes."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from soak.trainings.spec import Head, Spec

SHAPES: dict[str, tuple[int, ...]] = {
    "vector": (5,),
    "sequence": (6, 3),
    "image": (6, 5, 2),
    "volume": (4, 4, 4, 1),
    "tokens": (6,),
    "text": (1,),
}
TOKENS = 9
WORDS = "abcd"

TRAIN, BATCHES, VALIDATION, TEST = 1, 2, 3, 4
"""Numbers of the data: those of one spec differ."""


def dtype(kind: str) -> str:
    """The dtype of inputs."""
    return {"tokens": "int32", "text": "string"}.get(kind) or keras.config.floatx()


def inputs(spec: Spec, rows: int, number: int) -> Any:
    """Random inputs."""
    draw = np.random.default_rng([spec.seed, number])
    if spec.inputs == "several":
        return {kind: _input(draw, kind, rows) for kind in ("vector", "tokens")}
    return _input(draw, spec.inputs, rows)


def _input(draw: np.random.Generator, kind: str, rows: int) -> Any:
    if kind == "text":  # with a word that the vocabulary lacks
        return tf.constant([[" ".join(draw.choice([*WORDS, "z"], draw.integers(1, 6)))] for _ in range(rows)])
    if kind == "tokens":
        tokens = draw.integers(0, TOKENS, (rows, *SHAPES[kind])).astype("int32")
        tokens[:, 0] = 1  # no row is masked completely
        return tokens
    return draw.normal(size=(rows, *SHAPES[kind])).astype(keras.config.floatx())


def samples(spec: Spec, rows: int, number: int) -> tuple[Any, ...]:
    """Random inputs, labels and, if the spec has them, sample weights."""
    draw = np.random.default_rng([spec.seed, number, 1])
    labels = [_labels(draw, head, rows) for head in spec.heads]
    weights = [draw.random(rows).astype(keras.config.floatx()) for _ in spec.heads]
    x = inputs(spec, rows, number)
    if len(labels) == 1:
        return (x, labels[0], weights[0]) if spec.sample_weight else (x, labels[0])
    return (x, tuple(labels), tuple(weights)) if spec.sample_weight else (x, tuple(labels))


def _labels(draw: np.random.Generator, head: Head, rows: int) -> np.ndarray:
    if head.labels == "binary":
        return draw.integers(0, 2, (rows, 1)).astype(keras.config.floatx())
    if head.labels == "numbers":
        numbers = draw.normal(size=(rows, 2)) + 0.1
        return (np.abs(numbers) + 0.5 if head.positive else numbers).astype(keras.config.floatx())
    classes = draw.integers(0, 3, rows).astype("int64")
    if head.labels == "one_hot":
        return np.eye(3, dtype=keras.config.floatx())[classes]
    if "ignore_class" in head.loss.options:
        classes[draw.random(rows) < 0.3] = head.loss.options["ignore_class"]
    return classes


def batches(spec: Spec, sizes: tuple[int, ...], number: int) -> list[tuple[Any, ...]]:
    """Random samples in batches of these sizes."""
    whole = samples(spec, sum(sizes), number)
    ends = np.cumsum(sizes)
    return [
        tf.nest.map_structure(lambda each, begin=end - size, end=end: each[begin:end], whole)
        for size, end in zip(sizes, ends.tolist(), strict=True)
    ]


def dataset(made: list[tuple[Any, ...]], known_length: bool) -> tf.data.Dataset:
    """A dataset from a generator of the batches. Without `known_length` nobody knows its length."""
    signature = tf.nest.map_structure(lambda each: tf.TensorSpec((None, *each.shape[1:]), each.dtype), made[0])
    result = tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)
    return result.apply(tf.data.experimental.assert_cardinality(len(made))) if known_length else result


class Batches(keras.utils.PyDataset):
    """The batches as a `PyDataset`."""

    def __init__(self, made: list[tuple[Any, ...]]):
        super().__init__()
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return self.made[index]
