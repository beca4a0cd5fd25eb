"""`strategy.run`: what goes in, what comes out, and what happens when it fails."""

import functools

import pytest
import tensorflow as tf
from helpers.on_mirrored import index, replica_id

from replica_engine.errors import ReplicaValueError


class OwnError(Exception):
    pass


def test_every_replica_runs_with_its_own_id(n, run, local):
    assert local(run(lambda: replica_id() + 10)) == [10 + i for i in range(n)]


def test_args_and_kwargs_reach_every_replica(n, run, local):
    def fn(a, b, *, c, d=1000):
        return a + b + c + d

    result = run(fn, args=(tf.constant(1), tf.constant(10)), kwargs={"c": tf.constant(100)})
    assert local(result) == [1111] * n


def test_each_replica_gets_its_part_of_a_distributed_argument(n, run, local, per_replica):
    result = run(lambda a, b: a * 10 + b, args=(per_replica(lambda i: i),), kwargs={"b": per_replica(lambda i: 2 * i)})
    assert local(result) == [12 * i for i in range(n)]


@pytest.mark.replicas(1)
def test_one_replica_returns_plain_tensors(run):
    result = run(lambda: {"a": tf.constant([1.0, 2.0])})
    assert isinstance(result["a"], tf.Tensor)
    assert result["a"].numpy().tolist() == [1.0, 2.0]


@pytest.mark.replicas(2, 4)
def test_several_replicas_return_distributed_values(n, run):
    result = run(lambda: {"a": tf.identity(replica_id())})
    assert isinstance(result["a"], tf.distribute.DistributedValues)
    assert [int(v) for v in result["a"].values] == list(range(n))


def test_a_function_that_returns_nothing_gives_none(run):
    assert run(lambda: None) is None


def test_run_leaves_the_result_of_one_run_alone_in_the_next(strategy, n, local, per_replica):
    first = strategy.run(lambda x: x + 1, args=(per_replica(lambda i: i),))
    second = strategy.run(lambda x: x * 2, args=(first,))
    assert local(first) == [i + 1 for i in range(n)]
    assert local(second) == [2 * (i + 1) for i in range(n)]


class Adder:
    def __init__(self, by):
        self.by = by

    def add(self, x):
        return x + self.by

    def __call__(self, x):
        return x + 2 * self.by


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        pytest.param(Adder(5).add, 6, id="bound-method"),
        pytest.param(Adder(5), 11, id="callable-object"),
        pytest.param(functools.partial(lambda y, x: x - y, 3), -2, id="partial"),
        pytest.param(lambda x, y=7: x + y, 8, id="default-argument"),
        pytest.param(tf.function(Adder(9).add), 10, id="function-of-method"),
        pytest.param(tf.negative, -1, id="library-function"),
    ],
)
def test_every_kind_of_callable_runs(strategy, n, local, fn, expected):
    assert local(strategy.run(fn, args=(tf.constant(1),))) == [expected] * n


def test_run_takes_run_options(strategy, n, local):
    options = tf.distribute.RunOptions()
    assert local(strategy.run(replica_id, options=options)) == list(range(n))


@pytest.mark.parametrize("x", [tf.constant(1.0), tf.constant([1.0]), 1.0], ids=["scalar", "vector", "number"])
def test_args_that_are_no_sequence_are_refused(strategy, x):
    with strategy.scope():
        v = tf.Variable(0.0, aggregation=tf.VariableAggregation.MEAN)
    context = tf.distribute.get_replica_context
    for call in (
        lambda: strategy.run(lambda x: x, args=(x)),
        lambda: strategy.extended.call_for_each_replica(lambda x: x, args=(x)),
        lambda: strategy.run(lambda: context().merge_call(lambda _, x: x, args=(x))),
        lambda: strategy.extended.update(v, lambda v, x: v.assign(x), args=(x)),
    ):
        with pytest.raises(ReplicaValueError, match=r"a list or tuple, args=\(x,\); got .* args=\(x\) is args=x\."):
            call()


@pytest.mark.threads("a device of its own")
def test_each_replica_computes_on_its_own_device(strategy, n, local):
    devices = local(strategy.run(lambda: tf.add(1, 2).device))
    assert devices == list(strategy.extended.worker_devices)
    assert len(set(devices)) == n


def test_a_gradient_tape_works_in_a_replica(n, run, local, per_replica):
    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return tape.gradient(y, x)

    assert local(run(fn, args=(per_replica(float),))) == [2.0 * i for i in range(n)]


@pytest.mark.threads("Python code of each replica")
def test_an_exception_keeps_its_type_and_message_and_says_which_replica(n, run):
    last = n - 1

    def fn():
        if index() == last:
            raise OwnError("the message")

    with pytest.raises(OwnError, match="the message") as caught:
        run(fn)
    assert type(caught.value) is OwnError
    note = f"replica {last} of {last + 1}, CPU:{last}, after 0 merge calls"
    assert any(note in one for one in caught.value.__notes__)


def test_run_works_after_a_failed_run(n, run, local):
    def fail():
        raise OwnError

    for _ in range(2):
        with pytest.raises(OwnError):
            run(fail)
        assert local(run(replica_id)) == list(range(n))


@pytest.mark.threads("XLA has no assertions")
def test_an_error_of_an_op_comes_out_as_itself(strategy, run):
    def fn(x):
        tf.debugging.assert_equal(x, 3, message="not three")
        return x

    with pytest.raises(tf.errors.InvalidArgumentError, match="not three"):
        run(fn, args=(tf.constant(2),))


def test_stop_iteration_comes_out_as_itself(strategy):
    with pytest.raises(StopIteration):
        strategy.run(lambda: next(iter(())))


def test_run_inside_a_replica_is_refused(strategy):
    with pytest.raises(RuntimeError, match=r"strategy.run\(\) was called inside a replica at .*test_run.py"):
        strategy.run(lambda: strategy.run(replica_id))


def test_run_inside_a_merge_function_runs_on_all_replicas(strategy, n, local):
    def inner():
        return replica_id() * 3, tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))

    def fn():
        return tf.distribute.get_replica_context().merge_call(lambda strategy: strategy.run(inner))

    assert local(strategy.run(fn)) == [(3 * i, float(n)) for i in range(n)]


def test_strategies_of_several_sizes_work_side_by_side(make_strategy):
    def total():
        return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))

    strategies = [make_strategy(size) for size in (2, 4, 1, 2)]
    for _ in range(2):
        sums = [float(strategy.experimental_local_results(strategy.run(total))[0]) for strategy in strategies]
        assert sums == [2.0, 4.0, 1.0, 2.0]
