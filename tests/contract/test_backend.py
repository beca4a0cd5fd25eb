"""The contract of backends: what code above the strategies asks of either."""

import pytest
import tensorflow as tf
from helpers.devices import DEVICES

from replica_engine import MirroredStrategy
from replica_engine.backend import Backend, backend_of, compiles


@pytest.mark.replicas(2)
def test_every_strategy_has_a_backend_that_fulfils_the_contract(strategy):
    backend = backend_of(strategy)
    assert backend is strategy.extended.backend
    assert isinstance(backend, Backend)
    assert backend.strategy is strategy
    assert backend.saving is None
    assert compiles(strategy) == backend.compiles

    def body():
        traced.append(True)
        return tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))

    traced = []
    results = backend.run(body)
    assert [float(each) for each in strategy.experimental_local_results(results)] == [2.0, 2.0]
    assert len(traced) == (1 if backend.compiles else 2)
    assert [record.kind for record in backend.sync_points()] == ["all_reduce"] * 2


@pytest.mark.replicas(2)
def test_a_strategy_prints_with_its_devices(strategy):
    assert repr(strategy) == f"{type(strategy).__name__}(2 replicas: CPU:0, CPU:1)"


@pytest.mark.replicas(2)
def test_a_variable_that_follows_the_devices_says_how(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    plain = variable._values[0]
    side = backend_of(strategy).host_side_of(plain)
    assert (side is not None) == compiles(strategy)
    if side is not None:
        strategy.run(lambda: variable.assign_add(tf.constant(1.0)))
        side.release()
        assert type(plain).__name__ == "ResourceVariable"
        assert float(plain) == 3.0
        side.attach()
        strategy.run(lambda: variable.assign_add(tf.constant(1.0)))
        assert float(plain) == 5.0


def test_of_many_devices_the_first_ones_and_the_last_are_printed():
    many = MirroredStrategy(DEVICES[:8])
    assert repr(many) == "MirroredStrategy(8 replicas: CPU:0, CPU:1, ..., CPU:7)"
    assert repr(MirroredStrategy(["CPU:0"])) == "MirroredStrategy(1 replica: CPU:0)"


def test_a_strategy_of_tensorflow_has_no_backend_of_this_library():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    assert backend_of(strategy) is None
    assert not compiles(strategy)
