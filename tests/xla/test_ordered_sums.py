"""Sums in the order of the replicas, in one process; tests/workers/test_ordered_sums.py has those over workers."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import replica_engine
from replica_engine import process, xla
from replica_engine.errors import InputsError

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
ROWS = {"all": [[0, 1, 2, 3]], "pairs": [[0, 3], [2, 1]], "uneven": [[3, 1, 0], [2]]}


@pytest.fixture(autouse=True)
def ordered(monkeypatch):
    monkeypatch.setattr(process, "_ordered", [])
    monkeypatch.setenv("REPLICA_ENGINE_ORDERED_SUMS", "1")


def in_order(values, rows):
    """For each replica the sum over its group, as `add_n` adds; 16-bit floats are rounded once."""
    sums = [None] * len(values)
    for row in map(sorted, rows):
        wide = values if values.dtype.itemsize > 2 else values.astype(np.float32)
        total = process.ordered_sum([wide[replica] for replica in row], np.add)
        for replica in row:
            sums[replica] = total.astype(values.dtype)
    return np.stack(sums)


def test_the_order():
    """One after the other up to nine; then the rest of eight, or of eight and one, and sums of eight."""
    shown = {count: process.ordered_sum("abcdefghijklmnopqrs"[:count], "({}+{})".format) for count in (1, 4, 9, 10, 17)}
    assert shown[1] == "a"
    assert shown[4] == "(((a+b)+c)+d)"
    assert shown[9] == "((((((((a+b)+c)+d)+e)+f)+g)+h)+i)"
    assert shown[10] == "((a+b)+(((((((c+d)+e)+f)+g)+h)+i)+j))"
    assert shown[17] == f"({shown[9]}+(((((((j+k)+l)+m)+n)+o)+p)+q))"


@pytest.mark.parametrize("count", [1, 3, 9, 10, 17, 33])
def test_the_order_is_that_of_add_n(count):
    values = random((count, 1000))
    assert bits(process.ordered_sum([*values], np.add)) == bits(tf.add_n([*values]))


def test_other_values_are_errors(monkeypatch):
    """They would be taken for the opposite of what they say."""
    with pytest.raises(InputsError, match="takes True or False; got 'false'"):
        replica_engine.set_ordered_sums("false")
    for value, is_on in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("REPLICA_ENGINE_ORDERED_SUMS", value)
        assert process.sums_are_ordered() == is_on
    monkeypatch.setenv("REPLICA_ENGINE_ORDERED_SUMS", "true")
    with pytest.raises(InputsError, match=r"REPLICA_ENGINE_ORDERED_SUMS is 'true'. Write 1"):
        xla.replicate(lambda x: xla.cross_replica_sum(x) * 3, [[1.0], [2.0]])


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
    assert bits(sums) == bits(in_order(values, ROWS[rows]))


@pytest.mark.parametrize("count", [3, 7, 9, 17])
@pytest.mark.parametrize("size", [1000, 30_000])
def test_so_is_one_of_many_replicas_and_its_mean(size, count):
    """XLA adds a reduction of five and more in blocks, by its size, and multiplies by 1 / 3 in place of a division."""
    values = random((count, size))
    found = xla.replicate(lambda x: [xla.all_reduce(x), xla.all_reduce(x, "MEAN")], [[each] for each in values])
    total = in_order(values, [range(count)])
    assert bits([each[0] for each in found]) == bits(total)
    assert bits([each[1] for each in found]) == bits(total / np.float32(count))


def test_so_is_a_value_that_xla_knows():
    sums = xla.replicate(lambda: xla.all_reduce(tf.fill([4], 0.1)), [[]] * 7)
    assert bits(sums) == bits(in_order(np.full((7, 4), 0.1, np.float32), [range(7)]))


@pytest.mark.parametrize("groups", [None, [[0, 2], [1, 3]], [[2, 0], [1, 3]]])
@pytest.mark.parametrize("axis", [0, 1])
def test_so_is_a_scattered_sum(axis, groups):
    values = random((4, 8, 4))
    parts = xla.replicate(lambda x: xla.reduce_scatter(x, axis, groups), [[each] for each in values])
    rows = groups or [range(4)]
    sums = in_order(values, rows)
    for row in rows:
        for place, replica in enumerate(row):
            assert bits(parts[replica]) == bits(np.split(sums[replica], len(row), axis)[place])


def test_a_mean_of_16_bits_is_rounded_once():
    values = random((3, 1000), "bfloat16")
    means = xla.replicate(lambda x: xla.all_reduce(x, "MEAN"), [[each] for each in values])
    wide = in_order(values.astype(np.float32), [range(3)])
    assert bits(means) == bits((wide / np.float32(3)).astype(values.dtype))


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


@pytest.mark.parametrize(("kind", "count"), [("threads", 4), ("threads", 8), ("compiled", 8), ("compiled", 10)])
def test_both_strategies_add_alike(kind, count):
    if kind == "threads":
        strategy = replica_engine.MirroredStrategy(replica_engine.logical_devices(count))
    else:
        strategy = replica_engine.TPUStrategy(num_cores=count)
    values = random((count, 50_000))
    own = strategy.experimental_distribute_values_from_function(lambda of: values[of.replica_id_in_sync_group])
    sums = tf.function(lambda x: strategy.run(lambda y: tf.distribute.get_replica_context().all_reduce("SUM", y), [x]))
    expected = in_order(values, [range(count)])
    assert bits(strategy.experimental_local_results(sums(own))) == bits(expected)
    assert bits(strategy.reduce("SUM", own, axis=None)) == bits(expected[0])
    assert bits(strategy.reduce("MEAN", own, axis=None)) == bits(expected[0] / np.float32(count))


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
