"""What host functions close over: tensors of the body, variables of their own, and what they keep."""

import collections
import functools

import pytest
import tensorflow as tf
from helpers.host_work import SCALAR, Point, add_one, on_two, values

from replica_engine import xla


def called(fn, *args, **kwargs):
    return xla.outside_compilation(xla.returns(SCALAR)(fn), *args, **kwargs)


def captures_in_structures(x):
    nest = {"a": [x, (Point(x * 0.5, "b"), 1.0)]}
    return called(lambda: nest["a"][0].numpy() + nest["a"][1][0].x.numpy() * 2.0 + nest["a"][1][1])


def captures_in_helpers(x):
    y = x * 2.0

    def inner():
        return y.numpy()

    def outer():
        def innermost():
            return inner()

        return innermost() + 1.0

    return called(outer)


def captures_in_defaults(x):
    def fn(y=x * 2.0, *, one=x * 0.0 + 1.0):
        return y.numpy() + one.numpy()

    return called(fn)


def captures_in_nested_partials(x):
    return called(functools.partial(functools.partial(add_one, x * 0.0), x, by=x + 1.0))


def captures_in_a_decorated_function(x):
    def doubled(fn):
        @functools.wraps(fn)
        def wrapper(*args):
            return 2.0 * fn(*args)

        return wrapper

    @doubled
    def fn():
        return x.numpy() + 0.5

    return called(fn)


def captures_in_a_tf_function(x):
    return called(tf.function(lambda: tf.strings.to_number(tf.strings.as_string(x * 2.0)) + 1.0))


def captures_in_a_callback(x):
    return called(lambda fn: fn().numpy() + 1.0, lambda: x * 2.0)


def captures_in_a_generator(x):
    return called(lambda: sum(each.numpy() for each in [x, x]) + 1.0)


def captures_in_functions_that_call_each_other(x):
    def even(n):
        return x.numpy() * 2.0 + 1.0 if n == 0 else odd(n - 1)

    def odd(n):
        return even(n - 1)

    return called(even, 2)


def captures_from_functions_around(x):
    return tf.function(lambda y: tf.cond(y > 0.0, lambda: called(add_one, y, x), lambda: y))(x)


CAPTURES = [value for name, value in globals().items() if name.startswith("captures_")]


@pytest.mark.parametrize("body", CAPTURES)
def test_they_get_tensors_of_the_body(body):
    for start in (1.0, 5.0):
        assert values(on_two(body, start, start + 1.0)) == [2.0 * start + 1.0, 2.0 * start + 3.0]


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
def test_what_they_keep_for_themselves_compiles_nothing_again(keep):
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
