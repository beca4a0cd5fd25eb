"""Host functions for the tests of `outside_compilation`, which take notes, compute or fail; and checks of results."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import xla
from replica_engine.errors import HostResultError

SCALAR = tf.TensorSpec([], tf.float32)

X = [[tf.constant(1.0)], [tf.constant(2.0)]]

# Each collective, and what it takes after a value.
COLLECTIVES = {
    "cross_replica_sum": (),
    "all_reduce": ("MAX",),
    "all_gather": (),
    "all_to_all": (0, 0),
    "collective_permute": ([(0, 1)],),
}

Point = collections.namedtuple("Point", ["x", "y"])


def values(results):
    """Tensors as plain Python values, all else as it is."""
    plain = lambda value: value.numpy().tolist() if tf.is_tensor(value) else value  # noqa: E731
    return tf.nest.map_structure(plain, results)


def on_two(body, first=1.0, second=2.0):
    """The results of a body on two replicas, each with a tensor of its own."""
    return xla.replicate(body, [[tf.constant(first)], [tf.constant(second)]])


def line_of(file, text):
    """The line of a file that ends in a comment."""
    with open(file) as lines:
        return f"{file}:{next(number for number, line in enumerate(lines, 1) if line.rstrip().endswith(f'# {text}'))}"


# Host functions.


def add_one(x, *others, by=1.0):
    return x.numpy() + sum(float(other) for other in others) + by


def noting(calls, replica=None):
    """A host function that adds 10, and appends its argument to the list of the replica that called it."""

    @xla.returns(SCALAR)
    def add_ten(x):
        calls[int(xla.replica_id()) if replica is None else replica].append(float(x.numpy()))
        return x + 10.0

    return add_ten


# Failures, and that the next run works.


class Failing(Exception):
    def __init__(self, code, *, reason="of the user's own"):
        super().__init__(f"code {code}")
        self.code, self.reason = code, reason


def fails_on(replica, error, when=lambda x: True):
    """A host function that raises on one replica, when `when` of its argument is true."""

    @xla.returns(SCALAR)
    def fn(x):
        if int(xla.replica_id()) == replica and when(float(x)):
            raise error
        return x + 10.0

    return fn


def raised_by(run):
    """The exception that a call raises; it must be one of two kinds."""
    with pytest.raises((Failing, HostResultError)) as raised:
        run()
    return raised.value


@xla.returns(tf.TensorSpec([], tf.int32))
def doubled_id():
    return int(xla.replica_id()) * 2


def works():
    return xla.outside_compilation(doubled_id) + 1


def check_works():
    """The next run works."""
    assert values(xla.replicate(works, num_replicas=2)) == [1, 3]


def check_strategy_works(strategy):
    """The next step of a strategy of two replicas works."""
    assert list(values(strategy.experimental_local_results(strategy.run(works)))) == [1, 3]


# Gradients.


def direct(fn, *args, **kwargs):
    """Calls a function directly, to compare with `xla.outside_compilation`."""
    return fn(*args, **kwargs)


def cubes(x):
    return x**3 + tf.sin(x)


def gradients(fn, *inputs):
    """First derivatives of the sum of `fn(*inputs)`, as dense tensors."""
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value = fn(*inputs)
    return [None if each is None else tf.convert_to_tensor(each) for each in tape.gradient(value, inputs)]


def first_order(fn):
    """A body that has the gradient of `fn(call, x)` for `x`."""

    def body(call, x):
        return gradients(lambda x: fn(call, x), x)

    body.__name__ = fn.__name__  # AutoGraph would read the source of `__wrapped__`
    return body


def second_order(fn):
    """A body that has the gradient of `x` times the gradient of `fn(call, x)` for `x`."""

    def body(call, x):
        return gradients(lambda x: gradients(lambda x: fn(call, x), x)[0] * x, x)

    body.__name__ = fn.__name__
    return body


def example(n=2, shape=(3,)):
    """An argument for each replica."""
    return [[tf.constant(part)] for part in np.random.default_rng(1).uniform(0.5, 1.5, size=(n, *shape))]


def same_without(body, inputs=None, eager=True):
    """Checks that `body(call, *inputs)` has the same results whether `call` goes through the host or not.

    The body without host calls runs eagerly, which is quicker than compiling it. Pass `eager=False` if its replicas
    meet or depend on the replica id.
    """
    inputs = inputs or example()
    results = xla.replicate(lambda *args: body(xla.outside_compilation, *args), inputs)
    if eager:
        expected = [body(direct, *args) for args in inputs]
    else:
        expected = xla.replicate(lambda *args: body(direct, *args), inputs)
    tf.nest.assert_same_structure(results, expected)
    for result, wanted in zip(tf.nest.flatten(results), tf.nest.flatten(expected), strict=True):
        assert (result is None) == (wanted is None)
        if result is not None:
            assert result.dtype == wanted.dtype
            np.testing.assert_allclose(result, wanted, rtol=1e-10, atol=1e-12)
