"""How often programs are traced, lowered and compiled when they are called again, with equal and with other arguments.

Next to each program stand, for each call, how many traces, lowerings, compiles and launches it makes. Fewer are a gain,
if the results stay right; more are a loss that no other test sees.
"""

import collections
import contextlib
import dataclasses
import functools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.on_two import spread

from replica_engine import TPUStrategy, xla
from replica_engine.keras import replicate_model

ONE, TWO, THREE = tf.constant(1.0), tf.constant([1.0, 2.0]), tf.constant([1.0, 2.0, 3.0])
NEW, AGAIN = (1, 1, 1, 1), (0, 0, 0, 1)
TWICE = (2, 1, 1, 1)  # traced, and once more
ANY_SIZE = (0, 1, 1, 1)  # traced before, for any shape
SHARED = (1, 1, 0, 1)  # an executable of the same text is there
COMPILED = (1, 1, 1, 0)
BRANCHES = (1, 2, 1, 1)  # for shares of different sizes


def values(*parts):
    return spread(TPUStrategy(num_cores=2), lambda i: parts[i])


def sparse(*places):
    return tf.SparseTensor([[place, 0] for place in places], [1.0] * len(places), [4, 2])


def all_reduced(x):
    return tf.distribute.get_replica_context().all_reduce("SUM", x)


@xla.returns(None)
def _note(x):
    pass


def noted(x):
    xla.outside_compilation(_note, x)
    return x * 2.0


def checked(x):
    tf.debugging.assert_positive(x)
    return x * 2.0


Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Point:
    x: tf.Tensor
    scale: float


class Model:
    def __init__(self, scale):
        self.scale = scale
        self.weight = None

    def step(self, x):
        return x * self.scale

    __call__ = step

    def lazy(self, x):
        if self.weight is None:
            self.weight = tf.Variable(2.0)
        return self.weight.assign_add(x)


FUNCTION = tf.function(lambda x: x * 2.0)
REDUCED = tf.function(lambda x: x * 2.0, reduce_retracing=True)
SIGNED = tf.function(lambda x: x * 2.0, input_signature=[tf.TensorSpec([None], tf.float32)])
RAGGED = [tf.ragged.constant(rows) for rows in ([[1.0], [2.0, 3.0]], [[1.0, 4.0], [2.0]], [[1.0], [2.0]])]

# What each call comes to, the function, and its arguments: one is no tuple, and values of replicas are made later.
OF_ARGUMENTS = {
    "tensors": ([NEW, AGAIN, AGAIN], lambda x: x * 2.0, [TWO, TWO, TWO + 1.0]),
    "shapes": ([NEW, NEW, AGAIN, AGAIN], lambda x: x * 2.0, [TWO, THREE, TWO, THREE]),
    "dtypes": (
        [NEW, NEW, NEW, AGAIN, AGAIN],
        lambda x: x + x,
        [tf.cast(TWO, dtype) for dtype in ("float32", "float64", "int32", "float64", "float32")],
    ),
    "arrays": ([NEW, AGAIN, AGAIN], lambda x: x * 2.0, [np.ones(2), np.ones(2), tf.ones(2, tf.float64)]),
    "integers": ([NEW, AGAIN, NEW, AGAIN], lambda x, k: x * float(k), [(ONE, 2), (ONE, 2), (ONE, 3), (ONE, 2)]),
    "floats": ([NEW, AGAIN, AGAIN], lambda x, rate: x * rate, [(ONE, 0.5), (ONE, 0.5), (ONE, 0.25)]),
    "floats_that_must_be_numbers": (
        [TWICE, AGAIN, NEW, AGAIN],
        lambda x, rate: x * math.sqrt(rate),
        [(ONE, 0.5), (ONE, 0.5), (ONE, 0.25), (ONE, 0.5)],
    ),
    "words": (
        [NEW, AGAIN, NEW, SHARED],
        lambda x, kind: x + len(str(kind)),
        [(ONE, "sum"), (ONE, "sum"), (ONE, None), (ONE, True)],
    ),
    "dictionaries": (
        [NEW, AGAIN, AGAIN, SHARED],
        lambda d: sum(map(tf.reduce_sum, tf.nest.flatten(d))),
        [{"x": ONE, "y": [TWO]}, {"x": ONE, "y": [TWO]}, {"x": ONE + 1.0, "y": [TWO]}, {"x": ONE, "z": [TWO]}],
    ),
    "named_tuples": (
        [NEW, AGAIN, SHARED],
        lambda p: p[0] + p[1],
        [(Pair(ONE, ONE),), (Pair(ONE, TWO[0]),), ((ONE, ONE),)],
    ),
    "data_classes": ([NEW, AGAIN, NEW], lambda p: p.x * p.scale, [Point(ONE, 2.0), Point(ONE, 2.0), Point(ONE, 3.0)]),
    "functions": ([NEW, AGAIN, AGAIN, NEW], FUNCTION, [TWO, TWO, TWO + 1.0, THREE]),
    "reduced_retracing": ([NEW, NEW, ANY_SIZE, AGAIN, AGAIN], REDUCED, [ONE[None], TWO, THREE, TWO, THREE]),
    "signatures": ([NEW, AGAIN, ANY_SIZE], SIGNED, [TWO, TWO + 1.0, THREE]),
    "sparse_arguments": (
        [TWICE, AGAIN, AGAIN],
        lambda x: tf.sparse.to_dense(x) * 2.0,
        [sparse(0, 1), sparse(2, 3), sparse(0, 1, 2)],
    ),
    "sparse_arguments_beside_others": (
        [TWICE, AGAIN, NEW, AGAIN],
        lambda x, y: tf.sparse.to_dense(x) * 2.0 + y,
        [(sparse(0), TWO), (sparse(1, 2), TWO), (sparse(1), TWO[:1]), (sparse(0, 1, 2), TWO[:1])],
    ),
    "ragged_arguments": ([NEW, AGAIN, NEW], lambda x: tf.reduce_sum(x.values) * 2.0, RAGGED),
    "strings": (
        [NEW, AGAIN, AGAIN],
        lambda x: tf.strings.length(x) + 1,
        [tf.constant(text) for text in ("a", "a", "bb")],
    ),
    "values_of_each_replica": (
        [NEW, AGAIN, AGAIN, AGAIN],
        lambda x: x * 2.0,
        lambda: [ONE, each := values(ONE, ONE + 1.0), ONE, each],
    ),
    "shares_of_different_sizes": (
        [BRANCHES, AGAIN, NEW],
        lambda x: x * 2.0,
        lambda: [values(TWO, THREE), values(TWO + 1.0, THREE), values(TWO, TWO)],
    ),
    # A new size makes a program, and another combination of known ones does not.
    "combinations_of_shares_of_different_sizes": (
        [BRANCHES, AGAIN, (0, 1, 1, 1), AGAIN, AGAIN, AGAIN],
        lambda x: x * 2.0,
        lambda: [values(*map(tf.ones, sizes)) for sizes in [(1, 2), (2, 1), (1, 3), (3, 2), (2, 3), (3, 1)]],
    ),
    "collectives": ([NEW, AGAIN, AGAIN, NEW], all_reduced, lambda: [TWO, TWO, values(TWO, TWO + 1.0), THREE]),
    "host_calls": ([NEW, AGAIN, AGAIN], noted, [ONE, ONE, ONE + 1.0]),
    "python_on_the_host": (
        [NEW, AGAIN, AGAIN],
        lambda x: tf.numpy_function(lambda v: v + 1.0, [x], tf.float32) * 2.0,
        [ONE, ONE, ONE + 1.0],
    ),
    "moved_ops": ([NEW, AGAIN], checked, [ONE, ONE + 1.0]),
    "variables_created_in_the_body": ([TWICE, AGAIN, AGAIN], Model(1.0).lazy, [ONE, ONE, ONE + 1.0]),
    "random_numbers": ([NEW, AGAIN, AGAIN], lambda: tf.random.uniform([2]), [(), (), ()]),
}


PROGRAMS = {}


def counts(*expected):
    """Adds a program: a function that takes a strategy and returns the calls."""

    def add(make):
        PROGRAMS[make.__name__] = list(expected), make
        return make

    return add


def calls_of(strategy, fn, *of_args):
    """One call for each tuple of arguments."""
    return [functools.partial(strategy.run, fn, args=args) for args in of_args]


@counts(NEW, AGAIN, SHARED, NEW)
def keywords(strategy):
    body = lambda *, x, power: x**power  # noqa: E731
    return [
        functools.partial(strategy.run, body, kwargs=each)
        for each in (
            {"x": TWO, "power": 2},
            {"x": TWO, "power": 2},
            {"power": 2, "x": TWO + 1.0},
            {"x": TWO, "power": 3},
        )
    ]


@counts(NEW, AGAIN, AGAIN, NEW)
def made_anew(strategy):
    call = lambda scale: strategy.run(lambda x: x * scale, args=(ONE,))  # noqa: E731
    return [functools.partial(call, scale) for scale in (2.0, 2.0, 2.0, 3.0)]


@counts(NEW, AGAIN, AGAIN)
def made_anew_around_a_function(strategy):
    inner = lambda x: x + 1.0  # noqa: E731

    def call():
        return strategy.run(lambda x: inner(x) * 2.0, args=(ONE,))

    return [call, call, call]


@counts(NEW, SHARED, AGAIN)
def closed_over_tensors(strategy):
    call = lambda tensor: strategy.run(lambda: tensor + 1.0)  # noqa: E731
    other = TWO + 1.0
    return [functools.partial(call, tensor) for tensor in (TWO, other, TWO)]


@counts(NEW, AGAIN, NEW)
def partials(strategy):
    scaled = lambda x, factor: x * factor  # noqa: E731
    return [
        functools.partial(strategy.run, functools.partial(scaled, factor=factor), args=(ONE,))
        for factor in (2.0, 2.0, 3.0)
    ]


@counts(NEW, AGAIN, NEW)
def methods(strategy):
    one, other = Model(2.0), Model(3.0)
    return [functools.partial(strategy.run, model.step, args=(ONE,)) for model in (one, one, other)]


@counts(NEW, AGAIN, NEW)
def objects(strategy):
    one, other = Model(2.0), Model(3.0)
    return [functools.partial(strategy.run, model, args=(ONE,)) for model in (one, one, other)]


@counts(NEW, AGAIN, NEW, AGAIN)
def host_calls_made_anew(strategy):
    seen = []

    def call(number):
        @xla.returns(None)
        def note(x):
            seen.append((number, x))

        def body(x):
            xla.outside_compilation(note, x)
            return x + 1.0

        return strategy.run(body, args=(ONE,))

    return [functools.partial(call, number) for number in (1, 1, 2, 1)]


@counts(NEW, AGAIN, AGAIN)
def gradients(strategy):
    with strategy.scope():
        weight = tf.Variable(TWO)

    def body(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * x)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    return calls_of(strategy, body, (TWO,), (TWO,), (TWO + 1.0,))


@counts(NEW, SHARED, AGAIN)
def variables_as_arguments(strategy):
    with strategy.scope():
        one, other = tf.Variable(1.0), tf.Variable(2.0)
    return calls_of(strategy, lambda v: v.assign_add(1.0), (one,), (other,), (one,))


@counts(NEW, AGAIN, SHARED, AGAIN)
def keras_layers(strategy):
    with strategy.scope():
        one, other = keras.layers.Dense(2), keras.layers.Dense(2)
        one.build([1, 2]), other.build([1, 2])
    return calls_of(strategy, lambda layer, x: layer(x[None]), (one, TWO), (one, TWO), (other, TWO), (one, TWO))


@counts(COMPILED, AGAIN, AGAIN)
def planned_before(strategy):
    body = lambda x: x * 7.0  # noqa: E731
    return [lambda: strategy.plan(body, args=(TWO,)), *calls_of(strategy, body, (TWO,), (TWO,))]


@counts(NEW, AGAIN, NEW, AGAIN)
def in_a_function(strategy):
    step = tf.function(lambda x: strategy.run(lambda x: x * 2.0, args=(x,)))
    return [functools.partial(step, x) for x in (TWO, TWO + 1.0, THREE, TWO)]


@counts(NEW, ANY_SIZE, AGAIN)
def in_a_function_of_any_size(strategy):
    step = tf.function(
        lambda x: strategy.run(lambda x: x * 2.0, args=(x,)), input_signature=[tf.TensorSpec([None], tf.float32)]
    )
    return [functools.partial(step, x) for x in (TWO, THREE, TWO)]


@counts(NEW, AGAIN, AGAIN, NEW)
def replicated(strategy):
    body = lambda x: x * 1234.5  # noqa: E731
    return [functools.partial(xla.replicate, body, [[x], [x]]) for x in (TWO, TWO, TWO + 1.0, THREE)]


@counts(NEW, AGAIN)
def replicated_in_a_function(strategy):
    step = tf.function(lambda x: xla.replicate(lambda x: x * 5432.25, [[x], [x]]))
    return [functools.partial(step, x) for x in (TWO, TWO + 1.0)]


def loop(strategy, step, batch, times=2):
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    return lambda: strategy.run_steps(step, iter(dataset), iterations=times)


@counts(NEW, AGAIN, NEW, AGAIN)
def loops(strategy):
    def step(context, x):
        context.set_last_step_output("x", tf.reduce_sum(x))

    return [loop(strategy, step, *each) for each in ((TWO,), (TWO, 3), (THREE,), (TWO,))]


@counts((2, 1, 1, 2), (0, 0, 0, 2), (0, 0, 0, 3))
def loops_that_call_the_host(strategy):
    def step(context, x):
        xla.outside_compilation(_note, x)
        context.set_last_step_output("x", tf.reduce_sum(x))

    return [loop(strategy, step, *each) for each in ((TWO,), (TWO,), (TWO, 3))]


@counts((2, 1, 1, 2), (0, 0, 0, 2))
def loops_that_call_a_function_of_their_own(strategy):
    seen = []

    @xla.returns(None)
    def note(x):
        seen.append(float(x))

    def step(context, x):
        xla.outside_compilation(note, x)
        context.set_last_step_output("x", tf.reduce_sum(x))

    return [loop(strategy, step, ONE)] * 2


@counts((1, 1, 1, 2), (0, 0, 0, 2))
def loops_of_strings(strategy):
    def step(context, x):
        context.set_last_step_output("x", tf.strings.length(x))

    return [loop(strategy, step, tf.constant(word)) for word in ("a", "bb")]


@counts(NEW, AGAIN, NEW, AGAIN)
def models(strategy):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    replicated = replicate_model(model, strategy=strategy)
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    train = lambda: replicated.train_on_batch(x, y)  # noqa: E731
    predict = lambda: replicated.predict_on_batch(x)  # noqa: E731
    return [train, train, predict, predict]


def _fails(call):
    def attempt():
        with contextlib.suppress(ValueError):
            call()

    return attempt


@counts((1, 0, 0, 0), (1, 0, 0, 0), NEW, AGAIN)
def bodies_that_fail(strategy):
    fails = [True]

    def body(x):
        if fails:
            raise ValueError("not now")
        return x * 2.0

    run = functools.partial(strategy.run, body, args=(ONE,))

    def mended():
        fails.clear()
        return run()

    return [_fails(run), _fails(run), mended, run]


@pytest.mark.parametrize("name", [*OF_ARGUMENTS, *PROGRAMS])
def test_a_program_is_found_again(two, name):
    if name in PROGRAMS:
        expected, make = PROGRAMS[name]
        calls = make(two)
    else:
        expected, fn, given = OF_ARGUMENTS[name]
        given = given() if callable(given) else given
        calls = calls_of(two, fn, *(args if type(args) is tuple else (args,) for args in given))
    made = []
    for call in calls:
        before = xla.counts()
        call()
        used = xla.counts() - before
        assert not used.cache_hits
        made.append((used.traces, used.lowerings, used.compiles, used.launches))
    assert made == expected
