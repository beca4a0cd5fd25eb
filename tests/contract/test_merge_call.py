"""`merge_call`: every replica pauses, one function runs for all of them, each gets its part."""

import functools

import pytest
import tensorflow as tf
from helpers.on_mirrored import context, index

from replica_engine.errors import MergeCallMismatchError, ReplicaValueError, StructureMismatchError


class OwnError(Exception):
    pass


def test_the_merge_function_gets_the_strategy_and_what_the_replicas_passed(strategy, n, run, local, per_replica):
    seen = []

    def merge_fn(merging, a, *, b):
        seen.append(merging)
        parts = zip(merging.experimental_local_results(a), merging.experimental_local_results(b), strict=True)
        return tf.add_n([x * y for x, y in parts])

    def fn(x):
        return context().merge_call(merge_fn, args=(x,), kwargs={"b": x + 1})

    assert local(run(fn, args=(per_replica(lambda i: i),))) == [sum(i * (i + 1) for i in range(n))] * n
    assert seen == [strategy]


def test_each_replica_gets_its_part_of_a_distributed_result(strategy, n, run, local, per_replica):
    def fn(x):
        doubled = context().merge_call(lambda strategy, x: {"same": 7, "own": x, "none": None}, args=(2 * x,))
        return doubled["own"] + doubled["same"], doubled["none"]

    result, nothing = run(fn, args=(per_replica(lambda i: i),))
    assert local(result) == [2 * i + 7 for i in range(n)]
    assert nothing is None


def test_a_merge_function_may_return_nothing(run):
    assert run(lambda: context().merge_call(lambda strategy: None)) is None


def test_what_is_the_same_object_everywhere_is_passed_as_it_is(run):
    same = object()
    seen = []

    def fn():
        context().merge_call(lambda strategy, x, y: seen.append((x, y)), args=(same, "text"))

    run(fn)
    assert seen == [(same, "text")]


def test_merge_calls_follow_one_another(strategy, n, run, local, per_replica):
    def add_up(strategy, x):
        return tf.add_n(strategy.experimental_local_results(x))

    def fn(x):
        for _ in (1, 2, 3):
            x = x + context().merge_call(add_up, args=(x,))
        return x

    expected = list(range(n))
    for _ in range(3):
        expected = [x + sum(expected) for x in expected]
    assert local(run(fn, args=(per_replica(lambda i: i),))) == expected


class Merger:
    def merge(self, strategy, x):
        return tf.add_n(strategy.experimental_local_results(x))

    def __call__(self, strategy, x):
        return self.merge(strategy, x)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Merger().merge, id="bound-method"),
        pytest.param(lambda: functools.partial(Merger.merge, Merger()), id="partial"),
        pytest.param(lambda: Merger(), id="callable-object"),
        pytest.param(lambda: lambda strategy, x: Merger().merge(strategy, x), id="lambda"),
    ],
)
def test_every_kind_of_callable_merges(strategy, n, local, make):
    """Each replica makes its own; they are the same function all the same."""
    assert local(strategy.run(lambda: context().merge_call(make(), args=(tf.constant(2),)))) == [2 * n] * n


@pytest.mark.threads("Python code of each replica")
def test_a_failing_merge_function_fails_the_run_and_the_next_one_works(strategy, n, run, local):
    def merge_fn(strategy):
        raise OwnError("in the merge")

    unwound = []

    def fn():
        try:
            context().merge_call(merge_fn)
        finally:
            unwound.append(index())

    with pytest.raises(OwnError, match="in the merge") as caught:
        run(fn)
    assert any("raised in merge function" in note and "merge_fn" in note for note in caught.value.__notes__)
    assert sorted(unwound) == list(range(n))
    assert local(run(lambda: context().merge_call(Merger().merge, args=(tf.constant(1),)))) == [n] * n


@pytest.mark.threads("Python code of each replica")
@pytest.mark.replicas(2, 4)
def test_the_other_replicas_are_unwound_when_one_fails(strategy, n, run):
    """Their `finally` runs, and no `except Exception` stops them."""
    unwound, survived = [], []

    def fn():
        try:
            context().merge_call(lambda strategy: None)
            if index() == n - 1:
                raise OwnError
            try:
                context().merge_call(lambda strategy: None)
            except Exception:
                survived.append(index())
        finally:
            unwound.append(index())

    with pytest.raises(OwnError):
        run(fn)
    assert sorted(unwound) == list(range(n))
    assert survived == []


@pytest.mark.threads("Python code of each replica")
def test_an_exception_after_a_merge_call_comes_out(strategy, run):
    def fn():
        context().merge_call(lambda strategy: None)
        raise OwnError("later")

    with pytest.raises(OwnError, match="later") as caught:
        run(fn)
    assert any("after 1 merge call" in note for note in caught.value.__notes__)


@pytest.mark.threads("Python code of each replica")
@pytest.mark.replicas(2, 4)
def test_replicas_that_make_different_numbers_of_merge_calls_are_told_so(strategy, n, run):
    def fn():
        if index() != 0:
            context().merge_call(lambda strategy: None)

    with pytest.raises(MergeCallMismatchError, match="different number of merge_call") as caught:
        run(fn)
    assert [(row.replica, row.size, row.merge_calls) for row in caught.value.rows] == [
        (i, n, 0 if i == 0 else 1) for i in range(n)
    ]
    assert all("test_merge_call.py" in row.where for row in caught.value.rows[1:])


@pytest.mark.threads("Python code of each replica")
@pytest.mark.replicas(2, 4)
def test_replicas_that_meet_in_different_merge_functions_are_told_so(strategy, n, run):
    def one(strategy):
        return 1

    def other(strategy):
        return 2

    with pytest.raises(MergeCallMismatchError, match="different merge functions") as caught:
        run(lambda: context().merge_call(one if index() == 0 else other))
    assert len(caught.value.rows) == n
    assert "one" in caught.value.rows[0].where
    assert "other" in caught.value.rows[1].where


@pytest.mark.threads("Python code of each replica")
@pytest.mark.replicas(2, 4)
def test_arguments_of_different_structure_are_told_where(run):
    def fn():
        value = [1, {"a": 2}] if index() == 0 else [1, {"b": 2}]
        context().merge_call(lambda strategy, x: None, args=(value,))

    with pytest.raises(StructureMismatchError) as caught:
        run(fn)
    assert caught.value.path == "args[0][1]"
    assert caught.value.replicas == (0, 1)


def test_merge_call_in_a_nested_function(n, run, local):
    """Which `tf.distribute` refuses. For control flow see test_control_flow.py."""
    inner = tf.function(lambda: context().merge_call(Merger().merge, args=(tf.constant(2),)))
    assert local(run(lambda: inner())) == [2 * n] * n


def test_merge_call_under_init_scope_runs_eagerly(strategy):
    """What optimizers do to create slot variables."""
    seen = []

    @tf.function
    def step():
        def fn():
            with tf.init_scope():
                context().merge_call(lambda strategy: seen.append(tf.executing_eagerly()))

        strategy.run(fn)

    step()
    assert seen == [True]


def test_merge_functions_merge_in_the_mode_of_the_caller(strategy, run):
    modes = []

    def fn():
        modes.append(tf.executing_eagerly())
        context().merge_call(lambda strategy: modes.append(tf.executing_eagerly()))

    run(fn)
    assert len(modes) >= 2
    assert len(set(modes)) == 1


def test_a_context_is_of_no_use_to_another_thread(strategy):
    """A merge call needs the thread that runs the replica."""
    contexts = []
    strategy.run(lambda: contexts.append(context()))
    with pytest.raises(RuntimeError):
        contexts[0].merge_call(lambda strategy: None)


@pytest.mark.threads("arguments are regrouped")
def test_an_argument_that_contains_itself_is_refused(strategy):
    def fn():
        circle = []
        circle.append(circle)
        context().merge_call(lambda strategy, circle: None, args=(circle,))

    with pytest.raises(ReplicaValueError, match="contains itself"):
        strategy.run(fn)
