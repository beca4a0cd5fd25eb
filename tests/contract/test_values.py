"""Structures of every kind go through `run` and come out as they were."""

import collections
import dataclasses
from typing import Any

import pytest
import tensorflow as tf
from helpers.on_mirrored import index, replica_id

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Batch:
    features: Any
    label: Any
    name: str = "batch"


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


def test_local_results_are_one_a_replica_in_order(strategy, n):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(10 * context.replica_id_in_sync_group)
    )
    results = strategy.experimental_local_results(value)
    assert isinstance(results, tuple)
    assert [int(one) for one in results] == [10 * i for i in range(n)]
    assert strategy.experimental_local_results(3) == (3,)


def test_local_results_of_a_structure_are_structures(strategy, n):
    results = strategy.experimental_local_results(strategy.run(lambda: {"id": replica_id(), "one": 1}))
    assert [{"id": int(one["id"]), "one": one["one"]} for one in results] == [{"id": i, "one": 1} for i in range(n)]


def test_values_from_a_function_know_their_replica(strategy, n):
    seen = []
    strategy.experimental_distribute_values_from_function(
        lambda context: seen.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
    )
    assert seen == [(i, n) for i in range(n)]


def test_values_from_a_function_may_be_structures(strategy, run, local):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: {"a": tf.constant(context.replica_id_in_sync_group), "b": (tf.constant(1),)}
    )
    result = run(lambda value: value["a"] + value["b"][0], args=(value,))
    assert local(result) == [i + 1 for i in range(strategy.num_replicas_in_sync)]


@pytest.mark.threads("Python values that differ")
def test_values_from_a_function_may_be_python_values(strategy, local):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: f"replica {context.replica_id_in_sync_group}"
    )
    assert local(strategy.run(len, args=(value,))) == [9] * strategy.num_replicas_in_sync


@pytest.mark.parametrize(
    "structure",
    [
        pytest.param(lambda x: [x, [x, ()]], id="lists"),
        pytest.param(lambda x: (x, (x,)), id="tuples"),
        pytest.param(lambda x: {"b": x, "a": {}, "c": [x]}, id="dicts"),
        pytest.param(lambda x: collections.OrderedDict(z=x, a=x), id="ordered-dict"),
        pytest.param(lambda x: Point(x, {"y": x}), id="namedtuple"),
        pytest.param(lambda x: [None, x, None], id="with-none"),
    ],
)
def test_a_structure_comes_out_as_it_went_in(strategy, run, per_replica, structure):
    value = per_replica(lambda i: i)
    result = run(lambda value: tf.nest.map_structure(lambda x: x if x is None else x + 1, value), (structure(value),))
    results = strategy.experimental_local_results([result])
    for i, one in enumerate(results):
        expected = structure(i + 1)
        assert type(one[0]) is type(expected)
        assert list(one[0]) == list(expected)  # for mappings, the order of the keys
        tf.nest.assert_same_structure(one[0], expected)
        plain = tf.nest.map_structure(lambda x: x if x is None else int(x), one[0])
        assert plain == expected


def test_python_values_go_through_a_run_as_they_are(strategy):
    value = {"n": 3, "f": 0.5, "s": "text", "b": True, "none": None, "bytes": b"x", "empty": [], "type": int}
    result = strategy.run(lambda value: value, args=(value,))
    assert result == value
    assert type(result["b"]) is bool


@pytest.mark.replicas(2, 4)
def test_python_values_that_differ_come_out_per_replica(strategy, n):
    result = strategy.run(lambda: {"id": int(replica_id()), "same": 1})
    assert result["same"] == 1
    assert isinstance(result["id"], tf.distribute.DistributedValues)
    assert result["id"].values == tuple(range(n))


def test_dataclasses_keep_their_class_and_fields(strategy, n, local, per_replica):
    batch = Batch(per_replica(lambda i: [i, i]), label=per_replica(lambda i: i), name="first")
    result = strategy.run(lambda batch: Batch(batch.features * 2, {"label": batch.label}, batch.name), args=(batch,))
    assert isinstance(result, Batch)
    assert result.name == "first"
    assert local(result.features) == [[2 * i, 2 * i] for i in range(n)]
    assert local(result.label["label"]) == list(range(n))
    result = strategy.run(lambda frozen: Frozen(frozen.value + 1), args=(Frozen(per_replica(lambda i: i)),))
    assert isinstance(result, Frozen)
    assert local(result.value) == [i + 1 for i in range(n)]


@pytest.mark.threads("shapes that differ")
def test_ragged_tensors_go_in_and_out(strategy, run):
    def make(i):
        return tf.ragged.constant([[i] * (i + 1), [], [7]], dtype=tf.int32)

    value = strategy.experimental_distribute_values_from_function(
        lambda context: make(context.replica_id_in_sync_group)
    )
    result = run(lambda x: x + 1, args=(value,))
    results = strategy.experimental_local_results(result)
    assert all(isinstance(one, tf.RaggedTensor) for one in results)
    assert [one.to_list() for one in results] == [
        [[i + 1] * (i + 1), [], [8]] for i in range(strategy.num_replicas_in_sync)
    ]


def test_sparse_tensors_go_in_and_out(strategy, run):
    value = strategy.experimental_distribute_values_from_function(
        lambda context: tf.sparse.from_dense([0, context.replica_id_in_sync_group + 1, 0])
    )
    result = run(lambda x: tf.sparse.map_values(tf.multiply, x, 3), args=(value,))
    results = strategy.experimental_local_results(result)
    assert all(isinstance(one, tf.SparseTensor) for one in results)
    assert [tf.sparse.to_dense(one).numpy().tolist() for one in results] == [
        [0, 3 * (i + 1), 0] for i in range(strategy.num_replicas_in_sync)
    ]


@pytest.mark.threads("no device has strings")
def test_strings_and_booleans_are_tensors_like_others(strategy, run, local, per_replica):
    result = run(
        lambda s, b: {"s": tf.strings.join([s, "!"]), "b": tf.logical_not(b)},
        args=(per_replica(lambda i: f"r{i}"), per_replica(lambda i: i % 2 == 0)),
    )
    assert local(result) == [{"s": b"r%d!" % i, "b": i % 2 == 1} for i in range(strategy.num_replicas_in_sync)]


def test_empty_tensors_go_through(strategy, run, local):
    assert local(run(lambda x: x + 1, args=(tf.zeros([0, 2]),))) == [[]] * strategy.num_replicas_in_sync


def test_a_variable_as_argument_stands_for_the_replicas_component(strategy, n, run, local):
    with strategy.scope():
        v = tf.Variable(3.0)
    assert local(strategy.run(lambda v: (v.device, v * 2), args=(v,))) == [
        (strategy.extended.worker_devices[i], 6.0) for i in range(n)
    ]
    assert local(run(lambda v: v * 2, args=(v,))) == [6.0] * n


def test_a_variable_that_replicas_return_is_that_variable(strategy):
    with strategy.scope():
        v = tf.Variable(3.0)
    assert strategy.run(lambda: v) is v
    assert strategy.run(lambda v: {"v": v}, args=(v,))["v"] is v


def test_a_replica_may_change_its_own_containers(strategy, local):
    """Lists and dicts of the arguments are each replica's own."""

    def fn(items):
        items.append(tf.identity(replica_id()))
        return items

    mine = [tf.constant(5)]
    assert local(strategy.run(fn, args=(mine,))) == [[5, i] for i in range(strategy.num_replicas_in_sync)]
    assert len(mine) == 1


@pytest.mark.threads("Python code of each replica")
@pytest.mark.replicas(2, 4)
@pytest.mark.parametrize(
    ("first", "others"),
    [
        pytest.param([1, 2], [1], id="lengths"),
        pytest.param({"a": 1}, {"b": 1}, id="keys"),
        pytest.param((1,), [1], id="containers"),
        pytest.param({"a": [1]}, {"a": 1}, id="leaf-and-list"),
    ],
)
def test_results_of_different_structure_are_refused(strategy, run, first, others):
    with pytest.raises((ValueError, AssertionError), match="structure"):
        run(lambda: first if index() == 0 else others)


@pytest.mark.threads("Python code of each replica")
@pytest.mark.replicas(2, 4)
def test_none_on_one_replica_is_a_value_like_others(strategy, local):
    result = strategy.run(lambda: None if int(replica_id()) == 0 else 1)
    assert local(result) == [None] + [1] * (strategy.num_replicas_in_sync - 1)


def test_distributed_values_cannot_be_used_as_a_tensor(strategy, per_replica):
    with pytest.raises((ValueError, TypeError)):
        tf.convert_to_tensor(per_replica(float)) + 1.0


def test_a_namedtuple_in_a_module_is_a_namedtuple_in_the_replicas(strategy, local):
    module = tf.Module()
    module.point = Point(tf.constant(1.0), [tf.constant(2.0)])  # TensorFlow wraps it
    result = strategy.run(lambda point: Point(point.x + point.y[0], None), args=(module.point,))
    assert isinstance(result, Point)
    assert local(result.x) == [3.0] * strategy.num_replicas_in_sync
