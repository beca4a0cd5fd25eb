"""Device loops of a strategy: `iterations` steps of a function, many in a launch, with batches from an iterator."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from replica_engine.errors import InputsError
from replica_engine.errors.base import add_note, brief, in_words, positive_int, shown
from replica_engine.process import shutdown
from replica_engine.strategies import worker_values
from replica_engine.strategies.multi_step import MultiStepContext
from replica_engine.upstream import data_pulls, host_datasets
from replica_engine.upstream.graphs import autograph
from replica_engine.xla import body_context, function_spec
from replica_engine.xla.calls import device_loop, program_table


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """How a device loop runs its steps.

    Attributes:
        iterations: the number of steps; None takes the strategy's `steps_per_run`.
        initial_values: by name, the content of `last_step_outputs` if no step runs.
        in_replica: whether a step runs in replica context; otherwise it runs in cross-replica context.
        spread: whether a batch that is a tuple becomes several arguments of the step; otherwise it is one argument. If
            the signature of the step does not fit, the other form is used.
        prefetch: the largest number of batches to fetch ahead. None means two, or more if batches are small: up to
            256, as long as they take no more than 4 MiB on a replica. On TPUs and GPUs it means
            three, or up to 384 that take no more than 12 MiB.
        context_class: the class of the context that collects what a step passes out.
        programs: the table that keeps the compiled programs; None takes the strategy's.
    """

    iterations: int | None = None
    initial_values: Mapping[str, object] | None = None
    in_replica: bool = True
    spread: bool = True
    prefetch: int | None = None
    context_class: type[MultiStepContext] = MultiStepContext
    programs: program_table.ProgramTable | None = None


def run_steps(
    strategy: tf.distribute.Strategy,
    programs: program_table.ProgramTable,
    fn: Callable[..., object],
    iterator: object,
    settings: LoopSettings,
) -> MultiStepContext:
    """Runs steps, many in a launch.

    Args:
        strategy: the strategy whose replicas run the steps.
        programs: the strategy's table of programs.
        fn: a step, called with a `MultiStepContext` and a batch.
        iterator: the iterator of a dataset, distributed or not, or any iterable; it yields the batches.
        settings: how the steps run.

    Raises:
        InputsError: a number of steps or batches is not a positive int, or the initial values are not a mapping.
    """
    initial_values, context_class = settings.initial_values, settings.context_class
    if initial_values is not None and not isinstance(initial_values, Mapping):
        raise InputsError(
            f"`initial_loop_values` must be a mapping of names to values, or None; got {brief(initial_values)}."
        )
    iterations = _positive("iterations", strategy.steps_per_run if settings.iterations is None else settings.iterations)
    prefetch = None if settings.prefetch is None else _positive("prefetch", settings.prefetch)
    if not tf.executing_eagerly():
        raise InputsError(
            "run_steps was called in a tf.function, but it runs in eager mode and is already a compiled loop. Call "
            "it outside the tf.function; run_steps does not need one."
        )
    source = function_spec.FunctionSpec.from_callable(fn)

    def step(fn: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        context = context_class()
        converted = autograph.convert_always(fn) if source.autograph else fn
        if settings.in_replica:
            with body_context.BodyReplicaContext(strategy, is_step=True):
                converted(context, *args, **kwargs)
        else:
            tf.distribute.get_replica_context().merge_call(lambda _: (converted(context, *args, **kwargs), None)[1])
        return context.traced()

    context = context_class()
    context.last_step_outputs = dict(initial_values or {})
    with _noting(lambda error: _keep(error, context, iterations)):
        following, pulls = _opened(iterator)
        batches = _batches(source.fn, following, settings.spread)
        first = next(batches, None)
    # A worker without a batch would let the others wait in the collectives of the step.
    if not worker_values.all_have(strategy.extended.device_group, first is not None, strategy.extended.backend.limits):
        raise _out_of_range(context, iterations)
    assert first is not None, "all workers have a batch"
    with strategy.scope(), shutdown.running():
        # Steps of another mode are other programs, though their function is the same.
        mode = settings.in_replica, context_class
        with _noting(lambda error: _note_step_form(error, source.fn, first, context_class)):
            outcome = device_loop.run_loop(
                settings.programs or programs, source, mode, step, first, batches, iterations, prefetch, pulls
            )
    context = context_class.filled(outcome.steps, outcome.results, outcome.later)
    if outcome.error is not None:
        _keep(outcome.error, context, iterations)
        raise outcome.error
    if outcome.steps < iterations:
        raise _out_of_range(context, iterations)
    return context


class _noting:
    """Calls `note` with an exception of the block, whatever it is: the iterator and the step are the user's code."""

    # Not of contextlib, which sets the traceback of an exception: one of the user's may be frozen, and refuse that.

    def __init__(self, note: Callable[[BaseException], None]):
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._note(error)


def _positive(name: str, value: object) -> int:
    """Checks a number of steps or batches; returns it as an int."""
    number = positive_int(value)
    if number is None:
        raise InputsError(f"`{name}` must be a positive int; got {shown(value)}.")
    return number


def _batches(fn: Callable[..., object], following: Callable[[], object], spread: bool) -> Iterator[tuple]:
    """For each step, the arguments after the context. Takes each element only on request."""
    parameters = inspect.signature(fn)
    is_spread: bool | None = None
    while True:
        try:
            element = following()
        except (StopIteration, tf.errors.OutOfRangeError):
            return
        # Decided once: all batches must have the structure of the first.
        if is_spread is None:
            is_spread = _spreads(fn, parameters, element, spread)
        yield element if is_spread and isinstance(element, tuple) else (element,)


def _opened(iterator: Any) -> tuple[Callable[[], object], data_pulls.Pulls | None]:
    """What gives the next element of an iterator, which may have only `get_next`; and what takes many, or None."""
    if hasattr(iterator, "__iter__"):
        found = iter(iterator)
        return found.__next__, host_datasets.find_pulls(found)
    if hasattr(iterator, "get_next"):
        return iterator.get_next, None
    raise InputsError(f"run_steps takes an iterator, for example iter(dataset); got {brief(iterator)}.")


def _spreads(fn: Callable[..., object], parameters: inspect.Signature, element: Any, preferred: bool) -> bool:
    """Whether a batch becomes several arguments of a step; the first argument of a step is the context.

    Raises:
        InputsError: the step takes the batch in neither form.
    """
    is_tuple = isinstance(element, tuple)
    for spread in (preferred, not preferred) if is_tuple else (False,):
        try:
            parameters.bind(None, *(element if spread else (element,)))
        except TypeError:
            continue
        return spread
    own = [each.replace(annotation=inspect.Parameter.empty) for each in parameters.parameters.values()]
    signature = str(inspect.Signature(own))
    parts = len(element) if is_tuple else None
    batch = f"the batch, a tuple of {parts} parts" if parts else "the batch"
    raise InputsError(
        f"`{_name(fn)}` takes {signature}, but run_steps calls a step with its context first, and then with {batch}:\n"
        f"{_step_forms(parts)}\n"
        'The context takes what the last step passes out: context.set_last_step_output("loss", loss, "MEAN").'
    )


def _step_forms(parts: int | None) -> str:
    """How to write a step for batches that are tuples of so many parts; None for all other batches."""
    whole = "    def step(context, batch):"
    if parts is None:
        return whole
    names = {0: "", 1: ", x", 2: ", x, y", 3: ", x, y, z"}.get(parts, ", *parts")
    return f"    def step(context{names}):" + (f"  # or with all parts in a tuple:\n{whole}" if parts else "")


def _name(fn: Callable[..., object]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _note_step_form(error: BaseException, fn: Callable[..., object], first: tuple, context_class: type) -> None:
    """Adds a note to an exception of a step that seems to have taken its context for the batch, or a part of it."""
    if not isinstance(error, Exception):
        return
    parameter = next(iter(inspect.signature(fn).parameters), "")
    if context_class.__name__ in in_words(error) and "context" not in parameter and "ctx" not in parameter:
        (batch, *others) = first or (None,)
        is_tuple = bool(others) or isinstance(batch, tuple)
        forms = _step_forms((len(first) if others else len(batch)) if is_tuple else None)
        add_note(
            error, f"the first argument of `{_name(fn)}` is the context of run_steps. A step is written so:\n{forms}"
        )


def _out_of_range(context: MultiStepContext, iterations: int) -> tf.errors.OutOfRangeError:
    error = tf.errors.OutOfRangeError(
        None, None, f"The iterator ended after {context.steps} of {iterations} steps; these are kept."
    )
    _keep(error, context, iterations)
    return error


def _keep(error: Any, context: MultiStepContext, iterations: int) -> None:
    """Attaches the context to an exception, and a note with the number of kept steps if any step ran."""
    if context.steps:
        kept = f"{context.steps} of {iterations} steps of the device loop ran; the values that they wrote are kept"
        add_note(error, kept)
    with contextlib.suppress(AttributeError, TypeError):  # some exceptions take no attributes
        error.context = context
