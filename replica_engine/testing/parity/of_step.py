"""The parity check of a custom training step: on one device, and by `strategy.run` on shards of each batch.

A run makes the variables of its strategy (by `rebinding`, or by the user's function), gives them the same values, and
runs the step on each batch. After each step, the results of the step and the values of its variables are compared.

The step itself must combine the replicas, as under any `tf.distribute` strategy: it calls `all_reduce`, or an optimizer
that does, or assigns variables that have an aggregation. On one device the same calls do nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from replica_engine.errors import LoweringError, ParityArgumentError
from replica_engine.strategies.backend import compiles
from replica_engine.testing.parity import batches as cut
from replica_engine.testing.parity import nested_runs, step_causes
from replica_engine.testing.parity.comparison import (
    ORDERS,
    RTOL,
    Comparison,
    arrays_in,
    changed_in_last_digits,
    is_within,
    noise,
    tolerance,
)
from replica_engine.testing.parity.rebinding import Rebinding, listed, python_function
from replica_engine.testing.parity.report import ONE_DEVICE, Cause, ParityReport
from replica_engine.testing.parity.settings import Settings
from replica_engine.testing.parity.state import seeded
from replica_engine.testing.parity.step_call import StepCall, check_variables, is_factory, parts_of
from replica_engine.values import samples
from replica_engine.values.regroup import parts, regroup
from replica_engine.values.uneven_batches import split_batch

_NO_WEIGHTS = (
    "the step does not take weights of rows, and a compiled program needs shares of equal size. Give the step an "
    "argument named `weights` (1 / n for each of the n rows, 0 for padding; see replica_engine.split_batch)"
)


_logger = logging.getLogger("replica_engine")


@dataclasses.dataclass
class Run:
    """The results of one run.

    Attributes:
        results: for each step, its return values by name.
        weights: for each step, the variables after it.
        start: the variables before the first step.
    """

    results: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    weights: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    start: dict[str, Any] = dataclasses.field(default_factory=dict)


def check_step(
    step: Callable[..., Any],
    inputs: Any,
    variables: Any,
    settings: Settings,
    reduction: str | None,
    uneven: bool | None,
) -> ParityReport:
    """Runs the parity check of a step; see `check_parity`."""
    if reduction not in (None, "mean", "sum"):
        raise ParityArgumentError.bad_reduction(reduction)
    return _Check(step, inputs, variables, settings, reduction, uneven).report()


class _Check:
    def __init__(
        self, step: Any, inputs: Any, variables: Any, settings: Settings, reduction: str | None, uneven: bool | None
    ):
        self._settings = settings
        self._left_out = dict(settings.left_out)
        self._makes = variables if is_factory(variables) else None
        self._variables = () if variables is None or self._makes is not None else variables
        check_variables(self._variables)
        count, source, is_batches = parts_of(inputs, settings.steps)
        self._call = StepCall(step, count, self._makes is not None)
        self._batches = self._cut(source, is_batches, uneven)
        self._size = max(samples.count(batch) for batch in self._batches)
        self._reduction = reduction or ("sum" if self._call.takes_weights else "mean")
        self._rebinding = Rebinding(step, self._variables)
        names = dict(listed(self._variables))
        unreached = [name for name, each in names.items() if not self._rebinding.reaches(each)]
        if unreached:
            raise ParityArgumentError.unreached(unreached)

    def report(self) -> ParityReport:
        """Runs on one device and on all strategies, and compares the results."""
        one = tf.distribute.get_strategy()
        expected = self._run(ONE_DEVICE, one, self._batches)
        if not expected.start and not any(expected.results):
            raise ParityArgumentError.nothing_compared(self._call.name)
        orders = [
            self._run(
                f"{ONE_DEVICE}, rows in another order ({seed + 1} of {ORDERS})",
                one,
                [cut.shuffled(each, seed) for each in self._batches],
                expected,
                order=seed + 1,
            )
            for seed in range(ORDERS)
        ]
        limits = tolerance(_coarsest(expected), self._settings.rtol, self._settings.atol)
        comparison = Comparison(limits)
        for index, (results, weights) in enumerate(zip(expected.results, expected.weights, strict=True)):
            comparison.not_finite("result", f"step {index + 1}", results, index + 1)
            comparison.not_finite("weight", f"step {index + 1}", weights, index + 1)
        found = {}
        for name, strategy in self._settings.strategies.items():
            try:
                found[name] = self._run(name, strategy, self._batches, expected)
            except LoweringError as error:
                if len(self._settings.strategies) == 1:
                    raise
                self._left_out[name] = str(error)
                continue
            self._compare(comparison, name, expected, found[name], orders, limits.rtol)
        self._note_left_out(found)
        differences = comparison.differences()
        causes: tuple[Cause, ...] = ()
        notes: list[str] = []
        if any(each.strategy in found for each in differences):
            try:
                causes = step_causes.found(
                    differences, expected, found, self._batches, self._settings.replicas, self._alone
                )
            except Exception as error:  # the step may refuse the rows of one replica alone
                notes.append(f"The search for known causes failed: {type(error).__name__}: {error}")
            try:
                causes += step_causes.random_numbers(self._call.name, self._graph())
            except Exception as error:  # some steps cannot be traced alone
                notes.append(
                    f"The step was not searched for random numbers, because it cannot be traced alone ({error})."
                )
        return ParityReport(
            subject=f"step {self._call.name!r}",
            replicas=self._settings.replicas,
            strategies=tuple(found),
            left_out=self._left_out,
            batches=tuple(samples.count(each) for each in self._batches),
            tolerance=str(limits),
            compared=comparison.rows(),
            differences=differences,
            causes=causes,
            notes=tuple(notes),
            seed=self._settings.seed,
        )

    def _cut(self, source: Any, is_batches: bool, uneven: bool | None) -> list[Any]:
        steps, replicas = self._settings.steps, self._settings.replicas
        forced = self._call.takes_weights if uneven is None else uneven
        if is_batches:
            made = cut.of_dataset(source, steps, replicas, uneven=forced)
        elif forced or uneven is False:
            made = cut.of_arrays(source, steps, self._settings.batch_size, replicas, uneven=forced)
        else:
            made = cut.as_they_come(source, steps, self._settings.batch_size, replicas)
        if all(samples.count(batch) % replicas == 0 for batch in made) and replicas > 1:
            self._left_out["batches of uneven shares"] = (
                f"the sizes of all batches are multiples of {replicas}. Pass uneven=True, or other data, to compare one"
            )
        return made

    def _run(
        self,
        says: str,
        strategy: tf.distribute.Strategy,
        batches: list[Any],
        first: Run | None = None,
        order: int = 0,
    ) -> Run:
        """Runs the step on each batch; stops at a batch that a compiled strategy cannot split.

        Args:
            says: the name of this run in the log.
            strategy: the strategy that runs the step.
            batches: the batches.
            first: the run on one device, which gives the initial values of variables that a function makes.
            order: the index of another order of the rows; 0 for the order of the data.
        """
        run = Run()
        with seeded(self._settings.seed), self._ready(strategy, first) as (function, tracked):
            run.start = _values(tracked())
            for number, (_, variable) in enumerate(tracked() if order else ()):
                changed = changed_in_last_digits(np.asarray(variable.numpy()), seed=1000 * order + number)
                variable.assign(changed)
            for batch in batches:
                made = self._shared(strategy, batch)
                if made is None:
                    break
                _logger.info("check_parity: %s, batch %d of %d", says, len(run.results) + 1, len(batches))
                args, kwargs = made
                with nested_runs.refused(self._call.name, strategy):
                    returned = strategy.run(function, args=args, kwargs=kwargs)
                run.results.append(self._results(strategy, returned, batch))
                run.weights.append(_values(tracked()))
        return run

    @contextlib.contextmanager
    def _ready(self, strategy: tf.distribute.Strategy, first: Run | None) -> Iterator[tuple[Any, Any]]:
        """Yields the function to run, and a function that lists the variables to compare."""
        step = python_function(self._call.step)
        with self._rebinding.entered(strategy) as copy_of:
            if self._makes is None:
                yield step, lambda: [(name, copy_of(each)) for name, each in listed(self._variables)]
                return
            with strategy.scope():
                made = self._makes()
            for name, variable in listed(made):
                if first is not None and name in first.start:
                    variable.assign(first.start[name])

            def on_replica(*args: Any, **kwargs: Any) -> Any:
                return step(made, *args, **kwargs)

            yield on_replica, lambda: listed(made)

    def _shared(self, strategy: tf.distribute.Strategy, batch: Any) -> tuple[Any, Any] | None:
        """The arguments of `strategy.run`; None if a compiled program cannot have shards of these sizes."""
        replicas = strategy.num_replicas_in_sync
        total = samples.count(batch)
        if replicas == 1 and not compiles(strategy):
            return self._call.arguments(batch, tf.fill([total], 1.0 / total))
        if self._call.takes_weights:
            return self._call.arguments(*split_batch(strategy, batch, batch_size=self._size))
        if compiles(strategy) and total % replicas:
            return None
        made = []
        for device, share in zip(strategy.extended.worker_devices, cut.shares(batch, replicas), strict=True):
            with tf.device(device):
                made.append(samples.on_device(share))
        return self._call.arguments(regroup(made), None)

    def _results(self, strategy: tf.distribute.Strategy, returned: Any, batch: Any) -> dict[str, Any]:
        """The results of the step by name, combined over all replicas."""
        count = strategy.num_replicas_in_sync
        each = [arrays_in(part, "result") for part in parts(returned, count, "results")]
        sizes = [samples.count(share) for share in cut.shares(batch, count)]
        if self._call.takes_weights:
            sizes = [max(1, -(-self._size // count))] * count
        total = samples.count(batch)
        names = list(dict.fromkeys(name for part in each for name in part))
        return {name: self._joined([part.get(name) for part in each], sizes, total) for name in names}

    def _joined(self, values: list[Any], sizes: list[int], total: int) -> Any:
        arrays = [np.asarray(value) for value in values]
        if all(len(array.shape) and len(array) == size for array, size in zip(arrays, sizes, strict=True)):
            return np.concatenate(arrays)[:total]
        if all(array.shape == arrays[0].shape for array in arrays):
            if all(array.tobytes() == arrays[0].tobytes() for array in arrays) or arrays[0].dtype.kind not in "fcV":
                return arrays[0]  # the step itself has combined the replicas
            whole = np.sum([array.astype("float64") for array in arrays], axis=0)
            return (whole if self._reduction == "sum" else whole / len(arrays)).astype(arrays[0].dtype)
        return np.concatenate(arrays) if len(arrays[0].shape) else arrays[0]

    def _compare(
        self, comparison: Comparison, name: str, expected: Run, found: Run, orders: list[Run], rtol: float
    ) -> None:
        totals = [samples.count(batch) for batch in self._batches]
        for index, (results, weights) in enumerate(zip(found.results, found.weights, strict=True)):
            where = f"step {index + 1} of {len(totals)}, {totals[index]} rows"
            wanted = expected.results[index]
            of_batch = {key for key, value in wanted.items() if np.ndim(value) and len(value) == totals[index]}
            numbers = [{key: run.results[0].get(key) for key in wanted if key not in of_batch} for run in orders]
            first = {key: expected.results[0][key] for key in wanted if key not in of_batch}
            invariant = bool(first) and all(is_within(first, other, rtol) for other in numbers)
            for kind in ("loss", "gradient", "result"):
                one, other = ({key: each for key, each in of.items() if _kind(key) == kind} for of in (wanted, results))
                others = [{k: v for k, v in run.results[index].items() if k not in of_batch} for run in orders]
                measured = noise(one, others) if invariant else {}
                comparison.compare(name, kind, where, one, other, step=index + 1, noise=measured)
            measured = noise(expected.weights[index], [run.weights[index] for run in orders]) if invariant else {}
            comparison.compare(
                name,
                "weight",
                where,
                expected.weights[index],
                weights,
                step=index + 1,
                noise=measured,
                start=expected.start,
            )

    def _note_left_out(self, found: dict[str, Run]) -> None:
        for name, run in found.items():
            missing = len(self._batches) - len(run.results)
            if missing:
                total = samples.count(self._batches[len(run.results)])
                self._left_out[f"{name}, the last {missing} of {len(self._batches)} batches"] = (
                    f"{self._settings.replicas} replicas cannot have equal shares of {total} rows; {_NO_WEIGHTS}"
                )
        if found and not any(run.results for run in found.values()):
            raise ParityArgumentError.nothing_to_compare(self._left_out)

    def _alone(self, replica: int) -> Run:
        """Runs one device on one replica's rows of the first batch."""
        share = cut.shares(self._batches[0], self._settings.replicas)[replica]
        return self._run(f"{ONE_DEVICE}, the rows of replica {replica}", tf.distribute.get_strategy(), [share])

    def _graph(self) -> Any:
        one = tf.distribute.get_strategy()
        with seeded(self._settings.seed), self._ready(one, None) as (function, _):
            args, kwargs = self._call.arguments(self._batches[0], tf.fill([samples.count(self._batches[0])], 1.0))
            return tf.function(function).get_concrete_function(*args, **kwargs).graph


def _kind(name: str) -> str:
    return "loss" if "loss" in name else "gradient" if "grad" in name else "result"


def _values(variables: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, variable in variables:
        found[name if name not in found else f"{name} ({len(found)})"] = np.asarray(variable.numpy())
    return found


def _coarsest(run: Run) -> str:
    arrays = [*run.start.values(), *(value for results in run.results for value in results.values())]
    used = [array.dtype.name for array in arrays if array.dtype.name in RTOL]
    return max(used, key=lambda each: RTOL[each], default="float32")
