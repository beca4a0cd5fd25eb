"""The programs: each case on one device, and in each of its ways on replicas."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from helpers.devices import DEVICES

import replica_engine
from replica_engine.keras import replicate_model
from tests.baseline.errors import said
from tests.baseline.record import RAISED
from tests.keras_table.cases import BATCH, CASES, REPLICATED, SCOPE_COMPILED, SCOPES, Case

Numbers = dict[str, np.ndarray]
"""What a program computes, by a kind and a name: "losses/batch 0"."""

ONE_DEVICE = "one device"
COMPILED = (SCOPE_COMPILED, REPLICATED[1])


class Program(NamedTuple):
    """A program.

    Attributes:
        case: what is trained.
        way: how, or `ONE_DEVICE`.
    """

    case: Case
    way: str

    @property
    def name(self) -> str:
        """The case and the way."""
        return f"{self.case.name}: {self.way}"

    @property
    def device(self) -> str:
        """The name of the program that does the same on one device."""
        return f"{self.case.name}: {ONE_DEVICE}"

    def numbers(self, nudge: int | None = None) -> Numbers:
        """Runs it: what it computes; of a model that cannot be made, what that raised."""
        keras.backend.clear_session()  # messages have the names of layers, which count what the process has made
        keras.utils.set_random_seed(0)
        try:
            return _Training(self.case, self.way).numbers()
        except Exception as error:
            return {RAISED: np.array(said(error))}


@functools.cache
def programs() -> tuple[Program, ...]:
    """All of them: those of a case follow each other."""
    return tuple(Program(case, way) for case in CASES for way in (ONE_DEVICE, *case.ways))


class _Training:
    """One training, and what the model can do then.

    Each method may raise, which is written down, and the next one is called.
    """

    def __init__(self, case: Case, way: str):
        self._case, self._way = case, way
        # For each batch that is trained, those that have its logs. An empty batch is not a step, and has the logs of
        # the one before it. Plain Keras makes a step of it, in which momentum moves the weights.
        self._batches: list[list[int]] = []
        for index, size in enumerate(case.sizes):
            if size or way != ONE_DEVICE:
                self._batches.append([])
            self._batches[-1].append(index)
        self._sizes = tuple(case.sizes[first] for first, *_ in self._batches)
        self._found: Numbers = {}
        strategy = None if way == ONE_DEVICE else _strategy(case, way)  # of its own: each warns once of a thing
        if way in SCOPES:
            with strategy.scope():
                self._model = case.make()
        else:
            self._model = case.make()
        self._runner = replicate_model(self._model, strategy=strategy) if way in REPLICATED else self._model
        if way == ONE_DEVICE:
            self._model.run_eagerly = True  # which saves the time to trace it
        draw = np.random.default_rng(3)
        self._model.set_weights([0.5 * draw.normal(size=each.shape) for each in self._model.get_weights()])

    def numbers(self) -> Numbers:
        """Trains, evaluates, predicts."""
        names: list[str] = []
        handler = _Warnings(names)
        logger = logging.getLogger("replica_engine")
        logger.addHandler(handler)
        try:
            self._do("fit", self._on_calls if self._case.feed == "calls" else self._fit)
            self._do("weights", self._weights)
            self._do("evaluate", self._evaluate)
            self._do("predict", self._predict)
        finally:
            logger.removeHandler(handler)
        return self._found | {"warnings": np.array(", ".join(sorted(set(names))))}

    def _do(self, name: str, method: Callable[[], None]) -> None:
        said_of = "nothing"
        try:
            method()
        except Exception as error:
            said_of = said(error)
        self._found[f"raised/{name}"] = np.array(said_of)

    def _fit(self) -> None:
        case = self._case
        if case.feed == "arrays":
            x, *rest = case.samples(sum(self._sizes), 1)
            fed: dict[str, Any] = {"x": x, "y": rest[0], "batch_size": BATCH}
        else:
            fed = {"x": case.dataset(self._sizes, 1)}
        callbacks = [_Logs(self._log_batch)]
        callbacks += [case.callback()] if case.callback else []
        history = self._runner.fit(**fed, epochs=case.epochs, shuffle=False, verbose=0, callbacks=callbacks).history
        self._log("epochs", history)

    def _on_calls(self) -> None:
        for index, batch in enumerate(self._case.dataset(self._sizes, 1).as_numpy_iterator()):
            self._log(f"batch {index}", self._runner.train_on_batch(*batch, return_dict=True))

    def _log_batch(self, batch: int, logs: Any) -> None:
        for index in self._batches[batch]:
            self._log(f"batch {index}", logs)

    def _log(self, when: str, logs: Any) -> None:
        for name, value in (logs or {}).items():
            kind, count = "losses" if name == "loss" else "metrics", 0
            while (key := f"{kind}/{when} {name}{f', epoch {count}' * bool(count)}") in self._found:
                count += 1
            self._found[key] = np.asarray(value)

    def _weights(self) -> None:
        optimizer = self._model.optimizer.variables
        for kind, variables in (("weights", self._model.weights), ("optimizer", optimizer)):
            for index, variable in enumerate(variables):
                self._found[f"{kind}/{index} {variable.name}"] = keras.ops.convert_to_numpy(variable)

    def _evaluate(self) -> None:
        if self._case.feed == "calls":
            logs = self._runner.test_on_batch(*self._case.samples(self._case.tested, 2), return_dict=True)
        else:
            logs = self._runner.evaluate(self._case.dataset((self._case.tested,), 2), verbose=0, return_dict=True)
        self._found |= {f"evaluate/{name}": np.asarray(value) for name, value in logs.items()}

    def _predict(self) -> None:
        x = self._case.samples(7, 2)[0]
        if self._case.feed == "calls":
            found = self._runner.predict_on_batch(x)
        else:
            found = self._runner.predict(x, batch_size=4, verbose=0)
        self._found["predict/7 samples"] = np.asarray(found)


def _strategy(case: Case, way: str) -> Any:
    if way not in COMPILED:
        return replica_engine.MirroredStrategy(DEVICES[: case.replicas])
    if case.devices == 1:
        return replica_engine.TPUStrategy(num_cores=case.replicas)
    return replica_engine.TPUStrategy(
        num_cores=case.replicas * case.devices, cores_per_replica=case.devices, distribution="fsdp"
    )


class _Logs(keras.callbacks.Callback):
    def __init__(self, write: Callable[[int, Any], None]):
        super().__init__()
        self._write = write

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._write(batch, logs)


class _Warnings(logging.Handler):
    """The names of warnings that the documentation has; others say how long a machine takes."""

    def __init__(self, names: list[str]):
        super().__init__(logging.WARNING)
        self._names = names

    def emit(self, record: logging.LogRecord) -> None:
        self._names += re.findall(r"warnings\.html#(\w+)", record.getMessage())
