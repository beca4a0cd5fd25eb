"""The parity check of a Keras model: on one device, and on the replicas that `replicate_model` makes.

All runs use the same model object and start from the same weights, one run after the other. Between the runs, and at
the end, everything is restored (`state`). A run has four parts, each from the initial weights:

1. one forward pass in training mode, on a batch that the replicas divide evenly, for the output of each layer;
2. predictions and metrics on the uneven batch;
3. a step on the first batch and on the uneven one, with an optimizer that keeps the gradients;
4. the training steps: losses, metrics and weights after each step.

Two rules of part 4 keep rounding small:

- Each step starts from the weights that one device has reached. The optimizer keeps its own state, so a mistake in that
  state shows in the next step.
- Elements of a weight whose gradient is 0 but for rounding are not compared. Adam divides such a gradient by its own
  size, so that the element takes a full step in a random direction, on one device too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.errors import ParityArgumentError
from replica_engine.keras import replicate_model
from replica_engine.keras.model import original_of
from replica_engine.testing.parity import causes, settings
from replica_engine.testing.parity.check import Check, logger
from replica_engine.testing.parity.comparison import (
    OF_ALL_GRADIENTS,
    Computed,
    Numbers,
    arrays_in,
    largest_of,
    tolerance,
)
from replica_engine.testing.parity.probes import (
    LayerOutputs,
    is_callable,
    kept_gradients,
    steps_as_in_fit,
    without_random_layers,
)
from replica_engine.testing.parity.report import Cause, Difference, ParityReport
from replica_engine.testing.parity.settings import Settings
from replica_engine.testing.parity.state import Attributes, Values, named, put, seeded
from replica_engine.values import samples

_UNSURE = 10
"""The multiple of the tolerance up to which the size of an element of a gradient is unsure, because of rounding."""


def check_model(
    given: Settings, model: keras.Model, x: Any, y: Any = None, sample_weight: Any = None, *, random_layers: bool = True
) -> ParityReport:
    """Runs the parity check of a model; see `check_parity`."""
    model = original_of(model)
    batches = _batches(x, y, sample_weight, given)
    _check_targets(model, batches[0])
    _build(model, batches[0])
    for strategy in given.strategies.values():
        replicate_model(model, strategy=strategy)  # a model that cannot be replicated raises here, before anything runs
    with contextlib.ExitStack() as stack:
        silenced = [] if random_layers else stack.enter_context(without_random_layers(model))
        check = stack.enter_context(_ModelCheck(model, given, batches).undone())
        if silenced:
            check.notes.append(f"Layers that draw random numbers ran in inference mode: {', '.join(silenced)}.")
        return check.report()


class _ModelCheck(Check):
    def __init__(self, model: keras.Model, given: Settings, batches: Sequence[Any]):
        super().__init__(f"model {model.name!r}", given, batches)
        self.limits = tolerance([each.compute_dtype for each in keras_model.layers_of(model)], given.rtol, given.atol)
        self._model = model
        self._even = settings.even(batches[0], given.replicas)
        self._layers = LayerOutputs(model)
        self._has_loss = getattr(model, "compiled", False)
        self._starts: list[dict[str, Any]] = []  # the weights of one device before each step
        self._rounding: dict[str, Any] = {}  # which elements of each weight have a gradient that is only rounding

    @contextlib.contextmanager
    def undone(self) -> Iterator[_ModelCheck]:
        """Prepares the model inside the block; on leaving, the model is as before."""
        first, values = self._attributes(), Values(self._variables())
        try:
            with seeded(self.given.seed):
                keras_model.exchange_functions(self._model, None)
                if self._has_loss and is_callable(self._model) and not keras_model.is_built(self._model):
                    keras_model.build(self._model, self.batches[0])  # the first step would otherwise make variables
            self._start, self._values = self._attributes(), Values(self._variables())
            weights = {id(each): each for each in self._model.variables if not keras_model.is_seed(each)}
            self._weights = named((each.path, each) for each in weights.values())
            yield self
        finally:
            first.restore()
            values.restore()

    def run(self, says: str, strategy: tf.distribute.Strategy | None) -> Computed:
        """Computes the numbers of the four parts, as far as the model has them."""
        found: list[Numbers] = []
        if is_callable(self._model):
            found += self._forward(says, strategy)
        is_own = not keras_trainer.has_keras_step(self._model, "train_step")
        if self._has_loss and (is_own or self._model.optimizer is not None):
            found += self._gradients(says, strategy)
            found += self._training(says, strategy)
        return found

    def causes(
        self, differences: Sequence[Difference], expected: Computed, runs: Mapping[str, Computed]
    ) -> Iterable[Cause]:
        """Looks for known causes in the model, at its initial weights."""
        layers = self._layers.layers
        different = {layers[each.name].name for each in differences if each.name in layers}
        equal = {layer.name for layer in layers.values()} - different
        with self._part():
            return list(causes.of_model(self._model, self._even, self.given.replicas, differences, equal))

    def _forward(self, says: str, strategy: tf.distribute.Strategy | None) -> Iterator[Numbers]:
        last = self.batches[-1]
        logger.info("check_parity: %s, outputs of layers", says)
        with self._part(), self._layers.seen():
            outputs = self._on(strategy).predict_on_batch(self._even[0])
        outputs = {name: outputs[name] for name in self._layers.layers if name in outputs}
        yield Numbers("layer output", f"training mode, {samples.count(self._even)} rows", outputs)
        logger.info("check_parity: %s, predictions", says)
        with self._part():
            predictions = self._on(strategy).predict_on_batch(last[0])
        yield Numbers("prediction", f"{samples.count(last)} rows", arrays_in(predictions, "output"))
        if self._can_be_evaluated():
            logger.info("check_parity: %s, evaluation", says)
            with self._part():
                logs = self._on(strategy).test_on_batch(*last, return_dict=True)
            yield from _logged(logs, f"evaluation, {samples.count(last)} rows")

    def _gradients(self, says: str, strategy: tf.distribute.Strategy | None) -> Iterator[Numbers]:
        sizes = {samples.count(batch): batch for batch in (self.batches[-1], self.batches[0])}
        with self._part(), kept_gradients(self._model) as gradients:
            step = self._on(strategy).train_on_batch
            for number, (rows, batch) in enumerate(sorted(sizes.items(), reverse=True)):
                logger.info("check_parity: %s, gradients, batch %d of %d", says, number + 1, len(sizes))
                step(*batch)
                by_id = gradients()
                found = {name: by_id[id(each)] for name, each in self._weights.items() if id(each) in by_id}
                if strategy is None and batch is self.batches[0]:
                    self._note_rounding(found)
                yield Numbers("gradient", f"initial weights, {rows} rows", found)
                self._values.restore()
                self._model.reset_metrics()

    def _training(self, says: str, strategy: tf.distribute.Strategy | None) -> Iterator[Numbers]:
        total = len(self.batches)
        with self._part():
            step = self._on(strategy).train_on_batch
            for index, batch in enumerate(self.batches):
                logger.info("check_parity: %s, training, batch %d of %d", says, index + 1, total)
                if strategy is None:
                    self._starts.append({name: variable.numpy() for name, variable in self._weights.items()})
                start = self._starts[index]
                for name, variable in self._weights.items():
                    put(variable, start[name])
                where = f"step {index + 1} of {total}, {samples.count(batch)} rows"
                yield from _logged(step(*batch, return_dict=True), where, index + 1)
                weights = {
                    name: np.where(self._rounding.get(name, False), start[name], variable.numpy())
                    for name, variable in self._weights.items()
                }
                yield Numbers("weight", where, weights, index + 1, start)

    def _note_rounding(self, gradients: Mapping[str, Any]) -> None:
        """Notes the elements of weights whose gradients may be nothing but rounding."""
        share = OF_ALL_GRADIENTS * self.limits.rtol
        of_all, small = share * largest_of(gradients), []
        for name, gradient in gradients.items():
            sizes = np.abs(gradient)
            largest = np.max(sizes, initial=0.0)
            self._rounding[name] = (sizes > 0) & (sizes <= max(_UNSURE * self.limits.rtol * largest, of_all))
            if 0 < largest <= of_all:
                self._rounding[name] = np.full(sizes.shape, True)
                small.append(name)
        if small:
            self.notes.append(
                f"All gradients of {', '.join(small)} are less than {share:g} of the model's largest gradient, so they "
                "may be nothing but rounding, and these weights were not compared after steps."
            )

    @contextlib.contextmanager
    def _part(self) -> Iterator[None]:
        """Inside the block, the model starts from its state at the start of the check, which is restored on leaving."""
        try:
            with seeded(self.given.seed), steps_as_in_fit(self._model):
                # One device runs op by op: XLA would draw other random numbers and round differently.
                self._model.jit_compile = False
                yield
        finally:
            self._start.restore()
            self._values.restore()

    def _on(self, strategy: tf.distribute.Strategy | None) -> Any:
        """The model, or a new replicated model: each part of a run has its own programs."""
        return self._model if strategy is None else replicate_model(self._model, strategy=strategy)

    def _can_be_evaluated(self) -> bool:
        model = self._model
        is_own = type(model).compute_loss is not keras.Model.compute_loss
        is_own = is_own or not keras_trainer.has_keras_step(model, "test_step")
        return self._has_loss and (is_own or model.loss is not None or bool(model.losses))

    def _attributes(self) -> Attributes:
        optimizers = map(keras_model.with_inner_optimizers, keras_model.optimizers_of(self._model))
        parts = [keras_model.layers_of(self._model), keras_model.compiled_parts(self._model), *optimizers]
        return Attributes(itertools.chain(*parts))

    def _variables(self) -> Iterator[Any]:
        yield from keras_model.variables_of(self._model)
        yield from keras_model.own_variables(self._model)


def _logged(logs: Mapping[str, Any], where: str, step: int | None = None) -> Iterator[Numbers]:
    """The losses and the metrics among the logs of a step."""
    losses = {key: np.asarray(value) for key, value in logs.items() if key == "loss" or key.endswith("_loss")}
    yield Numbers("loss", where, losses, step)
    yield Numbers("metric", where, {key: np.asarray(logs[key]) for key in logs if key not in losses}, step)


def _batches(x: Any, y: Any, sample_weight: Any, given: Settings) -> list[Any]:
    if isinstance(x, keras.utils.PyDataset):
        x = (x[index % len(x)] for index in range(given.steps))
    if isinstance(x, tf.data.Dataset) or hasattr(x, "__next__"):
        return [keras.utils.unpack_x_y_sample_weight(each) for each in settings.of_batches(x, given, uneven=True)]
    data = keras.tree.map_structure(_as_fit_does, (x, y, sample_weight))
    return settings.of_arrays(data, given, uneven=True)


def _as_fit_does(array: Any) -> Any:
    """Converts arrays of floating-point numbers to Keras' default dtype, as `fit` does."""
    is_float = isinstance(array, np.ndarray) and array.dtype.kind == "f"
    return array.astype(keras.config.floatx()) if is_float else array


def _check_targets(model: keras.Model, batch: Any) -> None:
    """Checks that there are targets for a loss given to `compile`; a custom step or loss may need none."""
    is_keras_loss = type(model).compute_loss is keras.Model.compute_loss
    is_keras_step = all(keras_trainer.has_keras_step(model, name) for name in ("train_step", "test_step"))
    has_loss = getattr(model, "compiled", False) and getattr(model, "loss", None) is not None
    if batch[1] is None and has_loss and is_keras_loss and is_keras_step:
        raise ParityArgumentError(
            f"The model {model.name!r} is compiled with a loss, and the data has no targets for it. Pass them, "
            "check_parity(model, x, y), or a dataset of (x, y). A model that is not compiled needs no targets: its "
            "layers and predictions are compared."
        )


def _build(model: keras.Model, batch: Any) -> None:
    if keras_model.strategy_of(model) is not None or not keras_model.unbuilt_layers(model):
        return
    x = batch[0]
    if isinstance(model, keras.Sequential) and isinstance(x, tf.Tensor):
        model.build((None, *x.shape[1:]))  # a call would fix the batch size
    else:
        model(samples.take(x, 0, 1))
