"""Host work inside a compiled body: Python and TensorFlow, once for each replica each time the body comes by."""

import collections
import functools
import threading

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy, xla
from replica_engine.errors import HostAccessError, HostResultError, NestedHostCallError, NotInBodyError

Point = collections.namedtuple("Point", ["x", "y"])

SCALAR = tf.TensorSpec([], tf.float32)


def values(results):
    """Tensors as plain Python values, all else as it is."""
    plain = lambda value: value.numpy().tolist() if tf.is_tensor(value) else value  # noqa: E731
    return tf.nest.map_structure(plain, results)


def noting(calls, replica=None):
    """A host function that adds 10, and notes for the replica that called it what it was called with."""

    @xla.returns(SCALAR)
    def add_ten(x):
        calls[int(xla.replica_id()) if replica is None else replica].append(float(x.numpy()))
        return x + 10.0

    return add_ten


def line_of(text):
    """The line of this file that ends in a comment."""
    with open(__file__) as file:
        numbers = [number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    return f"{__file__}:{numbers[0]}"


@pytest.fixture(params=["replicate", "replicate in a function", "strategy.run", "strategy.run in a function"])
def run(request):
    """`run(body, *values)`: what the body makes of a value, for each of two replicas."""
    if request.param.startswith("replicate"):
        call = lambda body, *values: xla.replicate(body, [[value] for value in values])  # noqa: E731
    else:
        call = run_with(TPUStrategy(num_cores=2))
    if request.param.endswith("in a function"):
        return lambda body, *values: tf.function(call)(body, *map(tf.constant, values))
    return lambda body, *values: call(body, *map(tf.constant, values))


def run_with(strategy):
    def call(body, *values):
        # In a function the values are tensors of its graph, which a body can get only as arguments.
        spread = strategy.experimental_distribute_values_from_function(
            lambda context: values[context.replica_id_in_sync_group]
        )
        results = strategy.run(body, args=(spread,))
        return [each[0] for each in strategy.experimental_local_results([results])]

    return call


def on_two(body, first=1.0, second=2.0):
    """What a body makes of a tensor, on two replicas."""
    return xla.replicate(body, [[tf.constant(first)], [tf.constant(second)]])


# Where, and how often.


def test_functions_run_on_the_host_with_concrete_tensors(run):
    def hexadecimal(x):
        assert tf.executing_eagerly()
        return int(f"{int(x.numpy()):x}")

    body = lambda x: xla.outside_compilation(hexadecimal, x * 2) + 1  # noqa: E731
    assert values(run(body, 8, 16)) == [11, 21]
    assert values(run(body, 16, 24)) == [21, 31]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_they_run_once_for_each_replica_and_execution(n):
    calls = collections.defaultdict(list)
    add_ten = noting(calls)
    body = lambda x: xla.outside_compilation(add_ten, x)  # noqa: E731
    for start in (0.0, 100.0):
        results = xla.replicate(body, [[tf.constant(start + i)] for i in range(n)])
        assert values(results) == [start + i + 10.0 for i in range(n)]
    assert calls == {i: [i, 100.0 + i] for i in range(n)}


def in_a_loop(f):
    return lambda x: tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, xla.outside_compilation(f, x)), (0, x))


def in_a_loop_condition(f):
    return lambda x: tf.while_loop(lambda x: xla.outside_compilation(f, x) < 40.0, lambda x: (x * 2.0,), (x,))


def in_a_loop_and_its_condition(f):
    def body(x):
        while xla.outside_compilation(f, x) < 60.0:
            x = xla.outside_compilation(f, x * 2.0)
        return xla.outside_compilation(f, x)

    return body


def in_nested_loops(f):
    def body(x):
        for _ in tf.range(2):
            x = xla.outside_compilation(f, x)
            for _ in tf.range(2):
                x = xla.outside_compilation(f, x * 2.0)
        return x

    return body


def in_a_branch(f):
    return lambda x: tf.cond(x > 1.5, lambda: xla.outside_compilation(f, x), lambda: x * 3.0)


def in_both_branches(f):
    def body(x):
        y = xla.outside_compilation(f, x) if x > 1.5 else xla.outside_compilation(f, -x)
        return xla.outside_compilation(f, y)

    return body


def in_a_switch(f):
    def body(x):
        branches = [lambda: x, lambda: x, lambda: xla.outside_compilation(f, x), lambda: xla.outside_compilation(f, -x)]
        return tf.switch_case(tf.cast(x, tf.int32) + 1, branches)

    return body


def in_mapped_elements(f):
    return lambda x: tf.map_fn(lambda y: xla.outside_compilation(f, y), tf.stack([x, 2.0 * x, 3.0 * x]))


PLACES = {
    "a loop": in_a_loop,
    "a loop's condition": in_a_loop_condition,
    "a loop and its condition": in_a_loop_and_its_condition,
    "nested loops": in_nested_loops,
    "a branch": in_a_branch,
    "both branches": in_both_branches,
    "a switch": in_a_switch,
    "map_fn": in_mapped_elements,
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_they_run_where_and_as_often_as_in_eager_mode(place):
    """Also where replicas take different branches, and loop differently often."""
    calls, expected_calls = {0: [], 1: []}, {0: [], 1: []}
    results = on_two(place(noting(calls)))
    expected = [place(noting(expected_calls, replica))(tf.constant(x)) for replica, x in enumerate([1.0, 2.0])]
    assert values(results) == values(expected)
    assert calls == expected_calls


def test_they_run_in_nested_functions_between_collectives(run):
    calls = {0: [], 1: []}
    add_ten = noting(calls)
    inner = tf.function(lambda x: xla.outside_compilation(add_ten, x))
    middle = tf.function(lambda x: inner(x) + inner(2.0 * x))

    def body(x):
        for _ in tf.range(2):
            if xla.cross_replica_sum(x) < 1000.0:
                x = xla.cross_replica_sum(middle(x))
        return x

    assert values(run(body, 1.0, 2.0)) == [3.0 * 49.0 * 2.0 + 40.0] * 2
    assert calls == {0: [1.0, 2.0, 49.0, 98.0], 1: [2.0, 4.0, 49.0, 98.0]}


@pytest.mark.parametrize("in_function", [False, True])
def test_functions_without_results_run_too(in_function):
    calls = {0: [], 1: []}

    def note(x, name):
        calls[int(xla.replica_id())].append((name, float(x)))

    def body(x):
        for _ in tf.range(2):
            x += 10.0
            xla.outside_compilation(note, x, name="in the loop")
        xla.outside_compilation(note, x, "after it")

    run = tf.function(on_two) if in_function else on_two
    for _ in range(2):
        assert run(body) == [None, None]
    for replica in (0, 1):
        x = 1.0 + replica
        assert calls[replica] == [("in the loop", x + 10.0), ("in the loop", x + 20.0), ("after it", x + 20.0)] * 2


def test_each_replica_keeps_the_order_of_the_program():
    """Of calls that do not depend on each other."""
    calls = {0: [], 1: []}

    def note(name):
        calls[int(xla.replica_id())].append(name)

    def body(x):
        for name in range(5):
            xla.outside_compilation(note, name)
            for _ in tf.range(2):
                xla.outside_compilation(note, "loop")
        return x

    on_two(body)
    expected = [each for name in range(5) for each in (name, "loop", "loop")]
    assert calls == {0: expected, 1: expected}


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


def test_replicas_with_shares_of_different_shapes_call_with_their_own():
    strategy = TPUStrategy(num_cores=2)
    seen = {}

    @xla.returns(tf.TensorSpec([], tf.int32))
    def look(x):
        seen[int(xla.replica_id())] = x.numpy().tolist()
        return int(x.numpy().sum())

    def body(x):
        return xla.outside_compilation(look, x)

    assert values(run_with(strategy)(body, tf.constant([1, 2]), tf.constant([3, 4, 5]))) == [3, 12]
    assert seen == {0: [1, 2], 1: [3, 4, 5]}


# What goes in.


def add_one(x, *others, by=1.0):
    return x.numpy() + sum(float(other) for other in others) + by


def captures_in_a_function(x):
    y = x * 2.0
    return xla.outside_compilation(lambda: y.numpy() + 1.0)


def captures_in_structures(x):
    nest = {"a": [x, (Point(x * 0.5, "b"), 1.0)]}
    return xla.outside_compilation(lambda: nest["a"][0].numpy() + nest["a"][1][0].x.numpy() * 2.0 + nest["a"][1][1])


def captures_in_helpers(x):
    y = x * 2.0

    def inner():
        return y.numpy()

    def outer():
        def innermost():
            return inner()

        return innermost() + 1.0

    return xla.outside_compilation(outer)


def captures_in_defaults(x):
    def fn(y=x * 2.0, *, one=x * 0.0 + 1.0):
        return y.numpy() + one.numpy()

    return xla.outside_compilation(fn)


def captures_in_a_partial(x):
    return xla.outside_compilation(functools.partial(add_one, x, by=x + 1.0))


def captures_in_nested_partials(x):
    return xla.outside_compilation(functools.partial(functools.partial(add_one, x, x), by=1.0))


def captures_in_a_decorated_function(x):
    def doubled(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return 2.0 * fn(*args)

        return wrapper

    @doubled
    def fn():
        return x.numpy() + 0.5

    return xla.outside_compilation(fn)


def captures_in_a_tf_function(x):
    return xla.outside_compilation(tf.function(lambda: tf.strings.to_number(tf.strings.as_string(x * 2.0)) + 1.0))


def captures_in_a_callback(x):
    return xla.outside_compilation(lambda fn: fn().numpy() + 1.0, lambda: x * 2.0)


def captures_in_a_generator(x):
    return xla.outside_compilation(lambda: sum(each.numpy() for each in [x, x]) + 1.0)


def captures_in_a_function_that_calls_itself(x):
    def power(n):
        return x.numpy() if n == 0 else 2.0 * power(n - 1)

    return xla.outside_compilation(lambda: power(1) + 1.0)


def captures_in_functions_that_call_each_other(x):
    def even(n):
        return x.numpy() * 2.0 + 1.0 if n == 0 else odd(n - 1)

    def odd(n):
        return even(n - 1)

    return xla.outside_compilation(even, 2)


def captures_from_functions_around(x):
    return tf.function(lambda y: tf.cond(y > 0.0, lambda: xla.outside_compilation(add_one, y, x), lambda: y))(x)


CAPTURES = [value for name, value in globals().items() if name.startswith("captures_")]


@pytest.mark.parametrize("body", CAPTURES, ids=lambda body: body.__name__)
def test_they_get_tensors_of_the_body(body):
    for start in (1.0, 5.0):
        assert values(on_two(body, start, start + 1.0)) == [2.0 * start + 1.0, 2.0 * start + 3.0]


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


@pytest.mark.parametrize("declared", [False, True], ids=["tried with zeros", "declared"])
@pytest.mark.parametrize("make", [as_slices, as_ragged, as_sparse], ids=["IndexedSlices", "Ragged", "Sparse"])
def test_composite_tensors_arrive_whole(make, declared):
    def body(x):
        closed_over = make(x)

        def total(argument):
            assert type(argument) is type(closed_over) is type(make(tf.zeros([2])))
            return sum(float(tf.reduce_sum(each.values)) for each in (argument, closed_over))

        return xla.outside_compilation(xla.returns(SCALAR)(total) if declared else total, make(10.0 * x))

    assert values(on_two(body, [1.0, 2.0], [3.0, 4.0])) == [33.0, 77.0]


def test_their_own_variables_go_on_working():
    """`nonlocal`, in the body and around it."""
    counts = collections.deque()
    total = 0.0

    def add(x):
        nonlocal total
        total += float(x)

    def body(x):
        count = 0

        def fn():
            nonlocal count
            count += 1
            counts.append((count, float(x)))

        xla.outside_compilation(fn)
        xla.outside_compilation(fn)
        xla.outside_compilation(add, x)

    xla.replicate(body, [[tf.constant(1.0)]])
    assert list(counts) == [(1, 1.0), (2, 1.0)]
    assert total == 1.0
    xla.replicate(body, [[tf.constant(2.0)]])
    assert total == 3.0


@pytest.mark.parametrize("keep", ["a list", "a dict", "a number"])
def test_what_they_keep_for_themselves_compiles_nothing_anew(keep):
    seen, last, number = [], {}, 0

    def append(x):
        seen.append(float(x))

    def store(x):
        last["x"] = float(x)

    def count(x):
        nonlocal number
        number += int(x)

    fn = {"a list": append, "a dict": store, "a number": count}[keep]

    def body(x):
        xla.outside_compilation(fn, x)

    xla.replicate(body, [[tf.constant(1.0)]])
    before = xla.counts()
    for i in range(3):
        xla.replicate(body, [[tf.constant(float(i))]])
    assert (xla.counts() - before).compiles == 0
    assert {"a list": seen[1:], "a dict": last, "a number": number} == {
        "a list": [0.0, 1.0, 2.0] if fn is append else [],
        "a dict": {"x": 2.0} if fn is store else {},
        "a number": 4 if fn is count else 0,
    }


def test_what_a_trace_left_in_a_list_is_no_tensor_of_the_next_one():
    seen = []

    def twice(x):
        seen.append(x)
        return x * 2.0

    body = lambda x: xla.outside_compilation(twice, x)  # noqa: E731
    for x in ([1.0], [1.0, 2.0]):  # traced for each shape
        assert values(xla.replicate(body, [[tf.constant(x)]])) == [[2.0 * each for each in x]]


@pytest.mark.parametrize("kind", ["method", "object"])
def test_methods_and_objects_that_return_nothing_are_only_called(kind):
    class Meter:
        total = 0.0

        def add(self, x):
            self.total += float(x)

        __call__ = add

    meter = Meter()
    fn = meter if kind == "object" else meter.add
    for x in (2.0, 3.0):
        xla.replicate(lambda x: xla.outside_compilation(fn, x), [[tf.constant(x)]])
    assert meter.total == 5.0


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
        return xla.outside_compilation(fn, x) + xla.outside_compilation(other, x)

    assert values(on_two(body, 3, 4)) == [12 + 13, 10 + 11]


# What comes out.


RESULTS = {
    "a tuple": lambda x: (x, x + 1.0),
    "a list": lambda x: [x, [x + 1.0]],
    "an empty list": lambda x: [],
    "a dict": lambda x: {"b": x, "a": {"c": x * 2.0}},
    "a namedtuple": lambda x: Point(x, [None, x + 1.0]),
    "None in it": lambda x: (None, x, {"none": None}),
    "a number": lambda x: (float(x), int(x), x > 1.0, complex(x)),
    "an array": lambda x: np.stack([x.numpy(), 1.0]),
    "numbers of NumPy": lambda x: (x.numpy(), np.float64(x), np.int8(x), np.bool_(True)),
    "an array of no elements": lambda x: np.zeros([0, 3]),
    "constants": lambda x: (1, 2.5, [True]),
}


def test_they_return_any_structure():
    def body(x):
        return {name: xla.outside_compilation(fn, x) for name, fn in RESULTS.items()}

    for result, x in zip(on_two(body), [tf.constant(1.0), tf.constant(2.0)], strict=True):
        for name, fn in RESULTS.items():
            expected = tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.convert_to_tensor(leaf), fn(x))
            assert values(result[name]) == values(expected), name
            dtypes = [
                [leaf.dtype for leaf in tf.nest.flatten(each) if leaf is not None] for each in (result[name], expected)
            ]
            assert dtypes[0] == dtypes[1], name


def test_they_return_composite_tensors():
    def split(x):
        values = tf.constant([x.numpy()])
        ragged = tf.RaggedTensor.from_row_lengths([x.numpy(), 2.0, 3.0], [1, 2])
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


def test_what_cannot_be_traced_is_called_once_with_zeros():
    seen = collections.deque()

    def add_one(x):
        value = x.numpy()
        seen.append(value)
        return value + 1.0

    body = lambda x: xla.outside_compilation(add_one, x)  # noqa: E731
    for _ in range(2):
        assert values(on_two(body)) == [2.0, 3.0]
    assert seen.popleft() == 0.0
    assert sorted(seen) == [1.0, 1.0, 2.0, 2.0]


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


@pytest.mark.parametrize(
    "kind",
    {
        "a method": lambda fn: fn.add_one,
        "an object": lambda fn: fn,
        "a partial": lambda fn: functools.partial(fn.add_one),
        "a method declared later": lambda fn: xla.returns(SCALAR)(fn.add_one),
    }.items(),
    ids=lambda kind: kind[0],
)
def test_what_is_declared_of_any_callable_is_known(kind):
    modes = collections.deque()
    fn = kind[1](Declared(modes))
    assert values(on_two(lambda x: xla.outside_compilation(fn, x))) == [2.0, 3.0]
    assert list(modes) == [True, True]


def test_the_order_of_keys_in_a_result_is_of_no_account():
    fn = xla.returns({"a": SCALAR, "b": SCALAR})(lambda x: {"b": x * 10.0, "a": x})
    assert values(on_two(lambda x: xla.outside_compilation(fn, x))) == [{"a": x, "b": 10.0 * x} for x in (1.0, 2.0)]


def test_declared_results_take_what_numpy_makes_of_them():
    fn = xla.returns(tf.TensorSpec([], tf.int64))(lambda x: np.argmax([x, 1.5]))
    assert values(on_two(lambda x: xla.outside_compilation(fn, x))) == [1, 0]


def test_functions_that_need_no_declaration_may_have_shapes_that_only_zeros_tell():
    body = lambda x: xla.outside_compilation(lambda x: tf.unique(x * 0.0 + tf.range(2.0))[0], x)  # noqa: E731
    assert values(on_two(body, [1.0, 2.0], [3.0, 4.0])) == [[0.0, 1.0]] * 2


INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
NUMBERS = (*INTEGERS, "float16", "bfloat16", "float32", "float64", "complex64", "complex128")
NARROW = [
    name
    for name in (
        *("int4", "uint4", "float8_e4m3fn", "float8_e5m2"),
        *("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
    )
    if hasattr(tf.dtypes.experimental, name)
]


@pytest.mark.parametrize("name", ["bool", *NUMBERS, *NARROW])
def test_every_dtype_goes_there_and_back(name):
    dtype = getattr(tf.dtypes.experimental, name) if name in NARROW else tf.as_dtype(name)
    sent = [np.array([0, 1, 1, 0, i]).astype(dtype.as_numpy_dtype) for i in range(2)]
    seen = {}

    def look(vector, scalar, empty):
        assert vector.dtype == scalar.dtype == empty.dtype == dtype
        assert (vector.shape, scalar.shape, empty.shape) == ((5,), (), (0, 2))
        seen[int(xla.replica_id())] = vector.numpy().tobytes() + scalar.numpy().tobytes()
        return vector, scalar, empty

    look = xla.returns(tuple(tf.TensorSpec(shape, dtype) for shape in ([5], [], [0, 2])))(look)
    inputs = [[part, tf.constant(part[-1]), part[:0].reshape(0, 2)] for part in sent]
    results = xla.replicate(lambda *args: xla.outside_compilation(look, *args), inputs)
    for replica, (vector, scalar, empty) in enumerate(results):
        assert seen[replica] == sent[replica].tobytes() + sent[replica][-1].tobytes()
        assert vector.dtype == scalar.dtype == empty.dtype == dtype
        assert vector.numpy().tobytes() == sent[replica].tobytes()
        assert scalar.numpy().tobytes() == sent[replica][-1].tobytes()
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


# What only the host has.


TABLE = {0: 0, 1: 10, 2: 20}


def of_a_table(x):
    initializer = tf.lookup.KeyValueTensorInitializer(list(TABLE), list(TABLE.values()))
    return tf.lookup.StaticHashTable(initializer, -1).lookup(x)


@pytest.mark.parametrize(
    "fn",
    [
        of_a_table,
        lambda x: tf.py_function(lambda x: TABLE[int(x)], [x], tf.int32),
        lambda x: tf.numpy_function(lambda x: np.int32(TABLE[int(x)]), [x], tf.int32),
        lambda x: tf.strings.to_number(tf.strings.join([tf.strings.as_string(x), "0"]), tf.int32),
        lambda x: tf.size(tf.where(tf.range(1000) < x * 10)),
        lambda x: TABLE[int(x)],
    ],
    ids=["lookup", "py_function", "numpy_function", "strings", "where", "python"],
)
def test_ops_of_the_host_work(fn):
    def body(x):
        return tf.reshape(xla.outside_compilation(fn, x), []) + 1

    assert values(on_two(body, 1, 2)) == [11, 21]


def test_a_table_of_the_program_can_be_asked():
    initializer = tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2]), tf.constant([10, 20]))
    table = tf.lookup.StaticHashTable(initializer, -1)
    assert values(on_two(lambda x: xla.outside_compilation(table.lookup, x), 2, 3)) == [20, -1]


def test_files_can_be_read_and_written(tmp_path):
    def count(x):
        path = str(tmp_path / f"{int(xla.replica_id())}")
        tf.io.write_file(path, tf.io.read_file(path) + "x" if tf.io.gfile.exists(path) else "")
        return tf.strings.length(tf.io.read_file(path)) + x

    count = xla.returns(tf.TensorSpec([], tf.int32))(count)

    def body(x):
        for _ in tf.range(3):
            x = xla.outside_compilation(count, x)
        return x

    assert values(on_two(body, 10, 20)) == [13, 23]


def test_printing_works(tmp_path, run):
    path = tmp_path / "printed"

    def body(x):
        for i in tf.range(2):
            xla.outside_compilation(tf.print, "replica", x, "step", i, output_stream=f"file://{path}")
        xla.outside_compilation(lambda: tf.print("done", x, output_stream=f"file://{path}"))

    run(body, 1.0, 2.0)
    lines = path.read_text().splitlines()
    for x in (1, 2):
        assert [line for line in lines if str(x) in line.split()[1]] == [
            *(f"replica {x} step {i}" for i in range(2)),
            f"done {x}",
        ]


def tenfold_tensor():
    return xla.replica_id() * 10


def tenfold_number():
    return int(xla.replica_id()) * 10


def tenfold_array():
    return xla.replica_id().numpy() * 10


@pytest.mark.parametrize("fn", [tenfold_tensor, tenfold_number, tenfold_array], ids=lambda fn: fn.__name__)
def test_the_replica_is_known(fn):
    sizes = collections.deque()

    def note():
        sizes.append(xla.num_replicas())

    def body():
        xla.outside_compilation(note)
        return xla.outside_compilation(fn)

    assert values(xla.replicate(body, num_replicas=4)) == [0, 10, 20, 30]
    assert list(sizes) == [4] * 4


def scalars(directory):
    """(tag, step, value) of all scalars in the event files of a directory, in order."""
    found = []
    for path in sorted(directory.iterdir()):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            found += [(each.tag, event.step, float(tf.make_ndarray(each.tensor))) for each in event.summary.value]
    return found


def test_summaries_are_written(tmp_path, run):
    def log(x, step):
        tf.summary.scalar(f"loss/{int(xla.replica_id())}", x, step=step)

    def body(x):
        for i in tf.range(3, dtype=tf.int64):
            x *= 10.0
            xla.outside_compilation(log, x, i)
        return x

    with tf.summary.create_file_writer(str(tmp_path)).as_default():
        run(body, 1.0, 2.0)
    run(body, 7.0, 7.0)  # to no writer
    found = scalars(tmp_path)
    for replica, x in enumerate([1.0, 2.0]):
        expected = [(f"loss/{replica}", i, x * 10 ** (i + 1)) for i in range(3)]
        assert [each for each in found if each[0] == f"loss/{replica}"] == expected
    assert len(found) == 6


def test_summaries_take_the_step_and_the_condition_around_the_run(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path))
    body = lambda x: xla.outside_compilation(lambda x: tf.summary.scalar("loss", x), x)  # noqa: E731
    with writer.as_default(step=tf.constant(7, tf.int64)):
        xla.replicate(body, [[tf.constant(1.0)]])
        with tf.summary.record_if(False):
            xla.replicate(body, [[tf.constant(2.0)]])
    with writer.as_default(step=8):
        xla.replicate(body, [[tf.constant(3.0)]])
    writer.close()
    assert scalars(tmp_path) == [("loss", 7, 1.0), ("loss", 8, 3.0)]


def test_a_writer_can_be_entered_in_the_function(tmp_path):
    writers = [tf.summary.create_file_writer(str(tmp_path / str(i))) for i in range(2)]

    def log(x):
        with writers[int(xla.replica_id())].as_default(step=5):
            tf.summary.scalar("loss", x)

    on_two(lambda x: xla.outside_compilation(log, x))
    for i, writer in enumerate(writers):
        writer.close()
        assert scalars(tmp_path / str(i)) == [("loss", 5, 1.0 + i)]
    assert tf.summary.experimental.get_step() is None


def test_variables_of_the_host_are_read_and_written(run):
    total = tf.Variable(0.0)
    factor = tf.Variable(3.0)

    def body(x):
        xla.outside_compilation(lambda: total.assign_add(x) and None)
        return xla.outside_compilation(lambda x: x * factor, x)

    assert values(run(body, 1.0, 2.0)) == [3.0, 6.0]
    factor.assign(10.0)
    assert values(run(body, 1.0, 2.0)) == [10.0, 20.0]
    assert total.numpy() == 6.0


def test_a_variable_that_the_body_writes_arrives_as_its_value():
    """In `xla.replicate` any variable is on the devices while the body runs."""
    variable = tf.Variable(1.0)

    def body(x):
        variable.assign_add(x)
        return xla.outside_compilation(lambda value: value * 10.0, variable)

    assert values(on_two(body)) == [20.0, 30.0]


def test_a_variable_made_in_them_is_one_of_the_host(run):
    made, lock = [], threading.Lock()

    def add(x):
        with lock:
            if not made:
                made.append(tf.Variable(0.0))
        made[0].assign_add(x)

    for _ in range(2):
        run(lambda x: xla.outside_compilation(add, x), 1.0, 2.0)
    assert type(made[0]) is type(tf.Variable(0.0))
    assert made[0].numpy() == 6.0


# What they cannot do.


USES = {
    "read_value": lambda variable: variable.read_value(),
    "numpy": lambda variable: variable.numpy(),
    "add": lambda variable: variable + 1.0,
    "convert": lambda variable: tf.convert_to_tensor(variable),
    "read a component": lambda variable: variable.values[1].read_value(),
    "assign": lambda variable: variable.assign(5.0),
    "assign_add": lambda variable: variable.assign_add(5.0),
    "assign_sub": lambda variable: variable.assign_sub(5.0),
    "assign a component": lambda variable: variable.values[0].assign(5.0),
}


@pytest.mark.parametrize(
    ("use", "kind"),
    [*((use, "AUTO") for use in USES), *((use, "ON_READ") for use in ("numpy", "assign_add"))],
)
def test_variables_of_a_strategy_cannot_be_used(use, kind):
    """Their values are on the devices, where the body is running."""
    strategy = TPUStrategy(num_cores=2)
    kind = tf.VariableSynchronization[kind]
    with strategy.scope():
        variable = tf.Variable(1.0, synchronization=kind, aggregation=tf.VariableAggregation.MEAN, name="weight")
    initial = values(strategy.experimental_local_results(variable))

    def fn():
        USES[use](variable)

    def with_results():
        USES[use](variable)
        return 1.0

    def body(fn):
        variable.assign_add(tf.ones([]))
        xla.outside_compilation(fn)  # the call

    for each in (fn, with_results):
        with pytest.raises(HostAccessError, match=r"'weight.*outside_compilation") as raised:
            strategy.run(body, args=(each,))
        assert line_of("the call") in str(raised.value)
        assert values(strategy.experimental_local_results(variable)) == initial


def test_a_variable_of_a_strategy_as_an_argument_arrives_as_its_value(run):
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    seen = []

    def look(first, nest, last):
        seen.append([float(each) for each in (first, nest["v"], last)])
        return isinstance(first, tf.Variable), isinstance(nest["v"], tf.Variable)

    look = xla.returns((tf.TensorSpec([], tf.bool),) * 2)(look)

    def body(x):
        before = variable.read_value()
        variable.assign_add(tf.ones([]))
        return xla.outside_compilation(look, variable, {"v": variable}, last=before)

    assert values(run_with(strategy)(body, tf.constant(1.0), tf.constant(2.0))) == [(False, False)] * 2
    assert seen == [[3.0, 3.0, 1.0]] * 2


@pytest.mark.parametrize("results", [False, True], ids=["no results", "results"])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("cross_replica_sum", (1.0,)),
        ("all_reduce", (1.0, "MAX")),
        ("all_gather", ([1.0],)),
        ("all_to_all", ([1.0], 0, 0)),
        ("collective_permute", (1.0, [(0, 1)])),
    ],
)
def test_replicas_cannot_meet_in_them(name, args, results):
    def fn():
        getattr(xla, name)(*args)

    def body():
        return xla.outside_compilation((lambda: (fn(), 1.0)[1]) if results else fn)

    with pytest.raises(NotInBodyError, match=rf"xla\.{name}\(\).*outside_compilation.*pass its result"):
        xla.replicate(body, num_replicas=2)


@pytest.mark.parametrize("results", [False, True], ids=["no results", "results"])
def test_they_cannot_be_nested(results):
    def outer():
        inner = xla.outside_compilation(lambda: 1.0)  # the inner call
        if results:
            return inner

    def without():
        xla.outside_compilation(lambda: 1.0)  # another inner call

    def body():
        xla.outside_compilation(outer if results else without)  # the outer call

    with pytest.raises(NestedHostCallError) as raised:
        xla.replicate(body, num_replicas=2)
    assert isinstance(raised.value, NotImplementedError)
    assert line_of("the inner call" if results else "another inner call") in str(raised.value)
    assert line_of("the outer call") in str(raised.value)


def test_tensors_that_it_cannot_see_are_an_error():
    class Holder:
        pass

    def body(x):
        holder = Holder()
        holder.x = x
        return xla.outside_compilation(lambda: holder.x + 1.0)

    with pytest.raises(HostAccessError, match="Pass it as an argument"):
        on_two(body)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: "text", r"dtype string,.*no device"),
        (lambda x: {"a": [x, tf.strings.as_string(x)]}, r"dtype string at result\['a'\]\[1\]"),
        (lambda x: {"a": object()}, r"result\['a'\], which is no tensor"),
        (xla.returns(tf.TensorSpec([None], tf.float32))(lambda x: x), r"shape \(None,\)"),
    ],
    ids=["text", "string", "object", "shape"],
)
def test_results_that_no_device_has_are_an_error(fn, message):
    with pytest.raises(HostResultError, match=message):
        on_two(lambda x: xla.outside_compilation(fn, x))
