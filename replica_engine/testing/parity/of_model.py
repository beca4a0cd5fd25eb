"""The parity check of a Keras model: on one device, and on the replicas that `replicate_model` makes.

All runs use the same model object and start from the same weights, one run after the other. Between the runs, and at
the end, everything is restored (`state`). A run has four parts, each from the initial weights:

1. one forward pass in training mode, on a batch that the replicas divide evenly, for the output of each layer;
2. predictions and metrics on the uneven batch;
3. a step on the first batch and on the uneven one, with an optimizer that keeps the gradients and changes nothing;
4. the training steps: losses, metrics and weights after each step.

One device runs three more times, with the samples of each batch in another order and the last digits of the weights
changed. This shows how much of a difference is rounding (`comparison`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replica_engine._tf.keras import model as keras_model
from replica_engine._tf.keras import trainer as keras_trainer
from replica_engine.errors import LoweringError, ParityArgumentError
from replica_engine.keras import replicate_model
from replica_engine.keras.model import original_of
from replica_engine.testing.parity import batches as cut
from replica_engine.testing.parity import model_causes
from replica_engine.testing.parity.comparison import (
    ORDERS,
    RTOL,
    Comparison,
    Tolerance,
    arrays_in,
    changed_in_last_digits,
    is_within,
    noise,
    tolerance,
)
from replica_engine.testing.parity.probes import Gradients, LayerOutputs, is_callable, without_random_layers
from replica_engine.testing.parity.report import ONE_DEVICE, Cause, Difference, ParityReport
from replica_engine.testing.parity.settings import Settings
from replica_engine.testing.parity.state import Attributes, Values, bare_variables, seeded
from replica_engine.values import samples

_logger = logging.getLogger("replica_engine")


@dataclasses.dataclass
class Run:
    """The results of one run.

    Attributes:
        layers: the outputs of layers.
        predictions: the predictions for the uneven batch.
        evaluation: the losses and metrics of the uneven batch.
        gradients: for the first batch and for the uneven one: the losses, and the gradients by variable.
        steps: for each training step: the logs of the model, and the weights after the step.
    """

    layers: dict[str, Any] = dataclasses.field(default_factory=dict)
    predictions: dict[str, Any] = dataclasses.field(default_factory=dict)
    evaluation: dict[str, Any] = dataclasses.field(default_factory=dict)
    gradients: list[tuple[dict[str, Any], dict[str, Any]]] = dataclasses.field(default_factory=list)
    steps: list[tuple[dict[str, Any], dict[str, Any]]] = dataclasses.field(default_factory=list)


def check_model(
    model: keras.Model, x: Any, y: Any, sample_weight: Any, settings: Settings, random_layers: bool
) -> ParityReport:
    """Runs the parity check of a model; see `check_parity`."""
    model = original_of(model)
    data = _batches(x, y, sample_weight, settings)
    _check_targets(model, data[0])
    _build(model, data[0])
    check = _Check(model, data, settings)
    with contextlib.ExitStack() as stack:
        silenced = [] if random_layers else stack.enter_context(without_random_layers(model))
        stack.enter_context(check.undone())
        return check.report(silenced)


class _Check:
    def __init__(self, model: keras.Model, data: list[Any], settings: Settings):
        self._model = model
        self._batches = data
        self._even = cut.even(data[0], settings.replicas)
        self._settings = settings
        self._layers = LayerOutputs(model)
        self._left_out = dict(settings.left_out)
        self._has_optimizer = getattr(model, "optimizer", None) is not None or not keras_trainer.has_keras_step(
            model, "train_step"
        )
        self._has_loss = getattr(model, "compiled", False)
        # A model that cannot be replicated raises here, before anything runs.
        self._replicated = {name: _replicated(model, strategy) for name, strategy in settings.strategies.items()}

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Prepares the model inside the block; on leaving, the model is as before."""
        first = self._attributes()
        values = Values(self._variables())
        try:
            with seeded(self._settings.seed):
                keras_model.exchange_functions(self._model, None)
                self._make_variables()
            self._start, self._values = self._attributes(), Values(self._variables())
            self._names = _names(self._model)
            self._initial = self._weights()
            yield
        finally:
            first.restore()
            values.restore()

    def report(self, silenced: list[str]) -> ParityReport:
        """Runs on one device and on all strategies, and compares the results."""
        other_orders = [[cut.shuffled(each, seed) for each in self._batches] for seed in range(ORDERS)]
        expected, *orders = self._run(ONE_DEVICE, self._model, [self._batches, *other_orders])
        limits = tolerance(self._coarsest(), self._settings.rtol, self._settings.atol)
        comparison = Comparison(limits)
        is_finite = self._check_finite(comparison, expected)
        invariant = all(_agree(expected, other, limits) for other in orders)
        found: dict[str, Run] = {}
        for name, twins in self._replicated.items():
            try:
                found[name] = self._run(name, twins, [self._batches])[0]
            except LoweringError as error:
                if len(self._replicated) == 1:
                    raise
                self._left_out[name] = str(error)
            else:
                self._compare(comparison, name, expected, found[name], orders, invariant)
        differences = comparison.differences()
        causes: tuple[Cause, ...] = ()
        notes = list(self._notes(silenced, invariant, is_finite))
        if any(each.strategy in found for each in differences):
            try:
                with self._part():
                    causes = model_causes.found(
                        self._model, self._even, self._settings.replicas, differences, limits, self._equal(differences)
                    )
            except Exception as error:  # a model with run_eagerly may not be traceable
                notes.append(f"The search for known causes failed: {type(error).__name__}: {error}")
        return ParityReport(
            subject=f"model {self._model.name!r}",
            replicas=self._settings.replicas,
            strategies=tuple(found),
            left_out=self._left_out,
            batches=tuple(samples.count(each) for each in self._batches),
            tolerance=str(limits),
            compared=comparison.rows(),
            differences=differences,
            causes=causes,
            notes=(*notes, *self._unexplained(differences, causes)),
            seed=self._settings.seed,
        )

    def _run(self, says: str, model: Any, orders: list[list[Any]]) -> list[Run]:
        """Runs all parts. Each part uses one model object, so the model is traced once for all orders.

        Args:
            says: the name of this run in the log.
            model: the model, or a function that makes replicated models.
            orders: the batches, in one or more orders of their rows.
        """
        runs = [Run() for _ in orders]
        last = self._batches[-1]
        if is_callable(self._model):
            _log(says, 0, "outputs of layers")
            with self._part(), self._layers.seen():
                outputs = _of(model).predict_on_batch(self._even[0])
                runs[0].layers = {name: outputs[name] for name in self._layers.names or outputs if name in outputs}
            _log(says, 0, "predictions")
            with self._part():
                runs[0].predictions = arrays_in(_of(model).predict_on_batch(last[0]), "output")
        if self._can_be_evaluated():
            _log(says, 0, "evaluation")
            with self._part():
                runs[0].evaluation = _numbers(_of(model).test_on_batch(*last, return_dict=True))
        if self._has_loss and self._has_optimizer:
            with self._part():
                gradients = Gradients(self._model)
                with gradients.seen():
                    step = _of(model).train_on_batch
                    for order, (run, batches) in enumerate(zip(runs, orders, strict=True)):
                        sizes = self._of_each_size(batches)
                        for number, batch in enumerate(sizes):
                            _log(says, order, f"gradients, batch {number + 1} of {len(sizes)}")
                            self._change_last_digits(order)
                            logs = _numbers(step(*batch, return_dict=True))
                            run.gradients.append((logs, gradients.values(self._names)))
                            self._begin()
            with self._part():
                step = _of(model).train_on_batch
                for order, (run, batches) in enumerate(zip(runs, orders, strict=True)):
                    self._change_last_digits(order)
                    for number, batch in enumerate(batches):
                        _log(says, order, f"training, batch {number + 1} of {len(batches)}")
                        logs = _numbers(step(*batch, return_dict=True))
                        run.steps.append((logs, self._weights()))
                    self._begin()
        return runs

    def _of_each_size(self, batches: list[Any]) -> list[Any]:
        """The first batch, and also the last batch if its size differs."""
        return batches[:1] if samples.count(batches[0]) == samples.count(batches[-1]) else [batches[0], batches[-1]]

    @contextlib.contextmanager
    def _part(self) -> Iterator[None]:
        """Inside the block, the model starts from its state at the start of the check, which is restored on leaving."""
        try:
            with seeded(self._settings.seed):
                # One device runs op by op: XLA would draw other random numbers and round differently.
                self._model.jit_compile = False
                yield
        finally:
            self._start.restore()
            self._values.restore()

    def _change_last_digits(self, order: int) -> None:
        """Changes the last digits of the weights, except in the first order, which is the reference."""
        if order:
            for number, variable in enumerate(self._model.trainable_variables):
                value = variable.numpy()
                variable.assign(changed_in_last_digits(value, seed=1000 * order + number))

    def _begin(self) -> None:
        """Starts again in the middle of a part: from the same values, with the same traced functions."""
        self._values.restore()
        self._model.reset_metrics()

    def _compare(
        self, comparison: Comparison, name: str, expected: Run, found: Run, orders: list[Run], invariant: bool
    ) -> None:
        even, last, total = samples.count(self._even), samples.count(self._batches[-1]), len(self._batches)
        comparison.compare(name, "layer output", f"training mode, {even} rows", expected.layers, found.layers)
        comparison.compare(name, "prediction", f"{last} rows", expected.predictions, found.predictions)
        for kind, of in (("loss", _losses), ("metric", _metrics)):
            where = f"evaluation, {last} rows"
            comparison.compare(name, kind, where, of(expected.evaluation), of(found.evaluation))
        for index, ((_, one), (_, other)) in enumerate(zip(expected.gradients, found.gradients, strict=True)):
            measured = noise(one, [each.gradients[index][1] for each in orders])
            where = f"initial weights, {(samples.count(self._batches[0]), last)[index]} rows"
            comparison.compare(name, "gradient", where, one, other, noise=measured)
        for index, ((logs, weights), (others, changed)) in enumerate(zip(expected.steps, found.steps, strict=True)):
            where = f"step {index + 1} of {total}, {samples.count(self._batches[index])} rows"
            step = index + 1
            for kind, of in (("loss", _losses), ("metric", _metrics)):
                measured = noise(of(logs), [of(each.steps[index][0]) for each in orders]) if invariant else {}
                comparison.compare(name, kind, where, of(logs), of(others), step=step, noise=measured)
            measured = noise(weights, [each.steps[index][1] for each in orders]) if invariant else {}
            comparison.compare(name, "weight", where, weights, changed, step=step, noise=measured, start=self._initial)

    def _check_finite(self, comparison: Comparison, expected: Run) -> bool:
        bad = comparison.not_finite("prediction", "initial weights", expected.predictions)
        for index, (logs, weights) in enumerate(expected.steps):
            where = f"step {index + 1} of {len(expected.steps)}"
            bad = comparison.not_finite("loss", where, _losses(logs), index + 1) or bad
            bad = comparison.not_finite("weight", where, weights, index + 1) or bad
        return not bad

    def _notes(self, silenced: list[str], invariant: bool, is_finite: bool) -> Iterator[str]:
        if silenced:
            yield f"Layers that draw random numbers ran in inference mode: {', '.join(silenced)}."
        if not self._has_loss:
            yield "The model is not compiled, so only layers and predictions were compared."
        elif not self._has_optimizer:
            yield "The model has no optimizer, so gradients and weights were not compared."
        if not is_callable(self._model):
            yield "The model has no call() of its own, so layers, predictions and evaluation were not compared."
        if not invariant and is_finite:
            yield (
                "On one device too, the model computes other numbers when the samples of a batch are in another order "
                "(it draws random numbers, or its loss depends on neighbouring samples). So rounding cannot be "
                "measured for losses and weights, and only the tolerance counts."
            )

    def _equal(self, differences: Sequence[Difference]) -> set[str]:
        """The layers whose outputs were compared and do not differ."""
        layers = self._layers.layers
        different = {layers[each.name].name for each in differences if each.name in layers}
        return {layer.name for layer in layers.values()} - different

    def _unexplained(self, differences: Sequence[Difference], causes: Sequence[Cause]) -> Iterator[str]:
        """Notes for each strategy whose first differing layer has no known cause, while other layers have one."""
        named = {cause.name.split("/")[0] for cause in causes}
        first: dict[str, Difference] = {}
        for each in differences:
            if each.kind == "layer output":
                first.setdefault(each.strategy, each)
        for strategy, each in first.items():
            layer = self._layers.layers.get(each.name)
            inside = [layer, *keras_model.layers_of(layer, include_self=False)] if layer is not None else []
            if causes and not any(inner.name in named for inner in inside):
                yield (
                    f"No known cause was found in {each.name!r}, the first layer that differs under {strategy}. Look "
                    "there first: the causes above concern other layers, or take effect later."
                )

    def _can_be_evaluated(self) -> bool:
        model = self._model
        has_loss = model.loss is not None or bool(model.losses) if self._has_loss else False
        is_own = type(model).compute_loss is not keras.Model.compute_loss
        is_own = is_own or not keras_trainer.has_keras_step(model, "test_step")
        return self._has_loss and is_callable(self._model) and (has_loss or is_own)

    def _attributes(self) -> Attributes:
        model = self._model
        objects = [*keras_model.layers_of(model), *keras_model.compiled_parts(model), *keras_model.optimizers_of(model)]
        inner = [each.inner_optimizer for each in objects if getattr(each, "inner_optimizer", None) is not None]
        return Attributes([*objects, *inner])

    def _variables(self) -> list[Any]:
        known = [keras_model.underlying(each) for each in keras_model.variables_of(self._model)]
        bare = bare_variables(keras_model.layers_of(self._model))
        return list({id(each): each for each in [*known, *bare]}.values())

    def _make_variables(self) -> None:
        """Makes the variables of metrics, losses and the optimizer, which the first step would otherwise make."""
        if self._has_loss and is_callable(self._model) and not keras_model.is_built(self._model):
            keras_model.build(self._model, self._batches[0])

    def _weights(self) -> dict[str, Any]:
        return {name: self._by_id[key].numpy() for key, name in self._names.items() if key in self._by_id}

    @property
    def _by_id(self) -> dict[int, Any]:
        return {id(each): each for each in self._model.variables if not keras_model.is_seed(each)}

    def _coarsest(self) -> str:
        policies = {layer.compute_dtype for layer in keras_model.layers_of(self._model)}
        used = [each for each in policies if each in RTOL]
        return max(used, key=lambda each: RTOL[each], default="float32")


def _log(says: str, order: int, does: str) -> None:
    other = f", rows in another order ({order} of {ORDERS})" if order else ""
    _logger.info("check_parity: %s%s, %s", says, other, does)


def _agree(expected: Run, other: Run, limits: Tolerance) -> bool:
    """Whether another order of the samples changes the results only by rounding."""
    pairs = [*zip(expected.gradients, other.gradients, strict=True)]
    return all(
        is_within(_losses(one[0]), _losses(two[0]), limits.rtol) and is_within(one[1], two[1], limits.rtol)
        for one, two in pairs
    )


def _replicated(model: keras.Model, strategy: tf.distribute.Strategy) -> Any:
    """A function that replicates the model: each part of a run uses a new replicated model with its own programs."""
    replicate_model(model, strategy=strategy)
    return lambda: replicate_model(model, strategy=strategy)


def _of(model: Any) -> Any:
    return model if isinstance(model, keras.Model) else model()


def _batches(x: Any, y: Any, sample_weight: Any, settings: Settings) -> list[Any]:
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset)) or hasattr(x, "__next__"):
        source = (
            x if not isinstance(x, keras.utils.PyDataset) else (x[index % len(x)] for index in range(settings.steps))
        )
        made = cut.of_dataset(source, settings.steps, settings.replicas, uneven=True)
        return [keras.utils.unpack_x_y_sample_weight(each) for each in made]
    data = keras.tree.map_structure(_as_fit_does, (x, y, sample_weight))
    return cut.of_arrays(data, settings.steps, settings.batch_size, settings.replicas, uneven=True)


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
        raise ParityArgumentError.no_targets(model.name)


def _build(model: keras.Model, batch: Any) -> None:
    if keras_model.strategy_of(model) is not None or not keras_model.unbuilt_layers(model):
        return
    x = batch[0]
    if isinstance(model, keras.Sequential) and isinstance(x, tf.Tensor):
        model.build((None, *x.shape[1:]))  # a call would fix the batch size
    else:
        model(samples.take(x, 0, 1))


def _names(model: keras.Model) -> dict[int, str]:
    """The names of a model's variables by id, in the model's order; equal names are numbered."""
    names: dict[int, str] = {}
    counts: dict[str, int] = {}
    for variable in model.variables:
        if keras_model.is_seed(variable) or id(variable) in names:
            continue
        path = variable.path
        counts[path] = counts.get(path, 0) + 1
        names[id(variable)] = path if counts[path] == 1 else f"{path} ({counts[path]})"
    return names


def _numbers(logs: Any) -> dict[str, Any]:
    return {key: np.asarray(value) for key, value in logs.items()}


def _losses(logs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in logs.items() if key == "loss" or key.endswith("_loss")}


def _metrics(logs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in logs.items() if key not in _losses(logs)}
