"""Two replicas, and short ways to give each one something and to see what each one has."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.loop_steps import THREAD, Noting

from replica_engine import TPUStrategy, xla
from replica_engine.compat import contrib
from replica_engine.testing import no_leaked_threads


class Replicas:
    """A strategy with what nearly every test here says about it.

    Attributes:
        strategy: a new `TPUStrategy`.
        size: how many replicas.
    """

    def __init__(self, size, **options):
        self.strategy = TPUStrategy(num_cores=size, **options)
        self.size = size

    def variable(self, initial, aggregation=tf.VariableAggregation.NONE, on_read=False):
        """A variable of the strategy."""
        kind = tf.VariableSynchronization.ON_READ if on_read else tf.VariableSynchronization.AUTO
        with self.strategy.scope():
            return tf.Variable(initial, aggregation=aggregation, synchronization=kind, trainable=not on_read)

    def spread(self, fn):
        """A value that is the tensor `fn(i)` on replica i."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.convert_to_tensor(fn(context.replica_id_in_sync_group))
        )

    def add(self, variable, amount=1.0):
        """One step that adds `amount` to a variable, the same on every replica."""
        self.strategy.run(lambda: variable.assign_add(variable * 0.0 + amount))

    def each(self, value):
        """What each replica has of a value, as plain Python values."""
        found = self.strategy.experimental_local_results([value])
        return [tf.nest.map_structure(_plain, one[0]) for one in found]

    def components(self, variable):
        """The value of a variable on each replica."""
        return [one.numpy().tolist() for one in self.strategy.experimental_local_results(variable)]


def _plain(value):
    return np.asarray(value).tolist() if tf.is_tensor(value) or isinstance(value, np.ndarray) else value


@pytest.fixture(scope="session")
def replicas():
    """`replicas(size, **options)`: a new strategy of that many replicas."""
    return Replicas


@pytest.fixture
def two():
    """A strategy of two replicas."""
    return Replicas(2)


@pytest.fixture
def scoped(two):
    """`scoped(make, *args)`: what `make(*args)` builds under the scope of two replicas."""

    def scoped(make, *args, **options):
        with two.strategy.scope():
            return make(*args, **options)

    return scoped


@pytest.fixture
def noting(two):
    """A step of two replicas that remembers its inputs."""
    return Noting(two)


@pytest.fixture(autouse=True)
def _feeding_threads_go():
    with no_leaked_threads(grace=60.0, prefix=THREAD):
        yield


@pytest.fixture
def launched():
    """`launched()`: how many programs ran since the test began."""
    before = xla.counts()
    return lambda: (xla.counts() - before).launches


@pytest.fixture
def distribution():
    """Two towers of the contrib strategy of 2018."""
    return contrib.TPUStrategy(xla.PjrtClusterResolver("cpu"), num_cores=2)
