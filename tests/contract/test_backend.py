"""The contract of backends: what code above the strategies asks of either."""

import pytest
import tensorflow as tf
from helpers.devices import DEVICES

from replica_engine import MirroredStrategy
from replica_engine.backend import Backend, compiles, find_backend


@pytest.mark.replicas(2)
def test_every_strategy_has_a_backend_that_fulfils_the_contract(strategy, backend):
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
def test_it_hands_each_replica_its_part_of_arguments(backend, local, per_replica):
    def body(x, plain, *, scale):
        return {"scaled": x * scale, "plain": plain + 1.0}

    numbers = per_replica(lambda replica: tf.constant([float(replica)]))
    assert local(backend.run(body, (numbers, 2.0), {"scale": tf.constant(3.0)})) == [
        {"scaled": [0.0], "plain": 3.0},
        {"scaled": [3.0], "plain": 3.0},
    ]


@pytest.mark.replicas(2)
def test_it_merges_the_arguments_of_all_replicas(strategy, backend, local):
    def merged(at, value):
        assert tf.distribute.in_cross_replica_context()
        assert at is strategy
        return at.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)

    def body():
        context = tf.distribute.get_replica_context()
        return context.merge_call(merged, args=(tf.cast(context.replica_id_in_sync_group, tf.float32) + 1.0,))

    assert local(backend.run(body)) == [3.0, 3.0]


@pytest.mark.replicas(2)
def test_it_may_know_a_call_again_and_then_answers_as_a_run(backend, local):
    def body(x):
        return tf.distribute.get_replica_context().all_reduce("SUM", x)

    def new(x):
        raise AssertionError("it runs nothing that has not run before")

    one = tf.constant(1.0)
    for _ in range(2):
        backend.run(body, (one,))
    again = backend.run_again(body, (tf.constant(2.0),))
    assert (again is not None) == backend.compiles
    if again is not None:
        assert local(again[0]) == [4.0, 4.0]
    assert backend.run_again(new, (one,)) is None


@pytest.mark.replicas(2)
def test_an_error_of_the_function_keeps_its_type_and_the_next_run_works(backend, local):
    class Mistake(Exception):
        pass

    def body(wrong):
        if wrong:
            raise Mistake("in a replica")
        return tf.constant(1.0)

    with pytest.raises(Mistake, match="in a replica"):
        backend.run(body, (True,))
    assert local(backend.run(body, (False,))) == [1.0, 1.0]


@pytest.mark.replicas(2)
def test_it_lists_what_the_replicas_met_at_in_order(strategy, backend):
    def body():
        context = tf.distribute.get_replica_context()
        total = context.all_reduce("SUM", tf.constant(1.0))
        return context.all_gather(total[tf.newaxis], axis=0)

    assert list(backend.sync_points()) == []
    backend.run(body)
    kinds = {}
    for record in backend.sync_points():
        kinds.setdefault(record.replica, []).append(record.kind)
    assert kinds == {replica: ["all_reduce", "all_gather"] for replica in range(2)}


@pytest.mark.replicas(2)
def test_a_strategy_prints_with_its_devices(strategy):
    assert repr(strategy) == f"{type(strategy).__name__}(2 replicas: CPU:0, CPU:1)"


@pytest.mark.replicas(2)
def test_a_variable_that_follows_the_devices_says_how(strategy, backend):
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.SUM)
    plain = variable._values[0]
    side = backend.find_host_side(plain)
    assert (side is not None) == backend.compiles
    assert backend.find_host_side(tf.Variable(1.0)) is None
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
    assert find_backend(strategy) is None
    assert not compiles(strategy)
