"""Collectives: groups, axes and pairs of all kinds are taken, or refused while the body is traced."""

import numpy as np
import pytest
from helpers.bad_inputs import endless
from helpers.bad_values import examples, garbage
from helpers.outcomes import attempt
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.python.distribute.values import PerReplica

from replica_engine import xla
from replica_engine.errors import ReplicaValueError
from replica_engine.xla import counts

INPUTS = [[np.float32([[1, 2], [3, 4]])], [np.float32([[5, 6], [7, 8]])]]
SMALL = st.integers(-3, 3)


def launched(body):
    """The results of a body; none if it was refused, and then nothing was launched."""
    before = counts().launches
    results, error = attempt(xla.replicate, body, INPUTS)
    assert error is None or counts().launches == before
    good = xla.replicate(xla.cross_replica_sum, INPUTS)
    assert good[0].numpy().tolist() == [[6, 8], [10, 12]]
    return results


@pytest.mark.parametrize(
    "make", [endless, object, lambda: PerReplica([1, 2])], ids=["endless", "object", "distributed"]
)
def test_what_is_no_tensor(make):
    for body in (xla.cross_replica_sum, xla.all_gather, lambda x: xla.collective_permute(x, [(0, 1)])):
        with pytest.raises(ReplicaValueError, match=r"cannot become a tensor|contains itself"):
            xla.replicate(lambda body=body: body(make()), num_replicas=2)


@examples(25)
@given(groups=st.lists(st.lists(SMALL, max_size=3), max_size=3))
def test_groups(groups):
    results = launched(lambda x: (xla.cross_replica_sum(x, groups), xla.all_reduce(x, "MAX", groups)))
    is_partition = all(groups) and sorted(replica for group in groups for replica in group) == [0, 1]
    assert (results is not None) == is_partition
    if is_partition and len(groups) == 2:
        assert results[0][0].numpy().tolist() == INPUTS[0][0].tolist()


@examples(25)
@given(axis=SMALL)
def test_axes(axis):
    results = launched(lambda x: xla.all_gather(x, axis))
    assert (results is not None) == (-2 <= axis < 2)
    if results is not None:
        expected = np.concatenate([INPUTS[0][0], INPUTS[1][0]], axis)
        assert all(np.array_equal(result, expected) for result in results)


@examples(25)
@given(split=SMALL, concat=SMALL)
def test_axes_of_all_to_all(split, concat):
    results = launched(lambda x: xla.all_to_all(x, split, concat))
    assert (results is not None) == (-2 <= split < 2 and -2 <= concat < 2)


@examples(25)
@given(pairs=st.lists(st.tuples(SMALL, SMALL), max_size=3))
def test_pairs(pairs):
    results = launched(lambda x: xla.collective_permute(x, pairs))
    sides = list(zip(*pairs, strict=True)) or [(), ()]
    is_permutation = all(len(set(side)) == len(side) and set(side) <= {0, 1} for side in sides)
    assert (results is not None) == is_permutation
    if is_permutation:
        back = {target: source for source, target in pairs}
        for replica, result in enumerate(results):
            expected = INPUTS[back[replica]][0] if replica in back else np.zeros([2, 2])
            assert np.array_equal(result, expected)


@examples(10)
@given(value=garbage(), other=garbage())
def test_garbage(value, other):
    launched(lambda x: xla.cross_replica_sum(x, value))
    launched(lambda x: xla.cross_replica_sum(x, [[value], [other]]))
    launched(lambda x: xla.all_reduce(x, value))
    launched(lambda x: xla.all_gather(x, value))
    launched(lambda x: xla.all_to_all(x, value, other))
    launched(lambda x: xla.collective_permute(x, value))
    launched(lambda x: xla.collective_permute(x, [(value, other)]))
    launched(lambda x: xla.cross_replica_sum(value))
    launched(lambda x: xla.all_gather(value, axis=0))
    launched(lambda x: xla.all_to_all(value, 0, 0))
    launched(lambda x: xla.collective_permute(value, [(0, 1)]))
