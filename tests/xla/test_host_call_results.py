"""What host functions return: any structure of tensors, known from a trace or a declaration."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
from helpers.dtypes import NARROW, NUMBERS, dtype_of
from helpers.host_work import SCALAR, Point, on_two, values
from helpers.on_two import spread

from replica_engine import xla
from replica_engine.errors import HostResultError


def of_type(name):
    return tf.TensorSpec([], name)


RESULTS = {
    "a tuple": lambda x: (x, x + 1.0),
    "a list": lambda x: [x, [x + 1.0]],
    "an empty list": lambda x: [],
    "a dict": lambda x: {"b": x, "a": {"c": x * 2.0}},
    "a namedtuple": lambda x: Point(x, [None, x + 1.0]),
    "None in it": lambda x: (None, x, {"none": None}),
    "an array of no elements": lambda x: np.zeros([0, 3]),
    "constants": lambda x: (1, 2.5, [True]),
    "numbers": xla.returns((SCALAR, of_type("int32"), of_type("bool"), of_type("complex128")))(
        lambda x: (float(x), int(x), x > 1.0, complex(x))
    ),
    "an array": xla.returns(tf.TensorSpec([2], tf.float64))(lambda x: np.stack([x.numpy(), 1.0])),
    "numbers of NumPy": xla.returns((SCALAR, of_type("float64"), of_type("int8"), of_type("bool")))(
        lambda x: (x.numpy(), np.float64(x), np.int8(x), np.bool_(True))
    ),
}


def test_they_return_any_structure():
    body = lambda x: {name: xla.outside_compilation(fn, x) for name, fn in RESULTS.items()}  # noqa: E731
    for result, x in zip(on_two(body), [tf.constant(1.0), tf.constant(2.0)], strict=True):
        for name, fn in RESULTS.items():
            expected = tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), fn(x))
            assert values(result[name]) == values(expected), name
            both = (tf.nest.flatten(each) for each in (result[name], expected))
            dtypes = [[leaf.dtype for leaf in leaves if leaf is not None] for leaves in both]
            assert dtypes[0] == dtypes[1], name


def test_they_return_composite_tensors():
    def split(x):
        values = tf.stack([x])
        ragged = tf.RaggedTensor.from_row_lengths(tf.stack([x, 2.0, 3.0]), [1, 2])
        return ragged, tf.SparseTensor([[1]], values, [2]), tf.IndexedSlices(values, tf.constant([3]))

    def body(x):
        ragged, sparse, slices = xla.outside_compilation(split, x)
        return ragged, sparse, slices, tf.reduce_sum(ragged.values), sparse.values * 2.0

    for result, x in zip(on_two(body), [1.0, 2.0], strict=True):
        ragged, sparse, slices, total, twice = result
        assert ragged.to_list() == [[x], [2.0, 3.0]]
        assert tf.sparse.to_dense(sparse).numpy().tolist() == [0.0, x]
        assert (slices.values.numpy().tolist(), slices.indices.numpy().tolist()) == ([x], [3])
        assert (float(total), values(twice)) == (x + 5.0, [2.0 * x])


def test_without_a_declaration_they_are_traced_and_not_called():
    modes = collections.deque()

    def add_one(x):
        modes.append(tf.executing_eagerly())
        return x + 1.0

    assert values(on_two(lambda x: xla.outside_compilation(add_one, x))) == [2.0, 3.0]
    assert list(modes) == [False, True, True]


def test_what_is_declared_is_not_called_while_tracing():
    seen = []

    @xla.returns({"a": [SCALAR, tf.TensorSpec([2], tf.int32)], "b": None})
    def fn(x):
        seen.append(float(x))
        return {"a": [x.numpy(), np.array([x, 1], np.int32)], "b": None}

    body = lambda x: xla.outside_compilation(fn, x)  # noqa: E731
    xla.lower(body, [[tf.constant(1.0)]])
    assert seen == []
    assert values(on_two(body)) == [{"a": [x, [int(x), 1]], "b": None} for x in (1.0, 2.0)]
    assert sorted(seen) == [1.0, 2.0]


class Declared:
    def __init__(self, modes):
        self.modes = modes

    @xla.returns(SCALAR)
    def add_one(self, x):
        self.modes.append(tf.executing_eagerly())
        return x + 1.0

    __call__ = add_one


DECLARED = {
    "a method": lambda fn: fn.add_one,
    "an object": lambda fn: fn,
    "a partial": lambda fn: functools.partial(fn.add_one),
    "a method declared later": lambda fn: xla.returns(SCALAR)(fn.add_one),
}


@pytest.mark.parametrize("kind", DECLARED.values(), ids=DECLARED)
def test_what_is_declared_of_any_callable_is_known(kind):
    modes = collections.deque()
    fn = kind(Declared(modes))
    assert values(on_two(lambda x: xla.outside_compilation(fn, x))) == [2.0, 3.0]
    assert list(modes) == [True, True]


def test_the_order_of_keys_in_a_result_is_of_no_account():
    fn = xla.returns({"a": SCALAR, "b": SCALAR})(lambda x: {"b": x * 10.0, "a": x})
    assert values(on_two(lambda x: xla.outside_compilation(fn, x))) == [{"a": x, "b": 10.0 * x} for x in (1.0, 2.0)]


def test_declared_results_take_what_numpy_makes_of_them():
    fn = xla.returns(tf.TensorSpec([], tf.int64))(lambda x: np.argmax([x, 1.5]))
    assert values(on_two(lambda x: xla.outside_compilation(fn, x))) == [1, 0]


def test_every_dtype_goes_there_and_back():
    dtypes = [dtype_of(name) for name in ("bool", *NUMBERS, *NARROW)]
    sent = [[np.array([0, 1, 1, 0, i]).astype(dtype.as_numpy_dtype) for dtype in dtypes] for i in range(2)]
    seen = {}

    def look(number, vector, scalar, empty):
        assert vector.dtype == scalar.dtype == empty.dtype == dtypes[number]
        assert (vector.shape, scalar.shape, empty.shape) == ((5,), (), (0, 2))
        seen[int(xla.replica_id()), number] = vector.numpy().tobytes() + scalar.numpy().tobytes()
        return vector, scalar, empty

    def body(*parts):
        found = []
        for number, (dtype, part) in enumerate(zip(dtypes, parts, strict=True)):
            declared = xla.returns(tuple(tf.TensorSpec(shape, dtype) for shape in ([5], [], [0, 2])))(look)
            found.append(xla.outside_compilation(declared, number, *part))
        return found

    inputs = [[(part, tf.constant(part[-1]), part[:0].reshape(0, 2)) for part in parts] for parts in sent]
    for replica, results in enumerate(xla.replicate(body, inputs)):
        for number, (dtype, part) in enumerate(zip(dtypes, sent[replica], strict=True)):
            vector, scalar, empty = results[number]
            assert seen[replica, number] == part.tobytes() + part[-1].tobytes(), dtype
            assert vector.dtype == scalar.dtype == empty.dtype == dtype
            assert vector.numpy().tobytes() == part.tobytes(), dtype
            assert scalar.numpy().tobytes() == part[-1].tobytes(), dtype
            assert empty.shape == (0, 2)


def test_large_arrays_go_there_and_back():
    x = np.random.default_rng(0).normal(size=[2, 1000, 1000])
    results = xla.replicate(lambda x: xla.outside_compilation(lambda x: x[::-1], x), [[part] for part in x])
    np.testing.assert_array_equal(results, x[:, ::-1])


def test_tensors_that_are_kept_stay_as_they_were():
    kept = []

    def keep(x):
        kept.append(x)
        return x * 2.0

    keep = xla.returns(tf.TensorSpec([10_000], tf.float32))(keep)

    def body(x):
        for _ in tf.range(3):
            x = xla.outside_compilation(keep, x) + 1.0
        return x

    for start in range(3):
        xla.replicate(body, [[tf.fill([10_000], float(start))]])
    firsts = [start * 2**i + 2**i - 1 for start in range(3) for i in range(3)]
    assert [sorted(set(x.numpy())) for x in kept] == [[first] for first in firsts]


def test_a_result_that_contains_itself_is_refused():
    def circle(x):
        found = [x]
        found.append(found)
        return found

    with pytest.raises(HostResultError, match="contains itself"):
        xla.replicate(lambda x: xla.outside_compilation(circle, x), inputs=[[1.0]])


def test_replicas_with_shares_of_different_sizes_reach_one_call_twice(two):
    size = xla.returns(tf.TensorSpec([], tf.float32))(lambda x: np.float32(x.shape[0]))

    @tf.function
    def inner(x):
        return xla.outside_compilation(size, x)

    shares = spread(two, lambda i: tf.ones([i + 1]))
    result = two.run(lambda x: inner(x) + inner(x), args=(shares,))
    assert [float(each) for each in two.experimental_local_results(result)] == [2.0, 4.0]
