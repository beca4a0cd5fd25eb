"""Values across replicas: all_reduce and all_gather in a replica, reduce and gather outside."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.on_mirrored import context

from replica_engine import MirroredStrategy
from replica_engine.errors import CollectiveError, ReplicaValueError


@pytest.mark.parametrize("op", ["sum", tf.distribute.ReduceOp.MEAN])
def test_all_reduce_gives_every_replica_the_same(n, run, local, per_replica, op):
    total = sum(2.0**i for i in range(n))
    result = run(lambda x: context().all_reduce(op, x), args=(per_replica(lambda i: [2.0**i, -(2.0**i)]),))
    expected = total / n if str(op).upper().endswith("MEAN") else total
    assert local(result) == [[expected, -expected]] * n


def test_all_reduce_keeps_structure_and_types(strategy, n, run, local, per_replica):
    def fn(x):
        value = {"a": [x, tf.cast(x, tf.float64) / 2], "b": (tf.cast(x, tf.float16),), "empty": []}
        return context().all_reduce("sum", value)

    total = float(sum(range(n)))
    result = run(fn, args=(per_replica(float),))
    assert local(result) == [{"a": [total, total / 2], "b": (total,), "empty": []}] * n
    dtypes = tf.nest.map_structure(lambda x: x.dtype, strategy.experimental_local_results(result)[0])
    assert dtypes == {"a": [tf.float32, tf.float64], "b": (tf.float16,), "empty": []}


@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "bfloat16", "complex64"])
def test_all_reduce_sums_every_kind_of_number(strategy, n, local, per_replica, dtype):
    result = strategy.run(
        lambda x: context().all_reduce("sum", x), args=(per_replica(lambda i: tf.cast([i, 1], dtype)),)
    )
    assert local(result) == [[sum(range(n)), n]] * n


def test_all_reduce_sums_integers_and_floats_at_once(n, run, local, per_replica):
    def fn(x):
        return context().all_reduce("sum", {"count": x, "twice": 2 * x, "loss": tf.cast(x, tf.float32) / 2})

    total = n * (n + 1) // 2
    result = run(fn, args=(per_replica(lambda i: i + 1),))
    assert local(result) == [{"count": total, "twice": 2 * total, "loss": total / 2}] * n
    result = run(lambda x: context().all_reduce("sum", [x, 2 * x]), args=(per_replica(lambda i: i + 1),))
    assert local(result) == [[total, 2 * total]] * n


def test_all_reduce_takes_communication_options(strategy, n, local):
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=1024, timeout_seconds=60)
    assert local(strategy.run(lambda: context().all_reduce("sum", tf.constant(2.0), options))) == [2.0 * n] * n


def test_all_reduce_sums_indexed_slices(n, run, local, per_replica):
    def fn(x):
        i = tf.cast(context().replica_id_in_sync_group, tf.int64)
        slices = tf.IndexedSlices(tf.stack([[x], [10.0 * x]]), tf.stack([i, tf.constant(0, tf.int64)]), (4, 1))
        reduced = context().all_reduce("sum", slices)
        assert isinstance(reduced, tf.IndexedSlices)
        return tf.convert_to_tensor(reduced)

    dense = [[0.0] for _ in range(4)]
    for i in range(n):
        dense[i][0] += i + 1.0
        dense[0][0] += 10.0 * (i + 1)
    assert local(run(fn, args=(per_replica(lambda i: i + 1.0),))) == [dense] * n


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_the_gradient_of_all_reduce_is_all_reduce(n, run, local, per_replica, op):
    """Replica i weighs the sum with i + 1, so its x gets the sum, or the mean, of all weights."""

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            weighted = (tf.cast(context().replica_id_in_sync_group, tf.float32) + 1.0) * context().all_reduce(op, x)
        return tape.gradient(weighted, x)

    assert local(run(fn, args=(per_replica(float),))) == [n * (n + 1) / 2.0 / (1 if op == "sum" else n)] * n


@pytest.mark.parametrize(("op", "each"), [("sum", 1.0), ("mean", None)])
def test_tf_gradients_of_all_reduce(strategy, n, local, per_replica, op, each):
    """The gradient of a graph, which no tape has recorded; of two tensors, which one all-reduce takes."""

    @tf.function
    def fn(x):
        total, doubled = context().all_reduce(op, [x, 2.0 * x])
        weighted = (tf.cast(context().replica_id_in_sync_group, tf.float32) + 1.0) * total
        return tf.gradients(weighted + doubled, x)[0]

    weights = n * (n + 1) / 2.0 + 2.0 * n
    assert local(strategy.run(fn, args=(per_replica(float),))) == [weights * each if each else weights / n] * n


def test_all_reduce_refuses_what_is_no_reduction(strategy):
    with pytest.raises(CollectiveError, match=r"cannot be reduced with 'product'\. The reduction must be one of"):
        strategy.run(lambda: context().all_reduce("product", tf.constant(1.0)))


def test_a_merge_function_that_reduces_with_an_unknown_name_is_told_the_nearest(strategy):
    with pytest.raises(ReplicaValueError, match=r"got str 'AVG'\. Write .MEAN."):
        strategy.run(lambda: context().merge_call(lambda strategy: strategy.extended.reduce_to("AVG", 1.0, "CPU:0")))


def test_all_gather_puts_replicas_in_order(n, run, local, per_replica):
    def fn(x):
        return context().all_gather({"rows": x, "columns": x}, axis=0)["rows"], context().all_gather(x, axis=1)

    rows, columns = run(fn, args=(per_replica(lambda i: [[i, 10 * i]]),))
    assert local(rows) == [[[i, 10 * i] for i in range(n)]] * n
    assert local(columns) == [[[number for i in range(n) for number in (i, 10 * i)]]] * n


@pytest.mark.threads("shapes that differ")
def test_all_gather_takes_uneven_parts(n, run, local, per_replica):
    result = run(lambda x: context().all_gather(x, axis=0), args=(per_replica(lambda i: [i] * (i + 1)),))
    assert local(result) == [[i for i in range(n) for _ in range(i + 1)]] * n


def test_the_gradient_of_all_gather_is_each_replicas_part_of_the_sum(n, run, local, per_replica):
    """Replica r weighs element k of the gathered vector with (r + 1) * 10^k."""

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = context().all_gather(x, axis=0)
            weights = 10.0 ** tf.cast(tf.range(tf.size(gathered)), tf.float32)
            weighted = gathered * weights * (tf.cast(context().replica_id_in_sync_group, tf.float32) + 1.0)
        return tape.gradient(weighted, x)

    total = n * (n + 1) / 2.0
    got = local(run(fn, args=(per_replica(lambda i: [float(i)]),)))
    np.testing.assert_allclose(got, [[total * 10.0**i] for i in range(n)], rtol=1e-6)


@pytest.mark.parametrize("axis", [0, -1])
def test_all_gather_of_booleans(n, run, local, per_replica, axis):
    def fn(flags):
        return context().all_gather({"flags": flags, "same": [tf.constant([[False, False]])]}, axis)

    flags = np.concatenate([[[True, i % 2 == 0]] for i in range(n)], axis).tolist()
    same = np.concatenate([[[False, False]]] * n, axis).tolist()
    gathered = run(fn, args=(per_replica(lambda i: [[True, i % 2 == 0]]),))
    assert local(gathered) == [{"flags": flags, "same": [same]}] * n


TO_DESTINATIONS = {
    "reduce_to": lambda extended, x, flag: extended.reduce_to("SUM", x, flag),
    "batch_reduce_to": lambda extended, x, flag: extended.batch_reduce_to("MEAN", [(x, flag), (x, x)])[0],
    "reduce_to of one number": lambda extended, x, flag: extended.reduce_to("MEAN", 2.5, flag),
    "broadcast_to": lambda extended, x, flag: extended.broadcast_to(tf.constant(2.5), flag),
}


@pytest.mark.parametrize("name", TO_DESTINATIONS)
@pytest.mark.parametrize("shape", [(), (3,)])
def test_the_destinations_may_be_booleans(strategy, n, run, local, name, shape):
    """They stand for their devices: what they hold, also False alone, is not asked."""

    def fn():
        flag = tf.zeros(shape, tf.bool)
        return context().merge_call(
            lambda strategy, flag, x: TO_DESTINATIONS[name](strategy.extended, x, flag), args=(flag, tf.constant(2.5))
        )

    assert local(run(fn)) == [2.5 * n if name == "reduce_to" else 2.5] * n


def test_all_gather_refuses_indexed_slices(strategy):
    with pytest.raises(NotImplementedError, match="IndexedSlices"):
        strategy.run(lambda: context().all_gather(tf.IndexedSlices([[1.0]], [0], (1, 1)), axis=0))


@pytest.mark.replicas(2, 4)
def test_all_gather_refuses_scalars(run):
    with pytest.raises(CollectiveError, match=r"^all_gather: axis 0 .* shape \(\)\..*all_gather\(x\[tf\.newaxis\]"):
        run(lambda: context().all_gather(tf.constant(1.0), axis=0))


@pytest.mark.replicas(2)
@pytest.mark.parametrize("where", ["eager", "in-function"])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_gather_along_an_axis_that_values_do_not_have(strategy, where, per_replica, shape):
    words = r"strategy\.gather: axis 1 .* shape \(2,\)\." if shape else r"tf\.stack\(.*experimental_local_results"
    with pytest.raises(CollectiveError, match=words):
        called(where, lambda value: strategy.gather(value, axis=1), per_replica(lambda i: tf.zeros(shape)))


@pytest.mark.parametrize("op", ["SUM", "mean", tf.distribute.ReduceOp.SUM])
def test_reduce_with_swapped_arguments(strategy, op):
    value = strategy.run(lambda: tf.constant(1.0))
    with pytest.raises(ReplicaValueError, match=r'swapped.*strategy\.reduce\("(SUM|mean)", values, axis=None\)'):
        strategy.reduce(value, op, axis=None)


IN = ["eager", "in-function"]


def called(where, fn, *args):
    return tf.function(fn)(*args) if where == "in-function" else fn(*args)


@pytest.mark.parametrize("where", IN)
@pytest.mark.parametrize("op", ["SUM", tf.distribute.ReduceOp.MEAN])
def test_reduce_combines_replicas(strategy, n, per_replica, op, where):
    value = per_replica(lambda i: [float(i), 1.0])
    result = called(where, lambda value: strategy.reduce(op, value, axis=None), value)
    assert result.numpy().tolist() == ([sum(range(n)), n] if op == "SUM" else [(n - 1) / 2, 1.0])


@pytest.mark.threads("shapes that differ")
@pytest.mark.parametrize("where", IN)
def test_reduce_with_an_axis_combines_examples_too(strategy, n, per_replica, where):
    """Replica i has i + 1 examples, so the mean needs the number of examples, not of replicas."""
    examples = [float(10 * i + k) for i in range(n) for k in range(i + 1)]
    value = per_replica(lambda i: [[10.0 * i + k, 1.0] for k in range(i + 1)])
    total = called(where, lambda value: strategy.reduce("SUM", value, axis=0), value)
    mean = called(where, lambda value: strategy.reduce("MEAN", value, axis=0), value)
    assert total.numpy().tolist() == [sum(examples), len(examples)]
    np.testing.assert_allclose(mean, [sum(examples) / len(examples), 1.0], rtol=1e-6)


def test_reduce_along_another_axis(strategy, n, per_replica):
    value = per_replica(lambda i: [[1.0, 2.0, float(i)]])
    assert strategy.reduce("SUM", value, axis=1).numpy().tolist() == [3.0 * n + sum(range(n))]
    assert strategy.reduce("SUM", value, axis=(0, 1)).numpy().tolist() == 3.0 * n + sum(range(n))


def test_reduce_keeps_structure(strategy, n, per_replica):
    result = strategy.reduce("SUM", {"a": per_replica(float), "b": [per_replica(lambda i: i)]}, axis=None)
    assert {"a": float(result["a"]), "b": [int(result["b"][0])]} == {"a": sum(range(n)), "b": [sum(range(n))]}


def test_the_mean_of_a_value_that_is_the_same_everywhere_is_the_value(strategy):
    assert float(strategy.reduce("MEAN", 2.0, axis=None)) == 2.0


@pytest.mark.replicas(2, 4)
def test_a_plain_value_has_no_sum_over_replicas(strategy):
    """It may be a sum already; as in TensorFlow, nothing is guessed."""
    for value in 2.0, {"zero has a sum": 0.0, "a": [2.0]}:
        with pytest.raises(ValueError, match=r"sum over replicas of float 2\.0 is .* one value for all replicas"):
            strategy.reduce("SUM", value, axis=None)


def test_reduce_in_a_replica_is_refused(strategy, run):
    with pytest.raises(RuntimeError, match=r"strategy.reduce\(\) was called inside a replica"):
        run(lambda: strategy.reduce("SUM", tf.constant(1.0), axis=None))


@pytest.mark.parametrize("where", IN)
def test_gather_concatenates_in_order(strategy, n, per_replica, where):
    value = per_replica(lambda i: [[i, i]] * (i + 1))
    rows = called(where, lambda value: strategy.gather(value, axis=0), value)
    assert rows.numpy().tolist() == [[i, i] for i in range(n) for _ in range(i + 1)]
    columns = called(where, lambda value: strategy.gather(value, axis=1), per_replica(lambda i: [[i], [-i]]))
    assert columns.numpy().tolist() == [list(range(n)), [-i for i in range(n)]]


def test_gather_refuses_parts_that_do_not_fit(make_strategy):
    strategy = make_strategy(2)
    value = strategy.experimental_distribute_values_from_function(
        lambda context: tf.zeros([1, context.replica_id_in_sync_group + 1])
    )
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"[Dd]imension|shape"):
        strategy.gather(value, axis=0)


def test_gather_in_a_replica_is_refused(strategy):
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: strategy.gather(tf.constant([1.0]), axis=0))


def test_a_strategy_goes_though_collectives_of_its_own_were_traced(make_strategy):
    """TensorFlow keeps gradient functions that are registered in a graph for ever; the strategy must not stay with one.

    The leak check on every test is the assertion: replica threads go with their strategy.
    """
    strategy = make_strategy(2)

    @tf.function
    def both():
        return context().all_reduce("sum", tf.constant(1.0)), context().all_gather(tf.constant([1.0]), 0)

    results = strategy.experimental_local_results(strategy.run(both))
    assert [(float(total), gathered.numpy().tolist()) for total, gathered in results] == [(2.0, [1.0, 1.0])] * 2


EXTREMES = {"max": max, "min": min}


@pytest.mark.parametrize("op", EXTREMES)
def test_the_extreme_over_replicas(n, run, local, per_replica, op):
    def fn(x):
        value = {"all": [x, -x], "whole": tf.cast(x, tf.int32), "empty": (), "number": 3.0}
        return context().all_reduce(op, value)

    values = [[float(i % 3), -float(i)] for i in range(n)]
    first, second = ([each[index] for each in values] for index in (0, 1))
    expected = [EXTREMES[op](first), EXTREMES[op](second)]
    opposite = [EXTREMES[op](-x for x in first), EXTREMES[op](-x for x in second)]
    result = run(fn, args=(per_replica(lambda i: values[i]),))
    whole = {"all": [expected, opposite], "whole": expected, "empty": (), "number": 3.0}
    assert local(result) == [whole] * n


@pytest.mark.parametrize("op", EXTREMES)
def test_the_gradient_of_an_extreme_goes_in_equal_parts_to_the_replicas_that_hold_it(n, run, local, per_replica, op):
    """Replica i weighs the result with i + 1; two columns: one replica holds the extreme, or all do."""

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            weight = tf.cast(context().replica_id_in_sync_group, tf.float32) + 1.0
            weighted = weight * context().all_reduce(op, x)
        return tape.gradient(weighted, x)

    weights = n * (n + 1) / 2.0
    holds = 0 if op == "min" else n - 1
    result = run(fn, args=(per_replica(lambda i: [float(i), 7.0]),))
    assert local(result) == [[weights * (i == holds), weights / n] for i in range(n)]


@pytest.mark.parametrize("op", EXTREMES)
def test_the_extreme_of_a_nan_is_a_nan(n, run, local, per_replica, op):
    result = run(
        lambda x: tf.math.is_nan(context().all_reduce(op, x)),
        args=(per_replica(lambda i: [float("nan") if i == 0 else 1.0, 1.0]),),
    )
    assert local(result) == [[True, False]] * n


def test_the_extreme_of_sparse_values_is_that_of_dense_ones(n, run, local, per_replica):
    def fn(x):
        i = tf.cast(context().replica_id_in_sync_group, tf.int64)
        return context().all_reduce("MAX", tf.IndexedSlices(x[tf.newaxis], i[tf.newaxis], (4, 1)))

    result = run(fn, args=(per_replica(lambda i: [i - 0.5]),))
    assert local(result) == [[[max(i - 0.5, 0.0)] if i < n else [0.0] for i in range(4)]] * n if n > 1 else True


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("sparse", [False, True])
def test_truth_values_and_texts_are_not_reduced(strategy, run, op, sparse):
    def reduced(value):
        if sparse:
            value = tf.IndexedSlices(tf.reshape(value, [1, 1]), tf.constant([1]), (3, 1))
        return context().all_reduce(op, value)

    with pytest.raises(CollectiveError, match=rf"dtype bool cannot be reduced with {op.upper()}.*tf\.cast"):
        run(lambda: reduced(tf.constant(True)))
    if not sparse:
        with pytest.raises(CollectiveError, match=r"cannot combine values of dtype string.*strategy\.gather"):
            run(lambda: reduced(tf.constant("text")))


def test_complex_numbers_have_no_order(strategy, run):
    with pytest.raises(CollectiveError, match="dtype complex64 cannot be reduced with MIN"):
        run(lambda: context().all_reduce("MIN", tf.constant(1j, tf.complex64)))


def test_the_indices_of_slices_may_be_a_list(n, run, local):
    result = run(
        lambda: tf.convert_to_tensor(context().all_reduce("sum", tf.IndexedSlices(tf.ones([1, 2]), [1], [3, 2])))
    )
    assert local(result) == [[[0.0, 0.0], [n, n], [0.0, 0.0]]] * n


def whole(n, i):
    """Another tensor [n, 2n] on each replica."""
    return np.arange(2.0 * n * n, dtype="float32").reshape(n, 2 * n) * (i + 1)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_reduce_scatter_gives_each_replica_a_part_of_the_sum(n, run, local, per_replica, axis):
    total = sum(whole(n, i) for i in range(n))
    result = run(
        lambda x: context().reduce_scatter({"a": x}, axis), args=(per_replica(lambda i: tf.constant(whole(n, i))),)
    )
    assert local(result) == [{"a": part.tolist()} for part in np.split(total, n, axis)]


@pytest.mark.parametrize(("split", "concat"), [(0, 0), (0, 1), (1, 0), (-1, -1)])
def test_all_to_all_sends_part_i_to_replica_i(n, run, local, per_replica, split, concat):
    parts = [np.split(whole(n, i), n, split) for i in range(n)]
    expected = [np.concatenate([parts[i][j] for i in range(n)], concat).tolist() for j in range(n)]
    result = run(
        lambda x: context().all_to_all(x, split, concat), args=(per_replica(lambda i: tf.constant(whole(n, i))),)
    )
    assert local(result) == expected


@pytest.mark.parametrize("where", ["outside", "in a branch", "in a loop"])
@pytest.mark.parametrize("name", ["reduce_scatter", "all_to_all"])
def test_the_gradients_of_parts(n, run, local, per_replica, name, where):
    """The objective is the sum over replicas; replica i weighs what it gets with i + 1."""

    def got(x):
        return context().reduce_scatter(x, 0) if name == "reduce_scatter" else context().all_to_all(x, 0, 1)

    def fn(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            if where == "outside":
                y = got(x)
            elif where == "in a branch":
                y = tf.cond(tf.reduce_sum(tf.ones([2])) > 1, lambda: got(x), lambda: 0.0 * got(x))
            else:
                zero = tf.constant(0.0)
                y, _ = tf.while_loop(lambda _, i: i < 1.0, lambda _, i: (got(x), i + 1.0), [0.0 * got(x), zero])
            weighed = (tf.cast(context().replica_id_in_sync_group, tf.float32) + 1.0) * tf.reduce_sum(y)
        return tape.gradient(weighed, x)

    result = run(fn, args=(per_replica(lambda i: tf.constant(whole(n, i))),))
    expected = np.repeat(np.arange(1.0, n + 1.0)[:, None], 2 * n, 1)  # row j went to replica j
    assert local(result) == [expected.tolist()] * n


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: context().reduce_scatter(x, 2), "reduce_scatter: axis 2"),
        (lambda x: context().all_to_all(x, 0, 5), "all_to_all: axis 5"),
        (lambda x: context().reduce_scatter(tf.zeros([2 * context().num_replicas_in_sync + 1])), "equal parts"),
        (lambda x: context().all_to_all(tf.zeros([context().num_replicas_in_sync + 1]), 0, 0), "equal parts"),
    ],
)
def test_parts_that_do_not_exist(strategy, n, call, words):
    if "equal parts" in words and n == 1:
        return  # everything divides
    with pytest.raises(CollectiveError, match=words):
        strategy.run(call, args=(tf.zeros([4, 4]),))


def test_all_to_all_of_an_unknown_rank_counts_from_the_end(strategy, n, local, per_replica):
    if not isinstance(strategy, MirroredStrategy):
        return  # compiled replicas refuse unknown ranks

    def swapped(x):
        unknown = tf.raw_ops.PlaceholderWithDefault(input=x, shape=tf.TensorShape(None))
        return context().all_to_all(unknown, -2, 0)

    step = tf.function(lambda x: strategy.run(swapped, args=(x,)))
    result = step(per_replica(lambda i: tf.constant(whole(n, i)[tf.newaxis])))
    assert {tuple(np.shape(each)) for each in local(result)} == {(n, 1, 2 * n)}
