"""Trains a spec, on its strategy or on one device, and collects every number that comes out."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import tempfile
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replica_engine
from replica_engine.keras import replicate_model
from soak.trainings import callbacks, data, model
from soak.trainings.callbacks import Numbers
from soak.trainings.spec import COMPILED, REPLICATE, SCOPE, Spec

TEST_BATCH = 5  # the size of the batches of `evaluate`, of which there are two


@functools.cache
def make_shared_strategy(name: str, replicas: int) -> Any:
    """One strategy for all specs of a kind."""
    if name == COMPILED:
        return replica_engine.TPUStrategy(num_cores=replicas)
    return replica_engine.MirroredStrategy(replica_engine.logical_devices(4)[:replicas])


def trained(
    spec: Spec,
    one_device: bool = False,
    nudge: int | None = None,
    compiled: bool = False,
    uses: tuple[str, ...] = ("evaluate", "predict"),
    test_batch: int = TEST_BATCH,
) -> Numbers:
    """All numbers of a training: logs, metrics, weights, the state of the optimizer, predictions.

    Args:
        spec: the training.
        one_device: trains with plain Keras, without a strategy.
        nudge: changes the initial weights by a unit in the last place, up or down at random from this seed.
        compiled: TensorFlow compiles the step of plain Keras with XLA.
        uses: what is done with the trained model.
        test_batch: the size of the batches of `evaluate`.
    """
    keras.backend.clear_session()
    before = keras.config.floatx()
    keras.config.set_floatx(spec.dtype)
    try:
        with tempfile.TemporaryDirectory() as folder:
            training = _Training(spec, one_device, compiled, test_batch, folder)
            training.train(nudge)
            training.use(uses)
            return training.numbers
    finally:
        keras.config.set_floatx(before)


class _Training:
    """One training, from the model to its predictions; `numbers` are what came out."""

    def __init__(self, spec: Spec, one_device: bool, compiled: bool, test_batch: int, folder: str):
        self.spec, self.one_device, self.folder = spec, one_device, folder
        self._test_batch = test_batch
        self._compiled = compiled
        self._is_plain = one_device  # what trains now is plain Keras
        self.numbers: Numbers = {}
        self._strategy = None if one_device else make_shared_strategy(spec.strategy, spec.replicas)

    def train(self, nudge: int | None) -> None:
        """`fit`, and what comes between two of them."""
        with self._scope():
            self.model = model.built(self.spec)
        self._compile(self.model)
        if nudge is not None:
            model.nudged(self.model, nudge)
        self.runner = self._replicated(self.model)
        self._fit("first", self.runner, self.spec.epochs)
        if self.spec.between is not None:
            self._between(self.spec.between)
            self._fit("second", self.runner, 1)

    def _scope(self) -> contextlib.AbstractContextManager[object]:
        """Where models are made."""
        in_scope = self._strategy is not None and self.spec.api == SCOPE
        return self._strategy.scope() if in_scope else contextlib.nullcontext()

    def _compile(self, made: keras.Model) -> None:
        with self._scope():
            model.compile_model(made, self.spec, self.one_device)
        if self._compiled:
            made.jit_compile = True

    def _replicated(self, made: keras.Model) -> keras.Model:
        return replicate_model(made, strategy=self._strategy) if self._strategy and self.spec.api == REPLICATE else made

    def _fit(self, when: str, runner: keras.Model, epochs: int) -> None:
        """Trains, then writes down history, weights and the optimizer's state."""
        spec = self.spec
        if spec.feed == "train_on_batch":
            self._on_batches(when, runner, epochs)
        else:
            history = runner.fit(
                verbose=0,
                shuffle=False,
                epochs=epochs,
                callbacks=callbacks.made(spec, self.numbers, when, self.folder),
                class_weight={0: 0.5, 1: 2.0, 2: 1.5} if spec.class_weight else None,
                **self._fed(),
                **self._validation(),
            ).history
            self.numbers |= {f"{when} history {name}": np.asarray(value) for name, value in history.items()}
        self._write(f"{when} weight", self.model.weights)
        self._write(f"{when} optimizer", self.model.optimizer.variables)

    def _fed(self) -> dict[str, Any]:
        """The arguments of `fit` for the training data."""
        spec = self.spec
        if spec.feed == "arrays":
            x, y, *weights = data.samples(spec, sum(spec.sizes), data.TRAIN)
            named = {"sample_weight": weights[0] if len(spec.heads) == 1 else list(weights[0])} if weights else {}
            y = y if len(spec.heads) == 1 else list(y)
            return {"x": x, "y": y, "batch_size": spec.sizes[0], "steps_per_epoch": self._limit()} | named
        batches = data.batches(spec, spec.sizes, data.BATCHES)
        if spec.feed == "dataset":
            return {"x": self._dataset(batches)}
        if spec.feed == "PyDataset":
            return {"x": data.Batches(batches)}
        return {"x": (batch for batch in itertools.cycle(batches)), "steps_per_epoch": len(batches)}

    def _dataset(self, batches: list[tuple[Any, ...]]) -> tf.data.Dataset:
        # Plain Keras begins a step when a dataset of unknown length has ended: it makes the part that needs no data.
        return data.dataset(batches, known_length=self._is_plain)

    def _limit(self) -> int | None:
        full = sum(self.spec.sizes) // self.spec.sizes[0]
        return self.spec.limit if self.spec.limit is not None and full >= self.spec.limit else None

    def _validation(self) -> dict[str, Any]:
        if self.spec.validation == "split" and sum(self.spec.sizes) > 3 and self.spec.inputs != "text":
            return {"validation_split": 0.3}
        if self.spec.validation is None:
            return {}
        size = self._test_batch
        if self.spec.feed == "dataset":
            return {"validation_data": self._dataset(data.batches(self.spec, (size, size), data.VALIDATION))}
        samples = data.samples(self.spec, 2 * size, data.VALIDATION)
        return {"validation_data": samples, "validation_batch_size": size}

    def _on_batches(self, when: str, runner: keras.Model, epochs: int) -> None:
        batches = data.batches(self.spec, self.spec.sizes, data.BATCHES) * epochs
        logs: list[tuple[str, Any]] = []
        for index, (x, y, *weights) in enumerate(batches):
            given = {"sample_weight": weights[0]} if weights else {}
            logs.append((f"train {index}", runner.train_on_batch(x, y, return_dict=True, **given)))
        logs.append(("test", runner.test_on_batch(*batches[0], return_dict=True)))
        for step, log in logs:
            self.numbers |= {f"{when} {step} {name}": np.asarray(value) for name, value in log.items()}

    def _write(self, name: str, variables: list[Any]) -> None:
        for index, variable in enumerate(variables):
            if "seed_generator" not in variable.path:
                self.numbers[f"{name} {index} {variable.name}"] = keras.ops.convert_to_numpy(variable)

    def _between(self, name: str) -> None:
        """What happens between the two fits."""
        made = self.model
        if name == "save" and self.spec.style == "functional":
            path = os.path.join(self.folder, "model.keras")
            self.runner.save(path)
            with self._scope():
                self.model = keras.saving.load_model(path, custom_objects=_OWN)
            self.runner = self._replicated(self.model)
        elif name == "weights":
            path = os.path.join(self.folder, "all.weights.h5")
            self.runner.save_weights(path)
            made.set_weights([weight * 0 for weight in made.get_weights()])
            self.runner.load_weights(path)
        elif name == "checkpoint":
            written = tf.train.Checkpoint(model=made).write(os.path.join(self.folder, "checkpoint"))
            made.set_weights([weight * 0 for weight in made.get_weights()])
            tf.train.Checkpoint(model=made).read(written)
        elif name == "original":
            self._is_plain = True
            self._fit("original", made, 1)
            self._is_plain = self.one_device
        elif name in ("recompile", "freeze"):
            if name == "freeze":
                for layer in made.layers[:2]:
                    layer.trainable = False
            self._compile(made)

    def use(self, uses: tuple[str, ...]) -> None:
        """`evaluate` and `predict`."""
        size = self._test_batch
        x, y, *weights = data.samples(self.spec, 2 * size, data.TEST)
        if self.spec.feed == "dataset":
            tested: dict[str, Any] = {"x": self._dataset(data.batches(self.spec, (size, size), data.TEST))}
        else:
            tested = {"x": x, "y": y, "batch_size": size} | ({"sample_weight": weights[0]} if weights else {})
        if "evaluate" in uses:
            found = self.runner.evaluate(verbose=0, return_dict=True, **tested)
            self.numbers |= {f"evaluate {name}": np.asarray(value) for name, value in found.items()}
        if "predict" in uses:
            outputs = tf.nest.flatten(self.runner.predict(x, batch_size=size, verbose=0))
            self.numbers |= {f"predict {index}": np.asarray(each) for index, each in enumerate(outputs)}


_OWN = {"own_loss": model.own_loss, "own_metric": model.own_metric, "LargestError": model.LargestError}
