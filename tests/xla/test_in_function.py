"""A replicated function called inside a tf.function: an op of its graph, in order with all others."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import values

from replica_engine import xla
from replica_engine.errors import LoweringError


def by_replica_sum(x):
    return xla.cross_replica_sum(x) + tf.cast(xla.replica_id(), x.dtype)


@pytest.fixture
def variable():
    return tf.Variable(0.0)


@pytest.fixture
def add(variable):
    """`add()`: two replicas add one to the variable."""

    def body():
        variable.assign_add(1.0)

    return lambda: xla.replicate(body, num_replicas=2)


@pytest.mark.parametrize("n", [1, 4])
def test_it_gives_the_same_as_outside(n):
    inputs = [[np.float32(i), np.array([10.0 * i, 20.0])] for i in range(n)]
    fn = lambda x, y: {"sum": xla.cross_replica_sum(y), "x": [x, None]}  # noqa: E731
    inside = tf.function(lambda: xla.replicate(fn, inputs))()
    outside = xla.replicate(fn, inputs)
    tf.nest.assert_same_structure(inside, outside)
    for a, b in zip(tf.nest.flatten(inside), tf.nest.flatten(outside), strict=True):
        assert a is b is None or (a.dtype == b.dtype and a.numpy().tolist() == b.numpy().tolist())


def test_tensors_of_the_function_are_arguments():
    @tf.function
    def step(x):
        return xla.replicate(by_replica_sum, [[x], [x * 2.0]])

    assert values(step(tf.constant([1.0, 2.0]))) == [[3.0, 6.0], [4.0, 7.0]]
    assert values(step(tf.constant([1.0, 0.0]))) == [[3.0, 0.0], [4.0, 1.0]]


def test_results_have_static_shapes_and_dtypes():
    shapes = []

    @tf.function
    def step(x):
        results = xla.replicate(lambda x: (xla.all_gather(x), xla.replica_id()), [[x], [x]])
        shapes.extend((result.shape.as_list(), result.dtype) for result in tf.nest.flatten(results))
        return results

    step(tf.zeros([3, 2]))
    assert shapes == [([6, 2], tf.float32), ([], tf.int32)] * 2


@pytest.mark.parametrize("traced_by", ["a call", "get_concrete_function", "a function around it"])
def test_a_function_that_xla_is_to_compile_is_not_compiled_around_programs(traced_by):
    @tf.function(jit_compile=traced_by != "a function around it")
    def step(x):
        first = xla.replicate(by_replica_sum, [[x], [x]])
        return xla.replicate(by_replica_sum, [[first[0]], [x]])

    fn = {
        "a call": step,
        "get_concrete_function": step.get_concrete_function,
        "a function around it": tf.function(lambda x: step(x), jit_compile=True),
    }[traced_by]
    x = tf.constant([1.0])
    results = fn(x)(x) if traced_by == "get_concrete_function" else fn(x)
    assert values(results) == [[3.0], [4.0]]


def test_it_runs_twice_in_one_function_also_on_different_numbers_of_replicas():
    @tf.function
    def step(x, factor, rest):
        first = xla.replicate(by_replica_sum, [[x], [x * factor]])
        return xla.replicate(by_replica_sum, [[each] for each in (*first, *rest)])

    x = tf.constant(1.0)
    assert values(step(x, 2.0, [])) == [7.0, 8.0]
    assert values(step(x, 1.0, [x])) == [6.0, 7.0, 8.0]


def test_nested_functions_run_it_each_time_they_are_called():
    @tf.function
    def inner(x):
        return xla.replicate(xla.cross_replica_sum, [[x], [x * 3.0]])[0]

    assert float(tf.function(lambda x: inner(inner(x)))(tf.constant(1.0))) == 16.0


def test_it_runs_without_results_and_though_nobody_uses_them(variable, add):
    assert tf.function(add)() == [None, None]
    assert float(variable) == 1.0

    @tf.function
    def step():
        xla.replicate(lambda: variable.assign_add(1.0), num_replicas=2)

    step()
    step()
    assert float(variable) == 3.0


def test_host_reads_and_writes_keep_their_order(variable, add):
    @tf.function
    def step():
        before = variable.read_value()
        add()
        between = variable.read_value()
        variable.assign(100.0)
        add()
        after = variable.read_value()
        variable.assign_add(1000.0)
        return [before, between, after]

    assert values(step()) == [0.0, 1.0, 101.0]
    assert float(variable) == 1101.0
    assert values(step())[:2] == [1101.0, 1102.0]


def test_host_writes_before_a_run_are_seen_by_it(variable, add):
    @tf.function
    def step(x):
        variable.assign(x)
        add()

    step(tf.constant(5.0))
    assert float(variable) == 6.0


def test_it_runs_in_each_iteration_of_a_host_loop(variable, add):
    @tf.function
    def steps(count):
        seen = tf.TensorArray(tf.float32, size=count)
        for i in tf.range(count):
            add()
            seen = seen.write(i, variable.read_value())
            if i == 1:
                variable.assign(10.0)
        return seen.stack()

    assert steps(tf.constant(4)).numpy().tolist() == [1.0, 2.0, 11.0, 12.0]


def test_results_are_carried_through_a_host_loop():
    @tf.function
    def steps(x, count):
        parts = [x, x + 1.0]
        for _ in tf.range(count):
            parts = xla.replicate(by_replica_sum, [[part] for part in parts])
        return parts

    assert values(steps(tf.constant(1.0), tf.constant(3))) == [15.0, 16.0]


@pytest.mark.parametrize(("taken", "expected"), [(True, (1.0, 1.0)), (False, (0.0, -1.0))])
def test_it_runs_only_in_the_branch_that_is_taken(variable, add, taken, expected):
    @tf.function
    def step(condition):
        result = tf.constant(-1.0)
        if condition:
            add()
            result = variable.read_value()
        return result

    result = float(step(tf.constant(taken)))
    assert (float(variable), result) == expected


def test_shapes_may_be_known_when_it_runs_only():
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def step(x):
        return xla.replicate(lambda x: (x * 2.0, tf.shape(x)), [[x], [x + 1.0]])

    before = xla.counts()
    for size in (3, 5, 3):
        results = step(tf.ones([size]))
        assert results[1][0].numpy().tolist() == [4.0] * size
        assert results[1][1].numpy().tolist() == [size]
    used = xla.counts() - before
    assert (used.traces, used.lowerings, used.launches) == (1, 2, 3)


def test_shapes_that_turn_out_to_differ_are_an_error_that_says_so():
    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
    def step(x, y):
        return xla.replicate(lambda x: x * 2.0 + xla.cross_replica_sum(1.0), [[x], [y]])

    assert values(step(tf.ones([2]), tf.zeros([2]))) == [[4.0, 4.0], [2.0, 2.0]]
    with pytest.raises((tf.errors.OpError, ValueError), match=r"replica 1.*drop_remainder=True"):
        step(tf.ones([2]), tf.ones([3]))
    assert values(step(tf.ones([2]), tf.zeros([2]))) == [[4.0, 4.0], [2.0, 2.0]]


def test_shapes_and_ranks_may_turn_out_to_differ_where_nothing_is_summed():
    body = lambda x: x * 2.0 + tf.cast(xla.replica_id(), tf.float32)  # noqa: E731
    run = lambda x, y: xla.replicate(body, [[x], [y]])  # noqa: E731
    step = tf.function(run, input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
    assert values(step(tf.ones([2]), tf.ones([3]))) == [[2.0, 2.0], [3.0, 3.0, 3.0]]
    assert values(step(tf.ones([0]), tf.ones([1]))) == [[], [3.0]]
    step = tf.function(run, input_signature=[tf.TensorSpec(None), tf.TensorSpec(None)])
    assert values(step(tf.ones([2]), tf.ones([2, 1]))) == [[2.0, 2.0], [[3.0], [3.0]]]
    assert values(step(tf.ones([1, 3]), tf.ones([]))) == [[[2.0, 2.0, 2.0]], 3.0]


def test_what_xla_cannot_compile_fails_while_the_function_is_traced(variable):
    def bad():
        variable.assign_add(1.0)
        return variable * tf.cast(next(iter(tf.data.Dataset.range(3))), tf.float32)

    ran = []

    @tf.function
    def step():
        tf.py_function(lambda: ran.append(True), [], [])
        return xla.replicate(bad, num_replicas=2)

    with pytest.raises(LoweringError, match="RangeDataset"):
        step()
    assert float(variable) == 0.0
    assert not ran


def test_a_function_traces_its_body_once(add):
    step, before = tf.function(add), xla.counts()
    for _ in range(3):
        step()
    used = xla.counts() - before
    assert (used.traces, used.lowerings, used.launches) == (1, 1, 3)
