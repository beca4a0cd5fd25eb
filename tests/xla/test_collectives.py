"""Cross-replica operations, against NumPy: a value of N replicas is an array whose first dimension is the replica."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from replica_engine import xla
from replica_engine.errors import CollectiveError
from replica_engine.pjrt import executable
from replica_engine.pjrt.stablehlo import markers

SIZES = (1, 4)
SHAPE = (4, 8)
HALVES = [[0, 2], [3, 1]]

# Each operation: what the body does, and the same of all replicas' values at once.
OPERATIONS = {
    "cross_replica_sum": (xla.cross_replica_sum, lambda x: everywhere(x, x.sum(0))),
    "sum": (lambda x: xla.all_reduce(x), lambda x: everywhere(x, x.sum(0))),
    "mean": (lambda x: xla.all_reduce(x, "MEAN"), lambda x: everywhere(x, x.mean(0))),
    "min": (lambda x: xla.all_reduce(x, "min"), lambda x: everywhere(x, x.min(0))),
    "max": (lambda x: xla.all_reduce(x, "MAX"), lambda x: everywhere(x, x.max(0))),
    "ReduceOp.SUM": (lambda x: xla.all_reduce(x, tf.distribute.ReduceOp.SUM), lambda x: everywhere(x, x.sum(0))),
    "ReduceOp.MEAN": (lambda x: xla.all_reduce(x, tf.distribute.ReduceOp.MEAN), lambda x: everywhere(x, x.mean(0))),
    "gather": (xla.all_gather, lambda x: everywhere(x, np.concatenate(x, 0))),
    "gather along 1": (lambda x: xla.all_gather(x, axis=1), lambda x: everywhere(x, np.concatenate(x, 1))),
    "gather along -2": (lambda x: xla.all_gather(x, -2), lambda x: everywhere(x, np.concatenate(x, 0))),
    "exchange 0 1": (lambda x: xla.all_to_all(x, 0, 1), lambda x: exchanged(x, 0, 1)),
    "exchange 1 0": (lambda x: xla.all_to_all(x, split_axis=1, concat_axis=0), lambda x: exchanged(x, 1, 0)),
    "exchange -1 -1": (lambda x: xla.all_to_all(x, -1, -1), lambda x: exchanged(x, 1, 1)),
    "scatter": (xla.reduce_scatter, lambda x: np.stack(np.split(x.sum(0), len(x), 0))),
    "scatter along -1": (lambda x: xla.reduce_scatter(x, -1), lambda x: np.stack(np.split(x.sum(0), len(x), -1))),
    "permute": (lambda x: xla.collective_permute(x, ring()), lambda x: np.roll(x, 1, 0)),
    "ppermute": (lambda x: xla.ppermute(x, ring()), lambda x: np.roll(x, 1, 0)),
    "permute some": (
        lambda x: xla.ppermute(x, ring()[1:]),
        lambda x: np.concatenate([x[-1:] * 0, x])[: len(x)] + first(x),
    ),
    "permute none": (lambda x: xla.ppermute(x, []), np.zeros_like),
}

# The same in two groups of four replicas; `grouped` does each group by itself.
IN_GROUPS = {
    "sum": (lambda x: xla.cross_replica_sum(x, HALVES), "sum"),
    "mean": (lambda x: xla.all_reduce(x, "MEAN", HALVES), "mean"),
    "min": (lambda x: xla.all_reduce(x, "MIN", groups=HALVES), "min"),
    "max": (lambda x: xla.all_reduce(x, "MAX", groups=HALVES), "max"),
    "gather": (lambda x: xla.all_gather(x, groups=HALVES), "gather"),
    "gather along 1": (lambda x: xla.all_gather(x, 1, HALVES), "gather along 1"),
    "scatter": (lambda x: xla.reduce_scatter(x, groups=HALVES), "scatter"),
    "exchange 0 1": (lambda x: xla.all_to_all(x, 0, 1, HALVES), "exchange 0 1"),
    "exchange -1 -1": (lambda x: xla.all_to_all(x, -1, -1, groups=HALVES), "exchange -1 -1"),
}


def ring():
    return [(i, (i + 1) % xla.num_replicas()) for i in range(xla.num_replicas())]


def everywhere(x, result):
    """All replicas have the result."""
    return np.stack([result] * len(x))


def exchanged(x, split, concat):
    n = len(x)
    parts = [np.split(each, n, split) for each in x]
    return np.stack([np.concatenate([parts[source][target] for source in range(n)], concat) for target in range(n)])


def first(x):
    """`ring()[1:]` lacks the link from replica 0 to 1, and to itself if there is no other: nothing arrives there."""
    correction = np.zeros_like(x)
    if len(x) > 1:
        correction[0] = x[-1]
        correction[1] = -x[0]
    return correction


def grouped(reference, groups):
    """A reference, applied to each group by itself."""

    def apply(x):
        results = [None] * len(x)
        for group in groups:
            for replica, result in zip(group, reference(x[group]), strict=True):
                results[replica] = result
        return np.stack(results)

    return apply


def example(n, shape=SHAPE):
    return np.random.default_rng(7).normal(size=(n, *shape))


def replicated(fn, *arrays):
    """`fn` on one replica for each row of the arrays; its results as one array."""
    return np.stack([result.numpy() for result in xla.replicate(fn, list(zip(*arrays, strict=True)))])


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_it_does_what_numpy_does(name, n):
    operation, reference = OPERATIONS[name]
    x = example(n)
    np.testing.assert_allclose(replicated(operation, x), reference(x), rtol=1e-12)


@pytest.mark.parametrize("name", IN_GROUPS)
def test_it_does_so_in_each_group(name):
    operation, like = IN_GROUPS[name]
    x = example(4)
    np.testing.assert_allclose(replicated(operation, x), grouped(OPERATIONS[like][1], HALVES)(x), rtol=1e-12)


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX"])
@pytest.mark.parametrize("groups", [[[0], [1], [2], [3]], [[0], [1, 2, 3]], [[3], [2, 0], [1]]])
def test_groups_of_a_reduction_may_be_of_any_sizes(op, groups):
    x = example(4)
    reference = grouped(OPERATIONS[op.lower()][1], groups)
    np.testing.assert_allclose(replicated(lambda x: xla.all_reduce(x, op, groups), x), reference(x), rtol=1e-12)


@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8"])
def test_groups_of_any_sizes_on_tpus(monkeypatch, op, dtype):
    """libtpu refuses groups of different sizes. What it gets in their place runs here too."""
    monkeypatch.setattr(executable, "expand_markers", lambda program, platform: markers.expand_markers(program, "tpu"))
    x = (np.arange(24) - (0 if dtype == "uint8" else 12)).reshape(4, 3, 2).astype(dtype)
    found = replicated(lambda x: xla.all_reduce(x, op, [[3], [2, 0, 1]]), x)
    some = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max}[op](x[:3], 0)
    whole = np.floor(some) if dtype[0] in "iu" else some
    np.testing.assert_allclose(found, np.stack([*[whole] * 3, x[3]]).astype(dtype), rtol=1e-6)


def test_the_order_in_a_group_is_the_order_of_what_is_gathered():
    results = xla.replicate(lambda x: xla.all_gather(x, groups=[[1, 0]]), [[[1]], [[2]]])
    assert [result.numpy().tolist() for result in results] == [[2, 1]] * 2


@pytest.mark.parametrize("axis", [0, -1])
def test_scalars_are_gathered_to_a_vector(axis):
    results = xla.replicate(lambda x: xla.all_gather(x, axis), [[1.0], [2.0], [3.0]])
    assert [result.numpy().tolist() for result in results] == [[1.0, 2.0, 3.0]] * 3


@pytest.mark.parametrize("name", ["sum", "max", "permute"])
def test_scalars_meet(name):
    operation, reference = OPERATIONS[name]
    x = np.array([3.0, 1.0, 2.0])
    np.testing.assert_array_equal(replicated(operation, x), reference(x))


def test_python_numbers_and_lists_are_taken():
    results = xla.replicate(lambda: [xla.cross_replica_sum(2.0), xla.all_gather([1, 2])], num_replicas=2)
    assert [[part.numpy().tolist() for part in result] for result in results] == [[4.0, [1, 2, 1, 2]]] * 2


@pytest.mark.parametrize("values", [[1, 2], [-1, -2], [7, 0]])
def test_the_mean_of_integers_is_rounded_down(values):
    """As `//` and tf.reduce_mean of positive ones do."""
    results = xla.replicate(lambda x: xla.all_reduce(x, "MEAN"), [[value] for value in values])
    assert [int(result) for result in results] == [sum(values) // 2] * 2
    assert results[0].dtype == tf.int32


@pytest.mark.parametrize(
    "dtype",
    ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float64"],
)
def test_every_kind_of_number_is_reduced(dtype):
    x = tf.cast(tf.constant([[1, 5], [4, 2]]), dtype)
    reduced = lambda x: [xla.all_reduce(x, op) for op in ("SUM", "MIN", "MAX")]  # noqa: E731
    for results in xla.replicate(reduced, [[x[0]], [x[1]]]):
        assert [result.dtype for result in results] == [dtype] * 3
        assert [tf.cast(result, tf.int32).numpy().tolist() for result in results] == [[5, 7], [1, 2], [4, 5]]


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_are_summed(dtype):
    results = xla.replicate(xla.cross_replica_sum, [[tf.constant([1 + 2j], dtype)], [tf.constant([3 - 1j], dtype)]])
    assert [result.numpy().tolist() for result in results] == [[4 + 1j]] * 2
    assert results[0].dtype == dtype


def test_integers_of_64_bits_are_summed_exactly():
    results = xla.replicate(xla.cross_replica_sum, [[np.int64(2**60)], [np.int64(1)]])
    assert [int(result) for result in results] == [2**60 + 1] * 2


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "bfloat16", "complex64", "float64"])
def test_every_dtype_is_moved(dtype):
    moves = [OPERATIONS[name] for name in ("gather", "permute", "exchange -1 -1")]
    x = np.arange(16).reshape(2, 2, 4) % 3
    results = xla.replicate(lambda x: [operation(x) for operation, _ in moves], [[tf.cast(part, dtype)] for part in x])
    for i, (_, reference) in enumerate(moves):
        for result, expected in zip(results, reference(x), strict=True):
            assert result[i].dtype == dtype
            np.testing.assert_array_equal(result[i], tf.cast(expected, dtype))


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 2)])
def test_nothing_can_be_reduced_gathered_and_sent(shape):
    def fn(x):
        gathered = [xla.all_gather(x, axis) for axis in range(len(shape))]
        return [xla.cross_replica_sum(x), *gathered, xla.ppermute(x, [(0, 1)])]

    shapes = [result.shape.as_list() for result in xla.replicate(fn, [[tf.zeros(shape)]] * 2)[1]]
    gathered = [[2 * size if axis == i else size for i, size in enumerate(shape)] for axis in range(len(shape))]
    assert shapes == [list(shape), *gathered, list(shape)]


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_nan_is_not_lost_in_an_extreme(op):
    """As in tf.reduce_max and np.maximum, on any replica."""
    nan = float("nan")
    for result in xla.replicate(lambda x: xla.all_reduce(x, op), [[[1.0, nan, 3.0]], [[nan, 2.0, 3.0]]]):
        np.testing.assert_array_equal(result, [nan, nan, 3.0])


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_all_replicas_get_the_same_bits(op, n):
    """Floating-point sums depend on their order: all replicas' must have the same."""
    generator = np.random.default_rng(1)
    x = (generator.normal(size=(n, 1000)) * 10.0 ** generator.integers(-6, 6, size=(n, 1000))).astype(np.float32)
    results = replicated(lambda x: xla.all_reduce(x, op), x)
    assert len({result.tobytes() for result in results}) == 1
    reference = x.astype(np.float64).sum(0) / (n if op == "MEAN" else 1)
    np.testing.assert_allclose(results[0], reference, rtol=1e-3, atol=1e-2)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(order=st.permutations(range(4)))
def test_the_reverse_permutation_brings_everything_back(order):
    there = list(enumerate(order))
    back = [(target, source) for source, target in there]
    x = example(4, (3,))
    sent, returned = (
        np.stack(column)
        for column in zip(
            *xla.replicate(functools.partial(there_and_back, there, back), [[part] for part in x]), strict=True
        )
    )
    np.testing.assert_array_equal(sent[list(order)], x)
    np.testing.assert_array_equal(returned, x)


def there_and_back(there, back, x):
    sent = xla.ppermute(x, there)
    return sent, xla.ppermute(sent, back)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    axes=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    n=st.sampled_from([2, 3]),
)
def test_the_reverse_exchange_brings_everything_back(shape, axes, n):
    split, concat = (axis % len(shape) for axis in axes)
    shape = [size * n if axis == split else size for axis, size in enumerate(shape)]
    x = example(n, shape)
    results = replicated(lambda x: xla.all_to_all(xla.all_to_all(x, split, concat), concat, split), x)
    np.testing.assert_array_equal(results, x)


class TestInsideControlFlow:
    """The operation is in a branch, a loop or a function of the body."""

    NAMES = ("sum", "max", "gather", "exchange 1 0", "permute")

    @pytest.mark.parametrize("name", NAMES)
    def test_cond(self, name):
        operation, reference = OPERATIONS[name]
        x = example(2)

        def fn(x, condition):
            return tf.cond(condition, lambda: tf.reduce_sum(operation(x) ** 2), lambda: tf.reduce_sum(x))

        taken, other = (replicated(fn, x, np.array([condition] * 2)) for condition in (True, False))
        np.testing.assert_allclose(taken, (reference(x) ** 2).sum((1, 2)), rtol=1e-12)
        np.testing.assert_allclose(other, x.sum((1, 2)), rtol=1e-12)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("loop", ["tf.while_loop", "tf.range"])
    def test_loops(self, name, loop):
        operation, reference = OPERATIONS[name]
        step = lambda x: 0.5 * tf.reshape(operation(x), [-1, *SHAPE])[0] + 1.0  # noqa: E731
        with_while = lambda x: tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, step(x)), (0, x))[1]  # noqa: E731

        def with_range(x):
            for _ in tf.range(3):
                x = step(x)
            return x

        x = expected = example(2)
        for _ in range(3):
            expected = 0.5 * reference(expected).reshape(2, -1, *SHAPE)[:, 0] + 1.0
        result = replicated(with_while if loop == "tf.while_loop" else with_range, x)
        np.testing.assert_allclose(result, expected, rtol=1e-12)

    @pytest.mark.parametrize("jit_compile", [None, True])
    def test_nested_functions(self, jit_compile):
        inner = tf.function(xla.cross_replica_sum, jit_compile=jit_compile)
        for n in (2, 3):  # the same function, for another number of replicas
            x = example(n)
            np.testing.assert_allclose(
                replicated(lambda x: inner(inner(x)), x), everywhere(x, n * x.sum(0)), rtol=1e-12
            )

    def test_switch_case_and_map_fn(self):
        def fn(x):
            swapped = tf.switch_case(tf.constant(1), [lambda: x, lambda: xla.ppermute(x, [(0, 1), (1, 0)])])
            return tf.map_fn(xla.cross_replica_sum, x) + swapped

        x = example(2)
        np.testing.assert_allclose(replicated(fn, x), x.sum(0) + x[::-1], rtol=1e-12)


def test_a_permutation_needs_a_shape_that_is_known():
    fn = lambda x: xla.collective_permute(tf.boolean_mask(x, x > 0.0), [(0, 1), (1, 0)])  # noqa: E731
    with pytest.raises(
        CollectiveError, match=r"collective_permute at .*test_collectives.py.* needs a shape that is known"
    ):
        replicated(fn, example(2))
