"""Host work inside a compiled body: Python and TensorFlow, once for each replica and execution."""

import collections

import pytest
import tensorflow as tf
from helpers.host_work import SCALAR, Point, noting, on_two, values

from replica_engine import xla


@pytest.mark.parametrize(
    "run", ["replicate", "replicate in a function", "strategy.run", "strategy.run in a function"], indirect=True
)
def test_functions_run_on_the_host_with_concrete_tensors(run):
    @xla.returns(tf.TensorSpec([], tf.int32))
    def hexadecimal(x):
        assert tf.executing_eagerly()
        return int(f"{int(x.numpy()):x}")

    body = lambda x: xla.outside_compilation(hexadecimal, x * 2) + 1  # noqa: E731
    assert values(run(body, 8, 16)) == [11, 21]
    assert values(run(body, 16, 24)) == [21, 31]


@pytest.mark.parametrize("n", [1, 4])
def test_they_run_once_for_each_replica_and_execution(n):
    calls = collections.defaultdict(list)
    add_ten = noting(calls)
    body = lambda x: xla.outside_compilation(add_ten, x)  # noqa: E731
    for start in (0.0, 100.0):
        results = xla.replicate(body, [[tf.constant(start + i)] for i in range(n)])
        assert values(results) == [start + i + 10.0 for i in range(n)]
    assert calls == {i: [i, 100.0 + i] for i in range(n)}


def test_outside_a_body_they_just_run():
    calls = []

    def half(x, by=2):
        calls.append(tf.executing_eagerly())
        return x / by, "any object", calls

    assert xla.outside_compilation(half, 3.0) == (1.5, "any object", calls)
    assert xla.outside_compilation(half, 3.0, by=3)[0] == 1.0
    assert float(tf.function(lambda x: xla.outside_compilation(half, x)[0])(tf.constant(3.0))) == 1.5
    assert calls == [True, True, False]


def test_a_compiled_body_calls_them_too():
    calls = {0: [], 1: []}
    add_ten = noting(calls)
    inputs = [[tf.constant(1.0)], [tf.constant(2.0)]]
    compiled = xla.lower(lambda x: xla.outside_compilation(add_ten, x), inputs).compile()
    for _ in range(2):
        assert values(compiled(inputs)) == [11.0, 12.0]
    assert calls == {0: [1.0] * 2, 1: [2.0] * 2}


def test_replicas_with_shares_of_different_shapes_call_with_their_own(two, run_with):
    seen = {}

    @xla.returns(tf.TensorSpec([], tf.int32))
    def look(x):
        seen[int(xla.replica_id())] = x.numpy().tolist()
        return int(x.numpy().sum())

    body = lambda x: xla.outside_compilation(look, x)  # noqa: E731
    assert values(run_with(two)(body, tf.constant([1, 2]), tf.constant([3, 4, 5]))) == [3, 12]
    assert seen == {0: [1, 2], 1: [3, 4, 5]}


def test_structures_arrive_as_they_are():
    seen = []

    def look(*args, **kwargs):
        seen.append(
            tf.nest.map_structure(lambda leaf: leaf.numpy().tolist() if tf.is_tensor(leaf) else leaf, (args, kwargs))
        )

    def body(x):
        point = Point(x, [x + 1.0, None])
        xla.outside_compilation(look, point, {"text": "text"}, 5, flag=True, nest=({"x": x},))

    xla.replicate(body, [[tf.constant(1.0)]])
    assert seen == [((Point(1.0, [2.0, None]), {"text": "text"}, 5), {"flag": True, "nest": ({"x": 1.0},)})]


def as_slices(x):
    return tf.IndexedSlices(x, tf.range(2))


def as_ragged(x):
    return tf.RaggedTensor.from_row_splits(x, tf.constant([0, 2, 2]))


def as_sparse(x):
    return tf.SparseTensor(tf.constant([[0, 0], [1, 1]], tf.int64), x, [2, 2])


def test_composite_tensors_arrive_whole():
    kinds = (as_slices, as_ragged, as_sparse)

    def body(x):
        closed_over = [make(x) for make in kinds]

        @xla.returns([SCALAR] * 3)
        def total(arguments):
            for make, argument, other in zip(kinds, arguments, closed_over, strict=True):
                assert type(argument) is type(other) is type(make(tf.zeros([2])))
            pairs = zip(arguments, closed_over, strict=True)
            return [sum(float(tf.reduce_sum(each.values)) for each in pair) for pair in pairs]

        return xla.outside_compilation(total, [make(10.0 * x) for make in kinds])

    assert values(on_two(body, [1.0, 2.0], [3.0, 4.0])) == [[33.0] * 3, [77.0] * 3]


def test_functions_written_in_a_converted_body_run_as_they_are_written():
    kinds = collections.deque()

    def body(x):
        if x > 0.0:  # AutoGraph converts the body, and what is defined in it
            x += 1.0

        @xla.returns(SCALAR)
        def fn(x):
            kinds.append((type(int(x)), type(len([x])), x > 1.0 and "yes"))
            for i in range(int(x)):
                if i > 2:
                    break
                x = x + 1.0 if x.numpy() else None
            while x < 10.0:
                x *= 2.0
            return x

        return xla.outside_compilation(fn, x)

    assert values(xla.replicate(body, [[tf.constant(3.0)]])) == [14.0]
    assert list(kinds) == [(int, int, "yes")]


def test_helpers_and_lambdas_in_a_converted_body_too():
    def body(x):
        one = lambda x: int(x) + 1  # noqa: E731

        def helper(x):
            return one(x) * [2, 3][int(x) % 2]

        fn, other = (lambda x: helper(x)), (lambda y: helper(y) + 1)
        declare = xla.returns(tf.TensorSpec([], tf.int32))
        return xla.outside_compilation(declare(fn), x) + xla.outside_compilation(declare(other), x)

    assert values(on_two(body, 3, 4)) == [12 + 13, 10 + 11]


def tenfold_tensor():
    return xla.replica_id() * 10


@xla.returns(tf.TensorSpec([], tf.int32))
def tenfold_number():
    return int(xla.replica_id()) * 10


@xla.returns(tf.TensorSpec([], tf.int32))
def tenfold_array():
    return xla.replica_id().numpy() * 10


@pytest.mark.parametrize("fn", [tenfold_tensor, tenfold_number, tenfold_array])
def test_the_replica_is_known(fn):
    sizes = collections.deque()

    def note():
        sizes.append(xla.num_replicas())

    def body():
        xla.outside_compilation(note)
        return xla.outside_compilation(fn)

    assert values(xla.replicate(body, num_replicas=4)) == [0, 10, 20, 30]
    assert list(sizes) == [4] * 4
