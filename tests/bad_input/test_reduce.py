"""`reduce` comes to what NumPy comes to, or says why it cannot."""

import math

import numpy as np
import pytest
import tensorflow as tf
from helpers.bad_inputs import ENDLESS
from helpers.bad_values import examples, garbage, structures
from helpers.outcomes import attempt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tensorflow.python.distribute.values import PerReplica

from replica_engine.errors import ReplicaEngineError, ReplicaValueError

OPS = st.sampled_from(["SUM", "MEAN", "sum", tf.distribute.ReduceOp.MEAN])
KINDS = [np.float32, np.float64, np.int32, np.int64, np.complex64]


@st.composite
def pairs(draw):
    """Two arrays of one dtype and shape, with NaNs and infinities."""
    kind = np.dtype(draw(st.sampled_from(KINDS)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    # Integers whose sum is one of their dtype. A sum of denormal numbers may be flushed to zero, and of complex
    # infinities NumPy and TensorFlow have different ideas.
    finite = {"allow_nan": False, "allow_infinity": False} if kind.kind == "c" else {}
    integers = st.integers(-(2**27), 2**27)
    elements = integers if kind.kind == "i" else hnp.from_dtype(kind, allow_subnormal=False, **finite)
    return draw(hnp.arrays(kind, shape, elements=elements)), draw(hnp.arrays(kind, shape, elements=elements))


@examples(30)
@given(arrays=pairs(), op=OPS)
def test_of_arrays(both, arrays, op):
    value = PerReplica([tf.constant(array) for array in arrays])
    total = arrays[0] + arrays[1]
    is_mean = str(getattr(op, "value", op)).upper() == "MEAN"
    with np.errstate(all="ignore"):
        expected = total / np.asarray(2, total.dtype) if is_mean else total
    result = both.strategy.reduce(op, value, axis=None)
    smallest = np.finfo(expected.dtype).tiny if expected.dtype.kind in "fc" else 0  # half of it may be flushed to zero
    np.testing.assert_allclose(result.numpy(), expected, rtol=0, atol=smallest)


@examples(20)
@given(arrays=pairs(), op=OPS)
def test_along_an_axis(both, arrays, op):
    value = PerReplica([tf.constant(array) for array in arrays])
    result, error = attempt(both.strategy.reduce, op, value, axis=0)
    if arrays[0].ndim == 0:
        assert error is not None
    elif error is None:
        rows = np.concatenate(arrays)
        with np.errstate(all="ignore"):
            is_mean = str(getattr(op, "value", op)).upper() == "MEAN"
            expected = rows.sum(0) / np.asarray(max(len(rows), 1), rows.dtype) if is_mean else rows.sum(0)
        if len(rows):
            smallest = np.finfo(expected.dtype).tiny if expected.dtype.kind in "fc" else 0  # a mean may be below it
            np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=smallest)
    both.check()


@examples(40)
@given(value=structures(), op=OPS)
def test_of_anything(both, value, op):
    attempt(both.strategy.reduce, op, value, axis=None)
    both.check()


@examples(10)
@given(value=structures(), op=OPS)
def test_of_anything_in_a_tf_function(both, value, op):
    @tf.function
    def reduce():
        result = both.strategy.reduce(op, value, axis=None)
        return [leaf for leaf in tf.nest.flatten(result) if tf.is_tensor(leaf)]

    attempt(reduce)
    both.check()


@examples(10)
@given(value=structures(), op=OPS)
def test_of_anything_along_an_axis(both, value, op):
    attempt(both.strategy.reduce, op, value, axis=0)
    both.check()


@examples(15)
@given(op=garbage(), axis=garbage())
def test_by_nothing_known(both, op, axis):
    value = PerReplica([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])])
    attempt(both.strategy.reduce, op, value, axis=None)
    attempt(both.strategy.reduce, "SUM", value, axis=axis)
    attempt(both.strategy.reduce, "MEAN", value, axis=axis)
    both.check()


@examples(10)
@given(value=structures())
def test_within_replicas(both, value):
    """`all_reduce` of anything, which TensorFlow turns into tensors."""
    attempt(both.strategy.run, lambda x: tf.distribute.get_replica_context().all_reduce("SUM", x), args=(value,))
    both.check()


@pytest.mark.parametrize(("op", "expected"), [("SUM", 3.0), ("MEAN", 1.5)])
def test_python_numbers_count_as_tensors(both, op, expected):
    assert float(both.strategy.reduce(op, PerReplica([1.0, 2.0]), axis=None)) == expected
    found = both.strategy.reduce(op, {"a": [PerReplica([1.0, 2.0])], "b": PerReplica([np.float32(1), 2.0])}, axis=None)
    assert float(found["a"][0]) == float(found["b"]) == expected


def test_zero_is_zero(both):
    for zero in (0, 0.0, -0.0, False):
        for op in ("SUM", "MEAN"):
            assert both.strategy.reduce(op, both.strategy.run(lambda zero=zero: zero), axis=None) == 0


def test_nan_stays_nan(both):
    value = PerReplica([tf.constant([math.nan, 1.0]), tf.constant([1.0, math.inf])])
    assert str(both.strategy.reduce("SUM", value, axis=None).numpy().tolist()) == "[nan, inf]"


@pytest.mark.parametrize("nothing", [None, "text", tf.ragged.constant([[1.0], []])], ids=["none", "text", "ragged"])
def test_what_replicas_have_no_sum_of(both, nothing):
    with pytest.raises(ReplicaValueError, match="Return tensors or numbers"):
        both.strategy.reduce("SUM", PerReplica([nothing, nothing]), axis=None)


def test_the_sum_of_what_is_one_value_for_all(both):
    with pytest.raises(ReplicaValueError, match=f"the variable '{both.total.name}' is not defined"):
        both.strategy.reduce("SUM", both.total, axis=None)
    assert float(both.strategy.reduce("MEAN", both.total, axis=None)) == float(both.total.numpy())


@pytest.mark.parametrize("op", [None, "PRODUCT", 3, tf.VariableAggregation.SUM])
def test_the_operation_is_sum_or_mean(both, op):
    with pytest.raises(ReplicaValueError, match=r'"SUM" or "MEAN".*got'):
        both.strategy.reduce(op, PerReplica([1.0, 2.0]), axis=None)


@pytest.mark.parametrize("axis", ["0", 0.5, [None], tf.constant([1.0])])
def test_the_axis_is_an_int(both, axis):
    with pytest.raises(ReplicaValueError, match="`axis` must be an int"):
        both.strategy.reduce("MEAN", PerReplica([tf.ones([2]), tf.ones([2])]), axis=axis)


@pytest.mark.parametrize("name", ENDLESS)
def test_structures_without_an_end_are_refused(both, name):
    with pytest.raises(ReplicaEngineError, match="contains itself"):
        both.strategy.reduce("MEAN", ENDLESS[name](), axis=None)
    both.check()
