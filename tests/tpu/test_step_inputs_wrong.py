"""Calls of `run_steps` that make no sense."""

import functools

import pytest
import tensorflow as tf
from helpers.loop_steps import PAIR, Counted, numbers

from replica_engine.errors import InputsError


@pytest.mark.parametrize("name", ["iterations", "prefetch"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2"])
def test_numbers_of_steps_and_batches_are_positive_ints(two, launched, name, value):
    batches = Counted(5)
    with pytest.raises(InputsError, match=rf"`{name}` must be a positive int; got {value!r}"):
        two.strategy.run_steps(lambda context, x: None, batches, **{"iterations": 2, name: value})
    assert launched() == batches.taken == 0


def test_extended_checks_the_number_of_steps_too(two):
    with pytest.raises(InputsError, match=r"`iterations` must be a positive int; got 0"):
        two.strategy.extended.experimental_run_steps_on_iterator(lambda context, x: None, numbers(2), 0)


def test_a_loop_is_no_part_of_a_function(two):
    batches = Counted(5)

    def steps():
        two.strategy.run_steps(lambda context, x: None, batches, 2)

    for call in (tf.function(steps), lambda: two.strategy.run(steps)):
        with pytest.raises(InputsError, match=r"outside the tf\.function"):
            call()
    assert batches.taken == 0


def test_what_is_no_iterator_is_refused(two):
    with pytest.raises(TypeError, match="iter"):
        two.strategy.run_steps(lambda context, x: None, 5, 2)


@pytest.mark.parametrize(
    ("step", "batch", "form"),
    [
        (lambda batch: None, 1.0, "def step(context, batch):"),
        (tf.function(lambda batch: None), 1.0, "def step(context, batch):"),
        (functools.partial(lambda rate, batch: None, 0.1), 1.0, "def step(context, batch):"),
        (lambda context, batch, *, training: None, 1.0, "def step(context, batch):"),
        (lambda x: None, PAIR, "def step(context, x, y):"),
        (lambda context, a, b, c: None, PAIR, "def step(context, x, y):"),
        (lambda context: None, (1.0,), "def step(context, x):"),
        (lambda: None, (), "def step(context):"),
    ],
)
def test_a_step_that_does_not_take_its_context_and_the_batch(two, launched, step, batch, form):
    with pytest.raises(InputsError, match="with its context first") as caught:
        two.strategy.run_steps(step, [batch] * 2, 2)
    assert form in str(caught.value)
    assert launched() == 0


@pytest.mark.parametrize(
    ("step", "batch"),
    [
        (lambda context: None, ()),
        (lambda *args: None, PAIR),
        (lambda context, *parts: None, PAIR),
        (lambda context, batch: None, PAIR),
        (lambda context, x, y, training=True: None, PAIR),
        (lambda context, batch: None, {"x": 1.0, "y": 2.0}),
    ],
)
def test_all_forms_of_a_step(two, step, batch):
    assert two.strategy.run_steps(step, [batch] * 2, 2).steps == 2


def test_an_exception_of_a_step_without_context_says_so(two):
    with pytest.raises(TypeError) as caught:
        two.strategy.run_steps(lambda x, y: x * y[0], [PAIR] * 2, 2)
    assert any("def step(context, x, y):" in note for note in caught.value.__notes__)
    with pytest.raises(AttributeError) as caught:
        two.strategy.run_steps(lambda context, x, y: context.nothing, [PAIR] * 2, 2)
    assert not any("def step(" in note for note in caught.value.__notes__)
