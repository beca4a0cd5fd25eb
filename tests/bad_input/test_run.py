"""`run` hands each replica its part of any argument and gives back what it returned, or says why it cannot."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from helpers.bad_inputs import DISTRIBUTED, ENDLESS, OTHER_NUMBERS, PYTHON, Refusal
from helpers.bad_values import examples, garbage, structures, values_from
from helpers.outcomes import assert_same, attempt, leaves, part
from hypothesis import given

from replica_engine.errors import ReplicaEngineError


def identity(x):
    return x


def check(witness, value, result):
    for replica in range(2):
        for name, found, own in leaves(part(result, replica), part(value, replica)):
            assert_same(name, found, own, witness.compiled)


@examples(40)
@given(value=structures())
def test_eagerly(both, value):
    result, error = attempt(both.strategy.run, identity, args=(value,))
    if error is None:
        check(both, value, result)
    both.check()


@examples(10)
@given(value=structures())
def test_by_name(both, value):
    result, error = attempt(both.strategy.run, identity, kwargs={"x": value})
    if error is None:
        check(both, value, result)
    both.check()


@examples(10)
@given(value=structures())
def test_of_a_tf_function(both, value):
    """Under threads it goes around the run, so TensorFlow says what it takes and returns, and words its errors."""
    if both.compiled:
        result, error = attempt(both.strategy.run, tf.function(identity), args=(value,))
        if error is None:
            check(both, value, result)
    else:
        with contextlib.suppress(TypeError, ValueError, NotImplementedError, Refusal, tf.errors.InvalidArgumentError):
            both.strategy.run(tf.function(identity), args=(value,))
    both.check()


@examples(15)
@given(value=structures())
def test_in_a_tf_function(both, value):
    """Tensors that `run` gives back there have the value that was given."""
    known = []

    @tf.function
    def step():
        known.clear()
        result = both.strategy.run(identity, args=(value,))
        for replica in range(2):
            known.extend(leaves(part(result, replica), part(value, replica)))
        return [found for _, found, _ in known if isinstance(found, tf.Tensor)]

    tensors, error = attempt(step)
    if error is None:
        values = iter(tensors)
        for name, found, own in known:
            if isinstance(found, tf.Tensor):
                assert_same(name, next(values), own, compiled=True)
    both.check()


@examples(15)
@given(value=structures())
def test_results(both, value):
    """What a function returns that it was not given."""
    attempt(both.strategy.run, lambda: value)
    both.check()


@examples(15)
@given(fn=(values_from(PYTHON) | garbage()).filter(lambda fn: not callable(fn)))
def test_no_function(both, fn):
    attempt(both.strategy.run, fn)
    both.check()


@examples(15)
@given(value=garbage())
def test_no_arguments(both, value):
    attempt(both.strategy.run, lambda *args: None, args=value)
    attempt(both.strategy.run, lambda **kwargs: None, kwargs=value)
    both.check()


@pytest.mark.parametrize("name", OTHER_NUMBERS)
@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_values_of_another_number_of_replicas_are_refused_before_any_replica_starts(both, name, in_function):
    started = []
    value = {"x": OTHER_NUMBERS[name]()}

    def call():
        both.strategy.run(started.append, args=(value,))

    with pytest.raises(ReplicaEngineError, match=r"args\[0\]\['x'\].*(0|1|3) replicas?.*2"):
        (tf.function(call) if in_function else call)()
    assert not started
    both.check()


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_structures_without_an_end_are_refused(both, name, in_function):
    run = both.strategy.run
    value = ENDLESS[name]()
    for call in (lambda: run(identity, args=(value,)), lambda: run(lambda: value)):
        with pytest.raises(ReplicaEngineError, match="contains itself"):
            (tf.function(call) if in_function else call)()
    both.check()


def test_ragged_tensors_of_other_numbers_of_rows(both):
    value = DISTRIBUTED["ragged, other rows"]()
    for run in (both.strategy.run, tf.function(both.strategy.run)):
        found = both.strategy.experimental_local_results(run(identity, args=(value,)))
        assert [each.to_list() for each in found] == [[[1]], [[1, 2], [3]]]


def test_bits_of_any_number_come_back(both):
    bits = np.array([0x7F800001, 0x7FC00123, 0xFF812345, 0x00000001, 0x807FFFFF, 0x80000000], np.uint32)
    value = tf.constant(bits.view(np.float32))
    result = both.strategy.run(identity, args=(value,))
    for replica in range(2):
        assert part(result, replica).numpy().view(np.uint32).tolist() == bits.tolist()
