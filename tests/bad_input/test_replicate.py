"""`xla.replicate` and `xla.lower`: inputs of any kind come through, or there is an error that says why not."""

import pytest
import tensorflow as tf
from helpers.bad_inputs import ENDLESS, OTHER_NUMBERS
from helpers.bad_values import examples, garbage, structures, values_from
from helpers.outcomes import assert_same, attempt, leaves, part
from hypothesis import given
from hypothesis import strategies as st

from replica_engine import xla
from replica_engine.errors import ReplicaEngineError


def identity(x):
    return x


def check_good():
    """A program that is known to be good."""
    results = xla.replicate(lambda x: x / xla.cross_replica_sum(x), [[1.0], [3.0]])
    assert [float(each) for each in results] == [0.25, 0.75]


@examples(30)
@given(value=structures())
def test_one_value_for_all(value):
    results, error = attempt(xla.replicate, identity, [[value], [value]])
    if error is None:
        for replica, result in enumerate(results):
            for name, found, own in leaves(result, part(value, replica)):
                assert_same(name, found, own, compiled=True)
    check_good()


@examples(15)
@given(left=structures(), right=structures())
def test_a_value_for_each(left, right):
    attempt(xla.replicate, identity, [[left], [right]])
    check_good()


@examples(15)
@given(value=structures())
def test_in_a_tf_function(value):
    @tf.function
    def step():
        results = xla.replicate(identity, [[value], [value]])
        found = [leaf for replica, result in enumerate(results) for leaf in leaves(result, part(value, replica))]
        return [leaf for _, leaf, _ in found if isinstance(leaf, tf.Tensor)]

    attempt(step)
    check_good()


@examples(15)
@given(value=structures(), other=structures())
def test_in_stages(value, other):
    lowered, error = attempt(xla.lower, identity, [[value], [value]])
    if error is None:
        compiled = lowered.compile()
        results, error = attempt(compiled, [[value], [value]])
        assert error is None
        for replica, result in enumerate(results):
            for name, found, own in leaves(result, part(value, replica)):
                assert_same(name, found, own, compiled=True)
        attempt(compiled, [[other], [other]])
    check_good()


@examples(20)
@given(inputs=garbage() | st.lists(garbage(), max_size=2) | st.lists(st.lists(garbage(), max_size=1), max_size=3))
def test_no_inputs(inputs):
    attempt(xla.replicate, lambda *args: 1.0, inputs)
    attempt(xla.lower, lambda *args: 1.0, inputs)
    check_good()


@examples(20)
@given(number=garbage(), fn=garbage().filter(lambda fn: not callable(fn)))
def test_no_number_and_no_function(number, fn):
    attempt(xla.replicate, lambda: 1.0, None, number)
    attempt(xla.lower, lambda: 1.0, [[], []], number)
    attempt(xla.replicate, fn, [[], []])
    attempt(xla.lower, fn, [[], []])
    check_good()


@examples(10)
@given(value=structures())
def test_results(value):
    attempt(xla.replicate, lambda: value, num_replicas=2)
    check_good()


@pytest.mark.parametrize("call", [xla.replicate, xla.lower])
@pytest.mark.parametrize("make", ENDLESS.values(), ids=ENDLESS)
def test_structures_without_an_end_are_refused(call, make):
    with pytest.raises(ReplicaEngineError, match="contains itself"):
        call(identity, [[make()], [make()]])
    with pytest.raises(ReplicaEngineError, match="contains itself"):
        call(make, num_replicas=2)


@pytest.mark.parametrize("make", OTHER_NUMBERS.values(), ids=OTHER_NUMBERS)
def test_values_of_another_number_of_replicas_are_refused(make):
    value = make()
    with pytest.raises(ReplicaEngineError, match=r"args\[0\].*(0|1|3) replicas?.*2"):
        xla.replicate(identity, [[value], [value]])


@pytest.mark.parametrize("fn", [None, 3, "text", [abs]])
def test_what_is_no_function_is_refused(fn):
    for call in (xla.replicate, xla.lower):
        with pytest.raises(ReplicaEngineError, match="takes a function"):
            call(fn, [[], []])


@examples(20)
@given(devices=values_from({"none": lambda: None}) | garbage())
def test_compiling_for_no_devices(devices):
    lowered = xla.lower(identity, [[1.0], [2.0]])
    attempt(lowered.compile, devices)
    check_good()
