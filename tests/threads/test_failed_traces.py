"""A step that fails while a `tf.function` traces it: its error has its notes, and nothing is logged, then or later."""

import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index

from replica_engine import MirroredStrategy
from replica_engine.errors import MergeCallMismatchError, StructureMismatchError


def logged(caplog):
    """What is logged, but for TensorFlow's advice about tests that make a `tf.function` each."""
    return [record.getMessage() for record in caplog.records if "retracing" not in record.getMessage()]


def own_error(x):
    y = context().all_reduce("SUM", x)
    raise ValueError(f"not today: {y.shape}")


def another_meeting(x):
    mean = context().all_reduce("MEAN", x)
    return mean if index() == 0 else context().all_reduce("MEAN", mean)


def merge_function(x):
    context().all_reduce("SUM", x)
    return context().merge_call(lambda strategy, x: 1 / 0, args=(x,))


def in_a_branch(x):
    def fails():
        own_error(x)

    return tf.cond(tf.reduce_sum(x) > 0, fails, lambda: None)


def in_the_merge_of_a_branch(x):
    return tf.cond(tf.reduce_sum(x) > 0, lambda: merge_function(x), lambda: x)


def another_structure(x):
    total = context().all_reduce("SUM", x)
    return [total] if index() == 0 else {"total": total}


FAILING = [
    (own_error, ValueError),
    (another_meeting, MergeCallMismatchError),
    (merge_function, ZeroDivisionError),
    (in_a_branch, ValueError),
    (in_the_merge_of_a_branch, ZeroDivisionError),
    (another_structure, StructureMismatchError),
]


@pytest.mark.parametrize(("step", "error"), FAILING, ids=[step.__name__ for step, _ in FAILING])
def test_a_trace_that_fails_after_a_meeting(step, error, caplog):
    strategy = MirroredStrategy(["CPU:0", "CPU:1"])
    for _ in range(2):  # the second time, the strategy also knows the trace that failed first
        with pytest.raises(error) as failure:
            tf.function(lambda: strategy.run(step, args=(tf.ones([2]),)))()
        assert any("last sync points of the run:" in note for note in failure.value.__notes__)
    with pytest.raises(ValueError, match="not today") as eager:
        strategy.run(own_error, args=(tf.ones([2]),))
    assert any("last sync points of the run:" in note for note in eager.value.__notes__)
    assert "all_reduce" in {point.kind for point in strategy.sync_points()}
    assert not logged(caplog)


@pytest.mark.parametrize(("step", "error"), FAILING, ids=[step.__name__ for step, _ in FAILING])
def test_a_function_that_catches_the_error_and_goes_on(step, error, caplog):
    """Its graph has marks of a step that is not whole: the call is watched all the same."""
    strategy = MirroredStrategy(["CPU:0", "CPU:1"], timeout=300.0)

    @tf.function(autograph=False)
    def caught(x):
        try:
            strategy.run(step, args=(x,))
        except error:
            return strategy.run(lambda: context().all_reduce("SUM", x))

    for _ in range(2):
        assert strategy.reduce("MEAN", caught(tf.ones([2])), axis=None).numpy().tolist() == [2.0, 2.0]
    assert len(strategy.sync_points()) > 2
    assert not logged(caplog)
