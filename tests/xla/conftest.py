"""Ways to run a body on two replicas."""

import pytest
import tensorflow as tf
from helpers.on_two import spread

from replica_engine import TPUStrategy, xla

pytest.register_assert_rewrite("host_work")


@pytest.fixture
def two():
    """A strategy of two replicas."""
    return TPUStrategy(num_cores=2)


@pytest.fixture
def run_with():
    """`run_with(strategy)(body, *values)`: what the body makes of a value for each replica, with `strategy.run`."""
    return _run_with


@pytest.fixture(params=["replicate in a function", "strategy.run"])
def run(request):
    """`run(body, *values)`: what the body makes of a value, for each of two replicas."""
    if request.param.startswith("replicate"):
        call = lambda body, *values: xla.replicate(body, [[value] for value in values])  # noqa: E731
    else:
        call = _run_with(TPUStrategy(num_cores=2))
    if request.param.endswith("in a function"):
        return lambda body, *values: tf.function(call)(body, *map(tf.constant, values))
    return lambda body, *values: call(body, *map(tf.constant, values))


def _run_with(strategy):
    def call(body, *values):
        # In a function the values are tensors of its graph, which a body can get only as arguments.
        results = strategy.run(body, args=(spread(strategy, lambda i: values[i]),))
        return [each[0] for each in strategy.experimental_local_results([results])]

    return call
