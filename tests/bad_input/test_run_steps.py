"""`run_steps` with iterators that yield anything, change, end, raise or are none; and with numbers that are none."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from helpers.bad_inputs import (
    ARRAYS,
    COMPOSITES,
    DISTRIBUTED,
    ENDLESS,
    OTHER_NUMBERS,
    PYTHON,
    TENSORS,
    Refusal,
    endless,
)
from helpers.bad_values import arrays, examples, garbage, structures, values_from
from helpers.outcomes import attempt
from hypothesis import given
from hypothesis import strategies as st

from replica_engine.errors import ReplicaEngineError

GOOD = np.float32([1.0, 2.0])
BATCHES = structures() | arrays() | values_from(TENSORS, COMPOSITES, DISTRIBUTED)


class Broken:
    """An iterator that raises."""

    def __init__(self, batches, error):
        self._batches = iter(batches)
        self._error = error

    def __iter__(self):
        return self

    def __next__(self):
        for batch in self._batches:
            return batch
        raise self._error


class NotIterable:
    """Raises when it is asked for an iterator."""

    def __iter__(self):
        raise Refusal("no iterator")


class Shrinking:
    """An iterator that goes on after its end."""

    def __init__(self):
        self._count = 0

    def __iter__(self):
        return self

    def __next__(self):
        self._count += 1
        if self._count % 2:
            return GOOD
        raise StopIteration


def run_counted_steps(witness, batches, iterations=3, **options):
    """Runs steps that count themselves; sees to it that as many count as the result, or the error, says."""

    def step(context, *args):
        witness.total.assign_add(1.0)

    witness.restart()
    context, error = attempt(
        witness.strategy.run_steps, step, batches, iterations, documented=tf.errors.OutOfRangeError, **options
    )
    kept = context if error is None else getattr(error, "context", None)
    witness.check(0.0 if kept is None else float(kept.steps))
    return context, error


@examples(20)
@given(batch=BATCHES)
def test_batches_of_anything(compiled, batch):
    context, error = run_counted_steps(compiled, [batch] * 3)
    if error is None:
        assert context.steps == 3


@examples(15)
@given(first=arrays(), later=BATCHES, good=st.integers(0, 2))
def test_batches_that_change(compiled, first, later, good):
    alike = isinstance(later, np.ndarray) and (later.dtype, later.shape) == (first.dtype, first.shape)
    _, error = run_counted_steps(compiled, [first] * good + [later] + [first] * 2, good + 2)
    if good and not alike and not tf.is_tensor(later) and not isinstance(later, (np.ndarray, np.generic)):
        assert error is not None
        assert error.context.steps == good


@examples(15)
@given(left=structures(), right=structures())
def test_other_structures_later(compiled, left, right):
    run_counted_steps(compiled, [left, left, right])


@examples(10)
@given(length=st.integers(0, 3), iterations=st.integers(1, 4), error=st.sampled_from([Refusal("enough"), None]))
def test_iterators_that_end(compiled, length, iterations, error):
    batches = [GOOD] * length if error is None else Broken([GOOD] * length, error)
    _, raised = run_counted_steps(compiled, batches, iterations)
    if iterations <= length:
        assert raised is None
    else:
        assert isinstance(raised, tf.errors.OutOfRangeError if error is None else Refusal)
        assert raised.context.steps == length


@examples(15)
@given(batches=garbage() | values_from(OTHER_NUMBERS))
def test_no_iterator(compiled, batches):
    run_counted_steps(compiled, batches)


@examples(15)
@given(value=garbage(), fn=(values_from(PYTHON) | garbage()).filter(lambda fn: not callable(fn)))
def test_no_numbers_and_no_functions(compiled, value, fn):
    if value is not None:
        run_counted_steps(compiled, [GOOD] * 3, value)
    run_counted_steps(compiled, [GOOD] * 3, prefetch=value)
    run_counted_steps(compiled, [GOOD] * 3, initial_loop_values=value)
    attempt(compiled.strategy.run_steps, fn, [GOOD] * 3, 3)
    compiled.check()


@examples(10)
@given(value=structures())
def test_outputs(compiled, value):
    def step(context, x):
        compiled.total.assign_add(1.0)
        context.set_last_step_output("value", value)

    def reducing(context, x):
        context.set_last_step_output("value", value, "MEAN")

    def other(context, x):
        context.set_non_tensor_output("value", value)
        return value

    _, error = attempt(compiled.strategy.run_steps, step, [GOOD] * 2, 2)
    compiled.check(0.0 if error else 2.0)
    attempt(compiled.strategy.run_steps, reducing, [GOOD] * 2, 2)
    attempt(compiled.strategy.run_steps, other, [GOOD] * 2, 2)
    compiled.check()


@pytest.mark.parametrize("make", [endless, object])
def test_outputs_that_are_no_tensors(compiled, make):
    value = make()
    with pytest.raises(ReplicaEngineError, match="output 'value'"):
        compiled.strategy.run_steps(lambda context, _: context.set_last_step_output("value", value), [GOOD], 1)
    compiled.check()


def test_an_output_that_is_a_value_of_several_replicas(compiled):
    value = DISTRIBUTED["numbers"]()
    first, last = value.values

    def step(context, _):
        context.set_last_step_output("value", value, "SUM")

    outputs = compiled.strategy.run_steps(step, [GOOD], 1).last_step_outputs
    assert float(outputs["value"]) == float(first) + float(last)
    compiled.check()


@examples(10)
@given(op=values_from(PYTHON, ARRAYS, TENSORS), name=values_from(PYTHON, ARRAYS))
def test_no_names_and_no_reductions(compiled, op, name):
    x = tf.constant(1.0)
    attempt(compiled.strategy.run_steps, lambda context, _: context.set_last_step_output("x", x, op), [GOOD], 1)
    attempt(compiled.strategy.run_steps, lambda context, _: context.set_last_step_output(name, x), [GOOD], 1)
    compiled.check()


def test_an_iterator_without_an_iterator(compiled):
    _, error = run_counted_steps(compiled, NotIterable())
    assert isinstance(error, Refusal)


def test_an_iterator_that_goes_on_after_its_end(compiled):
    _, error = run_counted_steps(compiled, Shrinking())
    assert error.context.steps == 1


@pytest.mark.parametrize("later", [tf.constant("text"), tf.constant(["text"]), np.array(["text"])], ids=repr)
def test_strings_after_numbers(compiled, later):
    _, error = run_counted_steps(compiled, [GOOD, later])
    assert isinstance(error, ReplicaEngineError)
    assert "Batch 1" in str(error)
    assert error.context.steps == 1


def test_an_endless_iterator_and_more_batches_ahead_than_steps(compiled):
    context, _ = run_counted_steps(compiled, itertools.repeat(GOOD), 3, prefetch=1000)
    assert context.steps == 3


def test_more_steps_than_there_are_numbers(compiled):
    _, error = run_counted_steps(compiled, [GOOD] * 3, 2**70)
    assert isinstance(error, tf.errors.OutOfRangeError)


@pytest.mark.parametrize("make", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("good", [0, 1])
def test_batches_without_an_end_are_refused(compiled, make, good):
    _, error = run_counted_steps(compiled, [GOOD] * good + [make()])
    assert isinstance(error, ReplicaEngineError)
    assert "contains itself" in str(error) or "the structure differs" in str(error)
