"""Short ways to say what nearly every contract test says: run this, and what has each replica got?"""

import pytest
import tensorflow as tf

from replica_engine.backend import find_backend


@pytest.fixture
def backend(strategy):
    """What runs the replicas of the strategy: code above the strategies knows this contract and no class behind it."""
    return find_backend(strategy)


@pytest.fixture
def n(strategy):
    """The number of replicas."""
    return strategy.num_replicas_in_sync


@pytest.fixture
def local(strategy):
    """`local(value)`: what each replica has of a value, as a list of plain Python values."""

    def local(value):
        # In a list: alone, a value that is the same on every replica would be a single result.
        results = strategy.experimental_local_results([value])
        return [tf.nest.map_structure(_plain, result[0]) for result in results]

    return local


@pytest.fixture
def per_replica(strategy):
    """`per_replica(fn)`: a distributed value; replica i's part is the tensor `fn(i)`."""

    def per_replica(fn):
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.convert_to_tensor(fn(context.replica_id_in_sync_group))
        )

    return per_replica


@pytest.fixture
def run(request, strategy):
    """`run(fn, args, kwargs)`: a run in each of the three forms in which users write it (`FORMS`)."""

    def run(fn, args=(), kwargs=None):
        if request.param == "eager":
            return strategy.run(fn, args, kwargs)
        if request.param == "function-in-run":
            return strategy.run(tf.function(fn), args, kwargs)

        @tf.function
        def step(args, kwargs):
            return strategy.run(fn, args, kwargs)

        return step(args, kwargs or {})

    return run


def _plain(value):
    if not hasattr(value, "numpy"):
        return value
    value = value.numpy()
    return value if isinstance(value, bytes) else value.tolist()
