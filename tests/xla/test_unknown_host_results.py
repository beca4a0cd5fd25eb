"""Host functions are never called to find out what they return. Unknown results may be left, and not used."""

import collections
import functools
import operator
import queue

import numpy as np
import pytest
import tensorflow as tf
from helpers.host_work import SCALAR, X, gradients, on_two, values

from replica_engine import TPUStrategy, xla
from replica_engine.errors import HostResultError


def plus_one(x):
    return x.numpy() + 1.0


def unknown(x):
    return xla.outside_compilation(plus_one, x)


def ten_times(x):
    return float(x) * 10.0


declared = xla.returns(SCALAR)(lambda x: ten_times(x))


def of_items():
    items = queue.Queue()
    for number in range(9):
        items.put(float(number))
    return items


# What is called, and how often.


def test_a_declared_function_takes_one_item_for_each_replica():
    items = of_items()

    @xla.returns(SCALAR)
    def take(x):
        return items.get() + float(x) * 100.0

    results = values(on_two(lambda x: xla.outside_compilation(take, x)))
    assert sorted(result % 100.0 for result in results) == [0.0, 1.0]
    assert [result // 100.0 for result in results] == [1.0, 2.0]
    assert items.qsize() == 7


@pytest.mark.parametrize("convert", [float, int, complex, bool, np.asarray, lambda x: x.numpy()])
def test_what_asks_for_a_value_first_takes_no_item_before_the_error(convert):
    items = of_items()

    def take(x):
        convert(x)
        return items.get() * x

    with pytest.raises(HostResultError, match=r"results of `take`,.*tracing it raised .*xla\.returns"):
        on_two(lambda x: xla.outside_compilation(take, x) * 2.0)
    assert items.qsize() == 9


def test_what_asks_for_a_value_and_is_not_used_is_called_once_for_each_replica():
    seen = collections.deque()

    def body(x):
        xla.outside_compilation(lambda v: seen.append(float(v)), x)
        xla.outside_compilation(lambda v: (seen.append(int(v) * 10), {"any", "object"}), x)
        return x

    for _ in range(2):
        assert values(on_two(body)) == [1.0, 2.0]
    assert sorted(seen) == [1.0, 1.0, 2.0, 2.0, 10, 10, 20, 20]


def test_what_is_left_may_have_any_results():
    """A function that returns now and then, objects that no device can have, a shape that depends on values."""
    kinds = [
        lambda x: x if float(x) > 1.0 else None,
        lambda x: {"an", "object", x.numpy()},
        lambda x: tf.boolean_mask([x], [x > 1.0]),
        lambda x: object(),
    ]

    def body(x):
        left = [xla.outside_compilation(kind, x) for kind in kinds]
        assert "unknown results" in repr(left)
        return x

    assert values(on_two(body)) == [1.0, 2.0]


def test_a_failure_of_what_is_left_is_that_of_the_run():
    def fails(x):
        raise KeyError(x.numpy())

    with pytest.raises(KeyError):
        on_two(lambda x: (xla.outside_compilation(lambda x: fails(x), x), x)[1])


def test_in_control_flow_it_is_called_where_the_program_comes_by():
    seen = collections.deque()

    def note(x):
        seen.append(float(x))
        return "noted"

    def body(x):
        if x > 1.5:
            xla.outside_compilation(note, x)
        for _ in tf.range(2):
            x += 10.0
            xla.outside_compilation(note, x)
        (x,) = tf.while_loop(lambda x: x < 30.0, lambda x: (xla.outside_compilation(note, x), [x + 5.0])[1], [x])
        return x

    assert values(on_two(body)) == [31.0, 32.0]
    assert sorted(seen) == [2.0, 11.0, 12.0, 21.0, 21.0, 22.0, 22.0, 26.0, 27.0]


def test_in_a_loop_of_steps_it_is_called_once_in_each():
    strategy, seen = TPUStrategy(num_cores=2), collections.deque()

    def step(context, x):
        xla.outside_compilation(lambda x: seen.append(x.numpy().tolist()), x)
        return xla.outside_compilation(declared, tf.reduce_sum(x))

    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(12, output_type=tf.float32).batch(4))
    strategy.run_steps(step, iter(dataset), 3)
    assert sorted(seen) == [[2.0 * number, 2.0 * number + 1.0] for number in range(6)]


# Each use is the error, before anything runs.


def in_a_converted_branch(x):
    y = x
    if x > 0.0:
        y = unknown(x)
    return y


def in_a_converted_loop(x):
    while x < 3.0:
        x = unknown(x)
    return x


def in_a_closure(x):
    y = unknown(x)
    xla.outside_compilation(lambda: print(y))


USES = {
    "a tensor": lambda x: tf.convert_to_tensor(unknown(x)),
    "an identity": lambda x: tf.identity(unknown(x)),
    "an op": lambda x: tf.sin(unknown(x)),
    "an op of two": lambda x: tf.maximum(x, unknown(x)),
    "a list": lambda x: tf.stack([x, unknown(x)]),
    "a list of an op": lambda x: tf.add_n([x, unknown(x)]),
    "a cast": lambda x: tf.cast(unknown(x), tf.int32),
    "a shape": lambda x: tf.zeros(unknown(x)),
    "an array": lambda x: np.asarray(unknown(x)),
    "a function of NumPy": lambda x: np.mean(unknown(x)),
    "added": lambda x: unknown(x) + x,
    "added to": lambda x: x + unknown(x),
    "times a number": lambda x: 2.0 * unknown(x),
    "a power": lambda x: unknown(x) ** 2,
    "in place": lambda x: operator.iadd(unknown(x), x),
    "negative": lambda x: -unknown(x),
    "compared": lambda x: x < unknown(x),
    "equal": lambda x: unknown(x) == 1.0,
    "iterated": lambda x: list(unknown(x)),
    "taken apart": lambda x: (lambda a, b: a)(*unknown(x)),
    "indexed": lambda x: unknown(x)["loss"],
    "an attribute": lambda x: unknown(x).shape,
    "an attribute that is set": lambda x: setattr(unknown(x), "loss", x),
    "an item that is set": lambda x: operator.setitem(unknown(x), 0, x),
    "a length": lambda x: len(unknown(x)),
    "contains": lambda x: 1.0 in unknown(x),
    "a truth": lambda x: x if unknown(x) else x + 1.0,
    "a number": lambda x: x + float(unknown(x)),
    "in words": lambda x: f"{unknown(x):.2f}",
    "called": lambda x: unknown(x)(),
    "returned": unknown,
    "returned in a structure": lambda x: {"x": x, "y": [unknown(x)]},
    "returned by a lambda": lambda x: xla.outside_compilation(lambda v: print(float(v)), x),
    "an argument": lambda x: xla.outside_compilation(plus_one, unknown(x)),
    "in an argument": lambda x: xla.outside_compilation(print, {"y": unknown(x)}),
    "closed over": in_a_closure,
    "a partial": lambda x: xla.outside_compilation(functools.partial(print, unknown(x))),
    "of a function": lambda x: tf.function(lambda: unknown(x))(),
    "of a branch": lambda x: tf.cond(x > 0.0, lambda: unknown(x), lambda: x),
    "of both branches": lambda x: tf.cond(x > 0.0, lambda: unknown(x), lambda: unknown(x)),
    "of an if": in_a_converted_branch,
    "of a loop": lambda x: tf.while_loop(lambda x: x < 3.0, lambda x: [unknown(x)], [x]),
    "of a while": in_a_converted_loop,
    "of a map": lambda x: tf.map_fn(unknown, tf.stack([x, x])),
    "in a tf.py_function": lambda x: tf.py_function(plus_one, [unknown(x)], tf.float32),
    "in an array of tensors": lambda x: tf.TensorArray(tf.float32, 1, element_shape=[]).write(0, unknown(x)).stack(),
    "reduced": lambda x: xla.cross_replica_sum(unknown(x)),
    "printed": lambda x: tf.print(tf.strings.format("{}", unknown(x))),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_use_is_the_error_that_says_what_to_write(use):
    with pytest.raises(HostResultError, match="results") as raised:
        xla.lower(use, X)
    text = str(raised.value)
    assert "raised AttributeError: " in text or "raised TypeError: " in text
    assert f"{__file__}:" in text
    assert "@xla.returns(tf.TensorSpec([...], tf.float32))" in text
    assert isinstance(raised.value.__cause__, (AttributeError, TypeError))


def test_an_assignment_is_the_error_too(two):
    with two.scope():
        variables = [
            tf.Variable(1.0),
            tf.Variable(1.0, synchronization=tf.VariableSynchronization.ON_READ),
            tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN),
        ]
    for variable in variables:
        for assign in (variable.assign, variable.assign_add):
            with pytest.raises(HostResultError, match="results of `plus_one`"):
                two.run(lambda x: assign(unknown(x)), args=(tf.constant(1.0),))  # noqa: B023


def test_the_error_of_a_step_in_a_function_and_in_a_loop_of_steps(two):
    with pytest.raises(HostResultError, match="results of `plus_one`"):
        tf.function(lambda x: two.run(unknown, args=(x,)))(tf.constant(1.0))
    batches = iter(two.experimental_distribute_dataset(tf.data.Dataset.range(4, output_type=tf.float32).batch(4)))
    with pytest.raises(HostResultError, match="results of `plus_one`"):
        two.run_steps(lambda context, x: context.set_last_step_output("y", unknown(x)), batches, 1)


def test_an_exception_of_the_user_about_it_stays():
    def body(x):
        try:
            return unknown(x) * 2.0
        except HostResultError as error:
            raise KeyError("of the user") from error

    with pytest.raises(KeyError, match="of the user"):
        on_two(body)


def test_a_shape_that_depends_on_values_is_named():
    body = lambda x: xla.outside_compilation(lambda x: {"a": x, "large": tf.boolean_mask([x], [x > 1.0])}, x)["a"]  # noqa: E731
    with pytest.raises(HostResultError, match=r"the result\['large'\] has the shape \(None,\).*xla\.returns") as raised:
        on_two(body)
    assert raised.value.__cause__ is None


# Declarations where the function is not defined.


class Slots:
    __slots__ = ("by",)

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return float(x) * self.by

    def more(self, x):
        return float(x) + self.by


class Static:
    @xla.returns(SCALAR)
    @staticmethod
    def twice(x):
        return float(x) * 2.0

    @xla.returns(SCALAR)
    @classmethod
    def thrice(cls, x):
        return float(x) * 3.0


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: float(x) + 3.0, [4.0, 5.0]),
        (np.float32, [1.0, 2.0]),
        (np.square, [1.0, 4.0]),
        (np.max, [1.0, 2.0]),
        (float, [1.0, 2.0]),
        ([7.0, 8.0, 9.0].__getitem__, [8.0, 9.0]),
        (Slots(10.0), [10.0, 20.0]),
        (Slots(10.0).more, [11.0, 12.0]),
        (functools.partial(pow, 2.0), [2.0, 4.0]),
    ],
    ids=["lambda", "type of numpy", "ufunc", "of numpy", "type", "in C", "with slots", "method", "partial"],
)
def test_any_callable_can_be_declared_where_it_is_called(fn, expected):
    body = lambda x: xla.outside_compilation(xla.returns(SCALAR)(fn), x)  # noqa: E731
    inputs = (1.0, 2.0) if "getitem" not in str(fn) else (1, 2)
    assert values(on_two(body, *inputs)) == expected


def test_static_methods_and_class_methods_can_be_declared():
    body = lambda x: (xla.outside_compilation(Static.twice, x), xla.outside_compilation(Static().thrice, x))  # noqa: E731
    assert values(on_two(body)) == [(2.0, 3.0), (4.0, 6.0)]


def test_a_method_that_is_declared_of_one_object_is_not_of_others():
    xla.returns(tf.TensorSpec([5], tf.int32))(Slots(1.0).more)
    with pytest.raises(HostResultError, match="results of `more`"):
        on_two(lambda x: xla.outside_compilation(Slots(2.0).more, x))


def test_only_callables_can_be_declared():
    with pytest.raises(TypeError, match="callable"):
        xla.returns(SCALAR)(5.0)


@pytest.mark.parametrize(
    ("spec", "got"),
    [
        ("float32", r"str 'float32'"),
        (tf.float32, r"DType tf\.float32"),
        (np.float32, r"type <class 'numpy\.float32'>"),
        ([2, 3], r"int 2 at \[0\]"),
        (tf.TensorShape([2]), r"TensorShape TensorShape\(\[2\]\)"),
        ({"loss": SCALAR, "name": "text"}, r"str 'text' at \['name'\]"),
        (lambda x: x.numpy(), r"function <function .*"),
    ],
    ids=["name", "dtype", "type", "sizes", "shape", "part", "none given"],
)
def test_what_is_no_spec_is_refused_where_it_is_declared(spec, got):
    with pytest.raises(HostResultError, match=rf"{got}\. Write @xla\.returns\(tf\.TensorSpec\(shape, dtype\)\)"):
        xla.returns(spec)


def test_one_function_that_is_declared_anew_is_another(two):
    def run(spec):
        host = xla.returns(spec)(lambda x: x.numpy())
        return two.run(lambda x: tf.shape(xla.outside_compilation(host, x)), args=(tf.ones([2]),))

    with pytest.raises(HostResultError, match=r"compiled for a tensor of dtype float32 and shape \(3,\)"):
        run(tf.TensorSpec([3]))
    before = xla.counts()
    assert run(tf.TensorSpec([2])).values[1].numpy().tolist() == [2]
    run(tf.TensorSpec([2]))
    assert (xla.counts() - before).traces == 1


def test_a_declared_function_can_be_differentiated():
    @xla.returns(SCALAR)
    def cubed(x):
        assert x.numpy() > 0.0
        return x**3

    assert values(on_two(lambda x: gradients(lambda x: xla.outside_compilation(cubed, x), x))) == [[3.0], [12.0]]


def test_a_declared_function_in_control_flow():
    def body(x):
        x = tf.cond(x > 1.5, lambda: xla.outside_compilation(declared, x), lambda: x)
        (x,) = tf.while_loop(lambda x: x < 150.0, lambda x: [xla.outside_compilation(declared, x)], [x])
        return x

    assert values(on_two(body)) == [1000.0, 200.0]
