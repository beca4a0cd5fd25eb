"""`split_batch` and `join_outputs` of anything: all rows, once and in order, or an error."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.bad_inputs import ENDLESS, OTHER_NUMBERS
from helpers.bad_values import arrays, examples, garbage, structures, values_from
from helpers.outcomes import attempt
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.distribute.values import PerReplica

import replica_engine
from replica_engine.errors import ReplicaEngineError, ReplicaValueError


@examples(30)
@given(array=arrays(), size=st.none() | st.integers(0, 5))
def test_rows_come_back_whole_and_in_order(both, array, size):
    made, error = attempt(replica_engine.split_batch, both.strategy, array, size)
    if array.ndim == 0 or (size is not None and len(array) > size):
        assert error is not None
        return
    assert error is None
    shares, weights = made
    joined = replica_engine.join_outputs(both.strategy, shares, len(array))
    assert joined.dtype == array.dtype
    assert joined.numpy().tobytes() == array.tobytes()
    counted = replica_engine.join_outputs(both.strategy, weights).numpy()
    np.testing.assert_allclose(counted.sum(), 1.0 if len(array) else 0.0, rtol=1e-6)


@examples(30)
@given(batch=structures())
def test_batches_of_anything(both, batch):
    made, error = attempt(replica_engine.split_batch, both.strategy, batch)
    if error is None:
        attempt(replica_engine.join_outputs, both.strategy, made[0])
    both.check()


@examples(30)
@given(outputs=structures() | values_from(OTHER_NUMBERS))
def test_outputs_of_anything(both, outputs):
    attempt(replica_engine.join_outputs, both.strategy, outputs)
    attempt(replica_engine.join_outputs, both.strategy, outputs, 1)
    both.check()


@examples(30)
@given(number=garbage(), strategy=garbage())
def test_no_numbers_and_no_strategies(both, number, strategy):
    attempt(replica_engine.split_batch, both.strategy, tf.ones([3]), number)
    attempt(replica_engine.join_outputs, both.strategy, PerReplica([tf.ones([3]), tf.ones([3])]), number)
    attempt(replica_engine.split_batch, strategy, tf.ones([3]))
    attempt(replica_engine.join_outputs, strategy, tf.ones([3]))
    both.check()


@pytest.mark.parametrize("number", [-1, True, 1.5, "2", [1], np.matrix([[1, 2]]), tf.constant("a")], ids=repr)
def test_numbers_of_rows_are_ints_that_are_not_negative(both, number):
    with pytest.raises(ReplicaValueError, match="batch_size must be an int that is not negative"):
        replica_engine.split_batch(both.strategy, tf.ones([3]), number)
    with pytest.raises(ReplicaValueError, match="count must be an int that is not negative"):
        replica_engine.join_outputs(both.strategy, PerReplica([tf.ones([3]), tf.ones([3])]), number)


def test_numbers_of_rows_may_be_of_numpy_and_of_a_graph(both):
    outputs = PerReplica([tf.ones([2]), tf.zeros([2])])
    join = tf.function(lambda count: replica_engine.join_outputs(both.strategy, outputs, count))
    assert replica_engine.join_outputs(both.strategy, outputs, np.int64(3)).numpy().tolist() == [1, 1, 0]
    assert join(tf.constant(3)).numpy().tolist() == [1, 1, 0]


@pytest.mark.parametrize("output", [None, 1.0, "text", object()], ids=["none", "number", "text", "object"])
def test_outputs_without_rows_are_refused(both, output):
    with pytest.raises(ReplicaValueError, match="joined by rows"):
        replica_engine.join_outputs(both.strategy, [PerReplica([output, output])])


@pytest.mark.parametrize("make", ENDLESS.values(), ids=ENDLESS)
def test_structures_without_an_end_are_refused(both, make):
    for call in (replica_engine.split_batch, replica_engine.join_outputs):
        with pytest.raises(ReplicaEngineError, match="contains itself"):
            call(both.strategy, make())


def test_lookup_tables_and_data_sets_have_no_rows(both):
    with pytest.raises(ReplicaValueError, match="cannot become a tensor"):
        replica_engine.split_batch(both.strategy, tf.data.Dataset.range(3))
