"""Trainings that are saved, and go on on another number of replicas, on another strategy or in parts."""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import replica_engine
from replica_engine.keras import replicate_model
from tests.baseline.start import COMPILED, THREADS, Numbers, Start, in_floats, make_shared_strategy

SIZES = (
    (THREADS, 1),
    (THREADS, 2),
    (THREADS, 3),
    (COMPILED, 1),
    (COMPILED, 2),
    (COMPILED, 4),
    ("parts", 4),
    ("replicated", 2),
)
WAYS = ("checkpoint", "checkpoint later", "manager", "weights", "whole model")


class Resumed(NamedTuple):
    """A training in two halves.

    Attributes:
        first: the kind and the number of replicas of the first half.
        second: those of the second half.
        way: how it is saved: "checkpoint later" while the training goes on.
        optimizer: the name of Keras' optimizer.
        accumulated: whether gradients are added up over two steps, and the save comes between them.
    """

    first: tuple[str, int]
    second: tuple[str, int]
    way: str
    optimizer: str
    accumulated: bool


def drawn(draw: random.Random, index: int) -> Resumed:
    """A training whose halves are on different sizes."""
    first, second = draw.sample(SIZES, 2)
    return Resumed(first, second, WAYS[index % len(WAYS)], draw.choice(("Adam", "RMSprop", "SGD")), draw.random() < 0.3)


def run(resumed: Resumed, start: Start) -> Numbers:
    """Three steps in all: two before the save, one after it; and one more of the first half."""
    x, y = start.normal(4, 12, 5), start.normal(4, 12, 2)
    with in_floats("float64"), tempfile.TemporaryDirectory() as folder:
        before = _Half(resumed, resumed.first, start)
        numbers = {f"loss {number}": before.step(x[number], y[number]) for number in range(2)}
        restore = before.save(resumed.way, folder)
        numbers["loss after the save"] = before.step(x[2], y[2])
        after = _Half(resumed, resumed.second, start, seen=-1.0)
        restore(after)
        numbers |= after.values("restored")
        numbers["loss of the other"] = after.step(x[2], y[2])
        return numbers | after.values("at the end") | before.values("without a restore")


class _Half:
    """A model with its optimizer, and a count with a part on each replica."""

    def __init__(self, resumed: Resumed, size: tuple[str, int], start: Start, seen: float = 0.0):
        kind, count = size
        self.resumed = resumed
        strategy: Any = None
        if kind == "parts":
            strategy = replica_engine.TPUStrategy(num_cores=count, distribution="fsdp")
        elif kind != "replicated":
            strategy = make_shared_strategy(kind, count)
        with strategy.scope() if strategy else contextlib.nullcontext():
            self.model = keras.Sequential(
                [keras.Input((5,)), keras.layers.Dense(33, "tanh", name="up"), keras.layers.Dense(2, name="last")],
                name="net",
            )
            options = {"gradient_accumulation_steps": 2} if resumed.accumulated else {}
            optimizer = getattr(keras.optimizers, resumed.optimizer)(0.05, name="optimizer", **options)
            self.model.compile(optimizer, "mse")
            self.model.optimizer.build(self.model.trainable_variables)
            self.seen = tf.Variable(
                np.float64(seen),
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        self.runner = replicate_model(self.model, replicas=count) if kind == "replicated" else self.model
        if seen == 0.0:
            self.model.set_weights([start.normal(*each.shape) / 2 for each in self.model.get_weights()])
        self.checkpoint = tf.train.Checkpoint(model=self.model, optimizer=self.model.optimizer, seen=self.seen)

    def step(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        history = self.runner.fit(x, y, batch_size=len(x), shuffle=False, verbose=0).history
        self.seen.assign(self.seen + 12.0)
        return np.asarray(history["loss"])

    def values(self, when: str) -> Numbers:
        variables = [*self.model.variables, *self.model.optimizer.variables, self.seen]
        return {f"{when} {index} {each.name}": np.asarray(each.numpy()) for index, each in enumerate(variables)}

    def save(self, way: str, folder: str) -> Any:
        """Saves, and gives the function that restores another half."""
        path = os.path.join(folder, "saved")
        if way == "weights":
            self.model.save_weights(path + ".weights.h5")
            return lambda other: other.model.load_weights(path + ".weights.h5")
        if way == "whole model":
            self.model.save(path + ".keras")
            return lambda other: other.model.set_weights(keras.saving.load_model(path + ".keras").get_weights())
        if way == "manager":
            manager = tf.train.CheckpointManager(self.checkpoint, folder, max_to_keep=1)
            manager.save()
            written = manager.save()
        else:
            later = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=way == "checkpoint later")
            written = self.checkpoint.write(path, later)

        def restore(other: _Half) -> None:
            self.checkpoint.sync()
            status = other.checkpoint.restore(written) if way == "manager" else other.checkpoint.read(written)
            status.assert_existing_objects_matched()

        return restore
