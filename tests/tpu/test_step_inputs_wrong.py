"""Calls of `run_steps` that make no sense."""

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


def test_a_step_that_takes_another_number_of_inputs(two):
    with pytest.raises(TypeError, match=r"positional argument"):
        two.strategy.run_steps(lambda context, a, b, c: None, [PAIR] * 2, 2)
