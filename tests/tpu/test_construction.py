"""What TPUStrategy is made with, and what it refuses."""

import numpy as np
import pytest
import tensorflow as tf

from replica_engine import TPUStrategy
from replica_engine.errors import CaptureError, DeviceError, VariableCreationError
from replica_engine.xla import PjrtClusterResolver


def run_variable_of_any_shape():
    strategy = TPUStrategy(num_cores=2)
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0], shape=[None])
    strategy.run(lambda: tf.reduce_sum(variable))


REFUSED = [
    *((lambda each=each: TPUStrategy(each), TypeError, r"num_cores=4") for each in (3, "gpu", object())),
    *(
        (lambda each=each: TPUStrategy(steps_per_run=each, num_cores=1), ValueError, "steps_per_run")
        for each in (0, -1, 1.5, True, None)
    ),
    *((lambda each=each: TPUStrategy(num_cores=each), DeviceError, "positive int") for each in (0, -1, True, 2.0)),
    (lambda: TPUStrategy(num_cores=10**6), DeviceError, r"at most 1024"),
    (lambda: TPUStrategy(num_cores=1).run(3), TypeError, "takes a function"),
    (run_variable_of_any_shape, CaptureError, r"shape \(None,\).*test_construction.py"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_numbers_may_be_of_numpy():
    strategy = TPUStrategy(num_cores=np.int64(3), steps_per_run=np.int64(2))
    assert strategy.num_replicas_in_sync == 3
    assert strategy.steps_per_run == 2
    assert TPUStrategy(num_cores=1, steps_per_run=7).extended.steps_per_run == 7  # of a strategy that is gone


def test_a_resolver_says_which_platform():
    resolver = PjrtClusterResolver("cpu")
    strategy = TPUStrategy(resolver, steps_per_run=3, num_cores=5)
    assert strategy.num_replicas_in_sync == 5
    assert strategy.cluster_resolver is resolver
    assert strategy.steps_per_run == 3
    assert isinstance(strategy, tf.distribute.Strategy)


def test_a_variable_made_of_an_argument_is_refused(two):
    holder = {}

    def fn(x):
        if not holder:
            holder["made"] = tf.Variable(x * 2.0, name="made")
        return holder["made"] + 0.0

    with pytest.raises(VariableCreationError, match=r"'made'.* depends on the argument `x` of `fn`"):
        two.strategy.run(fn, args=(tf.constant(1.0),))


def test_the_mean_of_integers_is_a_fraction(two):
    """As under MirroredStrategy."""

    def fn():
        context = tf.distribute.get_replica_context()
        return context.all_reduce("MEAN", context.replica_id_in_sync_group)

    assert [float(each) for each in two.strategy.run(fn).values] == [0.5, 0.5]


def test_jax_can_still_be_configured_afterwards(programs):
    """Its own CPU devices are none of ours. In a process of its own: jax starts once."""
    code = (
        "import jax, replica_engine; replica_engine.TPUStrategy(num_cores=2);"
        "jax.config.update('jax_num_cpu_devices', 4); assert len(jax.devices('cpu')) == 4"
    )
    done = programs.run(code)
    assert done.returncode == 0, done.stderr
