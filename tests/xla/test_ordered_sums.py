"""Sums in the order of the replicas, in one process; tests/workers/test_ordered_sums.py has those over workers."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import process, xla

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
ROWS = {"all": [[0, 1, 2, 3]], "pairs": [[0, 3], [2, 1]], "uneven": [[3, 1, 0], [2]]}


@pytest.fixture(autouse=True)
def ordered(monkeypatch):
    monkeypatch.setattr(process, "_ordered", [])
    monkeypatch.setenv("REPLICA_ENGINE_ORDERED_SUMS", "1")


def in_order(values, rows):
    """For each replica the sum over its group, one addition after the other; 16-bit floats are rounded once."""
    sums = [None] * len(values)
    for row in rows:
        wide = values if values.dtype.itemsize > 2 else values.astype(np.float32)
        total = wide[row[0]].copy()
        for replica in row[1:]:
            total += wide[replica]
        for replica in row:
            sums[replica] = total.astype(values.dtype)
    return np.stack(sums)


def random(shape, dtype="float32"):
    values = np.random.default_rng(0).standard_normal(shape) * 10.0 ** np.random.default_rng(1).integers(-3, 4, shape)
    return values.astype(DTYPES[dtype])


def bits(values):
    return np.ascontiguousarray(values).view(np.uint8).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_a_sum_is_made_in_the_order_of_the_replicas(rows, dtype):
    values = random((4, 3, 5), dtype)
    values[:, 0, 0] = -0.0
    groups = None if rows == "all" else ROWS[rows]
    sums = xla.replicate(lambda x: xla.all_reduce(x, "SUM", groups), [[each] for each in values])
    # A group that is not in order is added in the order in which it is given, unless sizes differ.
    expected = in_order(values, [sorted(row) for row in ROWS[rows]] if rows == "uneven" else ROWS[rows])
    assert bits(sums) == bits(expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_means_and_scattered_sums_are_too(dtype):
    values = random((4, 8, 3), dtype)
    means, parts = xla.replicate(lambda x: (xla.all_reduce(x, "MEAN"), xla.reduce_scatter(x)), [[x] for x in values])[0]
    total = in_order(values.astype(np.float32), ROWS["all"])[0]
    assert bits(means) == bits((total / 4).astype(values.dtype))
    assert bits(parts) == bits(total[:2].astype(values.dtype))


def test_complex_numbers_and_gradients_are_too():
    values = random((4, 6)) + 1j * random((4, 6))[:, ::-1].astype(np.complex64)

    def body(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.math.real(xla.all_gather(tf.reshape(x, [1, 6]))) ** 2 * tf.math.real(x))
        return xla.all_reduce(x), tape.gradient(loss, x)

    results = xla.replicate(body, [[each] for each in values.astype(np.complex64)])
    sums = np.stack([each[0] for each in results])
    assert bits(sums) == bits(in_order(values.astype(np.complex64), ROWS["all"]))


def test_what_has_no_order_is_reduced_as_ever():
    """Integers, minima and maxima; and a value without elements."""

    def body(x, n, none):
        return xla.all_reduce(x, "MAX"), xla.all_reduce(n), xla.all_reduce(none)

    arguments = [[np.float32([i, -i]), i, np.zeros([0], np.float32)] for i in range(4)]
    plan = xla.lower(body, arguments).compile().plan()
    assert {each.kind for each in plan.cost.collectives} == {"all-reduce"}
    found = xla.replicate(body, arguments)[0]
    assert [np.asarray(each).tolist() for each in found] == [[3.0, 0.0], 6, []]


def test_more_replicas_than_nine():
    values = random((16, 7))
    sums = xla.replicate(lambda x: xla.all_reduce(x), [[each] for each in values])
    assert bits(sums) == bits(in_order(values, [range(16)]))


@pytest.mark.parametrize("kind", ["threads", "compiled"])
def test_both_strategies_add_alike(kind):
    names = replica_engine.logical_devices(4)
    strategy = replica_engine.MirroredStrategy(names) if kind == "threads" else replica_engine.TPUStrategy(num_cores=4)
    values = random((4, 50_000))
    own = strategy.experimental_distribute_values_from_function(lambda of: values[of.replica_id_in_sync_group])
    sums = tf.function(lambda x: strategy.run(lambda y: tf.distribute.get_replica_context().all_reduce("SUM", y), [x]))
    assert bits(strategy.experimental_local_results(sums(own))) == bits(in_order(values, ROWS["all"]))


def test_the_switch_compiles_again_and_the_function_counts_before_the_variable():
    values = random((4, 1000))
    body = lambda x: xla.all_reduce(x)  # noqa: E731

    def kinds():
        return {each.kind for each in xla.lower(body, [[x] for x in values]).compile().plan().cost.collectives}

    assert kinds() == {"all-gather"}
    replica_engine.set_ordered_sums(False)
    assert kinds() == {"all-reduce"}
    replica_engine.set_ordered_sums()
    assert kinds() == {"all-gather"}
