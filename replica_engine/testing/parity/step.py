"""The parity check of a custom training step: on one device, and by `strategy.run` on shards of each batch.

Each strategy needs variables of its own. So a step gets all variables that it changes as its first argument, and a run
makes them in the scope of its strategy: copies of the user's variables, or what the user's function makes. The step is
traced once before the first run. If it changes other variables, for example through its closure, the check ends with an
error: the replicas would all change the same variables. Other variables that it only reads may be anywhere.

Before each step, the variables get the values that one device has reached, so rounding does not grow from step to step.
After it, the results of the step and its variables are compared.

The step itself must combine the replicas, as under any `tf.distribute` strategy: it calls `all_reduce`, or an optimizer
that does, or assigns variables that have an aggregation. On one device the same calls do nothing.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replica_engine._tf import variables as tf_variables
from replica_engine.errors import ParityArgumentError
from replica_engine.errors.base import shown
from replica_engine.strategies.backend import compiles
from replica_engine.testing.parity import causes, settings
from replica_engine.testing.parity.check import Check, logger
from replica_engine.testing.parity.comparison import Computed, Numbers, arrays_in, tolerance
from replica_engine.testing.parity.report import ONE_DEVICE, Cause, Difference, ParityReport
from replica_engine.testing.parity.settings import Settings
from replica_engine.testing.parity.state import named, put, seeded
from replica_engine.values import samples
from replica_engine.values.regroup import parts, regroup
from replica_engine.values.uneven_batches import split_batch

_WEIGHTS = "weights"
_NO_WEIGHTS = (
    "the step does not take weights of rows, and a compiled program needs shares of equal size. Give the step an "
    "argument named `weights` (1 / n for each of the n rows, 0 for padding; see replica_engine.split_batch)"
)


def check_step(
    given: Settings,
    step: Callable[..., Any],
    inputs: Any,
    variables: Any = None,
    *,
    reduction: str | None = None,
    uneven: bool | None = None,
) -> ParityReport:
    """Runs the parity check of a step; see `check_parity`."""
    if reduction not in (None, "mean", "sum"):
        raise ParityArgumentError(f'reduction must be "mean", "sum" or None; got {shown(reduction)}.')
    check = _StepCheck(given, step, inputs, _maker(variables), reduction, uneven)
    check.trace()
    return check.report()


class _StepCheck(Check):
    def __init__(
        self,
        given: Settings,
        step: Any,
        inputs: Any,
        make: Callable[[], tuple[Any, ...]],
        reduction: str | None,
        uneven: bool | None,
    ):
        self._name = getattr(step, "__name__", type(step).__name__)
        self._function = getattr(step, "python_function", step)  # a tf.function has traces with variables of its own
        self._make = make
        source, example = _source(inputs, given.steps)
        self._read_signature(example)
        uneven = True if uneven is None and self._takes_weights else uneven
        cut = settings.of_arrays if source is example else settings.of_batches
        super().__init__(f"step {self._name!r}", given, cut(source, given, uneven))
        self._largest = max(samples.count(batch) for batch in self.batches)
        self._sums = reduction == "sum" or (reduction is None and self._takes_weights)
        self._starts: list[dict[str, Any]] = []  # the values of the variables on one device before each step
        self._random: list[str] = []  # the ops of the step that draw random numbers
        if given.replicas > 1 and all(samples.count(batch) % given.replicas == 0 for batch in self.batches):
            given.left_out["batches of uneven shares"] = (
                f"the sizes of all batches are multiples of {given.replicas}. Pass uneven=True, or other data, to "
                "compare one"
            )

    def _read_signature(self, example: Any) -> None:
        """Finds out how to call the step: with the parts of a batch or with a whole batch, and with weights or not."""
        signature = inspect.signature(self._function)
        first = (None,) * (self._make is not tuple)
        splits = [True, False] if isinstance(example, tuple) else [False]
        reason = ""
        for self._is_split, self._takes_weights in itertools.product(splits, (True, False)):
            if self._takes_weights and _WEIGHTS not in signature.parameters:
                continue
            args, kwargs = self._arguments(example, None)
            try:
                signature.bind(*first, *args, **kwargs)
            except TypeError as error:
                reason = reason or str(error)
            else:
                return
        count = len(example) if isinstance(example, tuple) else 1
        raise ParityArgumentError(
            f"{self._name}{signature!s} cannot be called with a batch of {count} part{'s' * (count != 1)}: {reason}. "
            "check_parity calls step(*batch) or step(batch). The batch is the second argument: "
            "check_parity(step, (x, y), variables). An argument that is named `weights` gets the weights of the rows; "
            "no other name does. With `variables`, they come first: step(variables, *batch)."
        )

    def _arguments(self, batch: Any, weights: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return batch if self._is_split else (batch,), {_WEIGHTS: weights} if self._takes_weights else {}

    def trace(self) -> None:
        """Traces the step on one device, for the variables that it changes and the random numbers that it draws.

        Raises:
            ParityArgumentError: it changes a variable that existed before.
        """
        made: dict[int, Any] = {}

        def note(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            variable = next_creator(**kwargs)
            made[id(variable)] = variable
            return variable

        rows = samples.count(self.batches[0])
        args, kwargs = self._arguments(self.batches[0], tf.fill([rows], 1.0 / rows))
        with seeded(self.given.seed), tf.variable_creator_scope(note):
            traced = tf.function(functools.partial(self._function, *self._make()))
            try:
                graph = traced.get_concrete_function(*args, **kwargs).graph
            except Exception as error:  # TPUStrategy traces it too, and says what is wrong
                self.notes.append(
                    f"The step cannot be traced alone ({type(error).__name__}), so it was not searched for random "
                    "numbers and for variables that it changes."
                )
                return
        self._random = list(dict.fromkeys(op for _, op in causes.random_ops(graph)))
        others = [each for each in graph.variables if id(each) not in made]
        changed = [each for each in others if tf_variables.may_write(graph.capture(each.handle), set())]
        if changed:
            names = dict.fromkeys(each.name.split(":")[0].split("/replica_")[0] for each in changed)
            raise ParityArgumentError.not_passed(self._name, list(names))

    def run(self, says: str, strategy: tf.distribute.Strategy | None, batches: Sequence[Any] = ()) -> Computed:
        """Runs the step on each batch; stops at a batch that a compiled strategy cannot split."""
        is_first = strategy is None and not batches
        batches = batches or self.batches
        strategy = strategy or tf.distribute.get_strategy()
        found: list[Numbers] = []
        with seeded(self.given.seed):
            with strategy.scope():
                made = self._make()
            function = functools.partial(self._function, *made)
            for index, batch in enumerate(batches):
                shared = self._shared(strategy, batch)
                if shared is None:
                    self._leave_out(says, index)
                    break
                logger.info("check_parity: %s, batch %d of %d", says, index + 1, len(batches))
                if is_first:
                    self._starts.append(_values(made))
                start, variables = self._starts[index], named(_listed(made))
                for name in start.keys() & variables.keys():
                    put(variables[name], start[name])
                returned = strategy.run(function, args=shared[0], kwargs=shared[1])
                where = f"step {index + 1} of {len(batches)}, {samples.count(batch)} rows"
                results = self._results(strategy, returned, batch)
                for kind in ("loss", "gradient", "result"):
                    values = {name: each for name, each in results.items() if _kind(name) == kind}
                    found.append(Numbers(kind, where, values, index + 1))
                found.append(Numbers("weight", where, _values(made), index + 1, start))
        if is_first:
            dtypes = [np.asarray(value).dtype.name for each in found for value in each.values.values()]
            if not dtypes:
                raise ParityArgumentError(
                    f"{self._name} returned no numbers, and no `variables` were passed, so there is nothing to "
                    "compare. Return the loss, and pass the variables that the step updates."
                )
            self.limits = tolerance(dtypes, self.given.rtol, self.given.atol)
        return found

    def causes(
        self, differences: Sequence[Difference], expected: Computed, runs: Mapping[str, Computed]
    ) -> Iterator[Cause]:
        """Looks for known causes in the ops of the step and in its numbers."""
        for op in self._random:
            remedy = "To compare everything else, pass the numbers as a part of the batch."
            yield causes.random_numbers("The step", self._name, op, remedy)
        share = settings.shares(self.batches[0], self.given.replicas)[0]
        alone = functools.partial(self.run, f"{ONE_DEVICE}, the rows of replica 0", None, [share])
        yield from causes.of_step(differences, expected, runs, self.batches, self.given.replicas, alone)

    def _shared(self, strategy: tf.distribute.Strategy, batch: Any) -> tuple[Any, Any] | None:
        """The arguments of `strategy.run`; None if a compiled program cannot have shards of these sizes."""
        replicas, total = strategy.num_replicas_in_sync, samples.count(batch)
        if replicas == 1 and not compiles(strategy):
            return self._arguments(batch, tf.fill([total], 1.0 / total))
        if self._takes_weights:
            return self._arguments(*split_batch(strategy, batch, batch_size=self._largest))
        if compiles(strategy) and total % replicas:
            return None
        made = []
        for device, share in zip(strategy.extended.worker_devices, settings.shares(batch, replicas), strict=True):
            with tf.device(device):
                made.append(samples.on_device(share))
        return self._arguments(regroup(made), None)

    def _leave_out(self, strategy: str, index: int) -> None:
        total, rows = len(self.batches), samples.count(self.batches[index])
        reason = f"{self.given.replicas} replicas cannot have equal shares of {rows} rows; {_NO_WEIGHTS}"
        self.given.left_out[f"{strategy}, the last {total - index} of {total} batches"] = reason
        if not index and len(self.given.strategies) == 1:
            raise ParityArgumentError.nothing_to_compare(self.given.left_out)

    def _results(self, strategy: tf.distribute.Strategy, returned: Any, batch: Any) -> dict[str, Any]:
        """The results of the step by name, combined over all replicas."""
        count, total = strategy.num_replicas_in_sync, samples.count(batch)
        each = [arrays_in(part, "result") for part in parts(returned, count, "results")]
        sizes = [samples.count(share) for share in settings.shares(batch, count)]
        if self._takes_weights:
            sizes = [max(1, -(-self._largest // count))] * count
        names = dict.fromkeys(name for part in each for name in part)
        return {name: self._joined([np.asarray(part.get(name)) for part in each], sizes, total) for name in names}

    def _joined(self, arrays: list[Any], sizes: list[int], total: int) -> Any:
        first = arrays[0]
        if all(array.ndim and len(array) == size for array, size in zip(arrays, sizes, strict=True)):
            return np.concatenate(arrays)[:total]
        if any(array.shape != first.shape for array in arrays):
            return np.concatenate(arrays) if first.ndim else first
        if all(array.tobytes() == first.tobytes() for array in arrays) or first.dtype.kind not in "fcV":
            return first  # the step itself has combined the replicas
        whole = np.sum([array.astype("float64") for array in arrays], axis=0)
        return (whole if self._sums else whole / len(arrays)).astype(first.dtype)


def _source(inputs: Any, steps: int) -> tuple[Any, Any]:
    """The batches and the first of them; or twice the same structure, if it is one of arrays to cut batches from."""
    is_list = isinstance(inputs, list) and inputs and all(isinstance(each, (tuple, dict)) for each in inputs)
    if isinstance(inputs, tf.data.Dataset) or hasattr(inputs, "__next__") or is_list:
        batches = list(itertools.islice(iter(inputs), steps))
        if not batches:
            raise ParityArgumentError.no_rows()
        return batches, batches[0]
    arrays = tuple(inputs) if isinstance(inputs, list) else inputs
    return arrays, arrays


def _maker(variables: Any) -> Callable[[], tuple[Any, ...]]:
    """The function that makes the first argument of the step, in a tuple; `tuple` itself without variables.

    Raises:
        ParityArgumentError: `variables` is neither a structure of variables nor a function.
    """
    if variables is None:
        return tuple
    if isinstance(variables, type) or (callable(variables) and not hasattr(variables, "variables")):
        return lambda: (variables(),)
    wrong = [each for each in tf.nest.flatten(variables) if not isinstance(each, tf.Variable)]
    if wrong or not tf.nest.flatten(variables):
        raise ParityArgumentError.bad_variables(wrong[0] if wrong else variables)
    values = tf.nest.map_structure(lambda variable: variable.numpy(), variables)
    return lambda: (tf.nest.map_structure(_copy, variables, values),)


def _copy(variable: tf.Variable, value: Any) -> tf.Variable:
    """A variable of the strategy whose scope is entered."""
    aggregation, synchronization = variable.aggregation, variable.synchronization
    if aggregation == tf.VariableAggregation.NONE and synchronization != tf.VariableSynchronization.ON_READ:
        # Replicas cannot assign a variable without aggregation. With this aggregation, the value of replica 0 stays. If
        # replicas assign different values, the result differs from one device.
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA
    return tf.Variable(
        value,
        trainable=variable.trainable,
        name=variable.name.split(":")[0],
        dtype=variable.dtype,
        synchronization=synchronization,
        aggregation=aggregation,
    )


def _listed(made: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The names and variables in a structure of variables, modules, and Keras layers, optimizers and metrics."""
    if isinstance(made, (tf.Variable, keras.Variable)):
        path = made.path if isinstance(made, keras.Variable) else made.name.split(":")[0]
        yield prefix or path, made
    elif isinstance(made, dict):
        for key, inner in made.items():
            yield from _listed(inner, f"{prefix}/{key}" if prefix else str(key))
    else:
        inside: Iterable[Any] = made if isinstance(made, (list, tuple)) else getattr(made, "variables", ())
        for inner in inside:
            yield from ((f"{prefix}/{name}" if prefix else name, variable) for name, variable in _listed(inner))


def _values(made: Any) -> dict[str, Any]:
    return {name: np.asarray(variable.numpy()) for name, variable in named(_listed(made)).items()}


def _kind(name: str) -> str:
    return "loss" if "loss" in name else "gradient" if "grad" in name else "result"
