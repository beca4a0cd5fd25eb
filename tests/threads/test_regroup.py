"""Regroup and select are inverse, whatever the structure."""

import collections
import dataclasses
from typing import Any, NamedTuple

import attrs
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from replica_engine.errors import StructureMismatchError
from replica_engine.replica import select
from replica_engine.values.regroup import regroup


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Batch:
    inputs: Any
    labels: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@attrs.define
class Attributes:
    value: Any


class InNest:
    """Takes part in tf.nest by its own protocol."""

    def __init__(self, value, label):
        self.value, self.label = value, label

    def __tf_flatten__(self):
        return (self.label,), (self.value,)

    @classmethod
    def __tf_unflatten__(cls, metadata, components):
        return cls(components[0], metadata[0])

    def __eq__(self, other):
        return isinstance(other, InNest) and (self.value, self.label) == (other.value, other.label)

    __hash__ = None


def containers(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), children, max_size=3),
        st.dictionaries(st.integers(), children, max_size=2).map(collections.OrderedDict),
        st.dictionaries(st.text(max_size=2), children, max_size=2).map(lambda d: collections.defaultdict(list, d)),
        st.tuples(children, children).map(lambda two: Pair(*two)),
        st.tuples(children, children).map(lambda two: Batch(*two)),
        children.map(Frozen),
        children.map(Attributes),
        children.map(lambda value: InNest(value, "label")),
    )


LEAF = "leaf"  # stands for a place where each replica puts a leaf of its own
shapes = st.recursive(st.one_of(st.just(LEAF), st.none(), st.just("same for all")), containers, max_leaves=12)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4))


def fill(shape, draw):
    """The structure with every LEAF replaced by a drawn value."""
    if shape is LEAF:
        return draw(leaves)
    if isinstance(shape, dict):
        new = {key: fill(value, draw) for key, value in shape.items()}
        if isinstance(shape, collections.defaultdict):
            return collections.defaultdict(shape.default_factory, new)
        return type(shape)(new)
    if isinstance(shape, Pair):
        return Pair(*(fill(value, draw) for value in shape))
    if isinstance(shape, list | tuple):
        return type(shape)(fill(value, draw) for value in shape)
    if isinstance(shape, Batch):
        return Batch(fill(shape.inputs, draw), fill(shape.labels, draw))
    if isinstance(shape, Frozen | Attributes):
        return type(shape)(fill(shape.value, draw))
    if isinstance(shape, InNest):
        return InNest(fill(shape.value, draw), shape.label)
    return shape


@settings(max_examples=300, deadline=None)
@given(shape=shapes, size=st.integers(1, 4), data=st.data())
def test_select_gives_back_what_was_regrouped(shape, size, data):
    values = [fill(shape, data.draw) for _ in range(size)]
    grouped = regroup(values)
    for replica, value in enumerate(values):
        part = select(replica, grouped)
        assert part == value
        assert type(part) is type(value)


@settings(max_examples=100, deadline=None)
@given(shape=shapes, data=st.data())
def test_one_structure_on_all_replicas_comes_out_equal(shape, data):
    value = fill(shape, data.draw)
    assert regroup([value, value, value]) == value


@settings(max_examples=200, deadline=None)
@given(shape=shapes, data=st.data(), extra=containers(leaves))
def test_a_container_against_a_leaf_names_path_and_replicas(shape, data, extra):
    values = [{"at": fill(shape, data.draw), "odd": 1.5} for _ in range(3)]
    values[2]["odd"] = extra
    with pytest.raises(StructureMismatchError) as raised:
        regroup(values)
    assert raised.value.path == "result['odd']"
    assert raised.value.replicas == (0, 2)


def test_what_is_the_same_object_stays_as_it_is():
    """But for lists, which are copied for each replica."""
    shared, config, node = object(), Batch(inputs=[1, 2]), Batch(inputs=1)
    node.labels = [node]  # in a circle
    for each in (shared, None, config):
        assert regroup([each, each]) is each
    assert select(0, config) is config
    assert select(1, node) is node
    items = [1, 2]
    assert select(0, items) is not select(1, items)


def test_what_differs_becomes_per_replica():
    grouped = regroup([1.5, 2.5])
    assert isinstance(grouped, tf.distribute.DistributedValues)
    assert grouped.values == (1.5, 2.5)


def test_mappings_in_another_order_are_like():
    grouped = regroup([{"a": 1.5, "b": 2.5}, {"b": 4.5, "a": 3.5}])
    assert select(1, grouped) == {"a": 3.5, "b": 4.5}


def test_a_variables_components_become_the_variable(mirrored):
    with mirrored.scope():
        variable = tf.Variable(1.0)
    assert regroup(mirrored.experimental_local_results(variable)) is variable
    assert select(1, {"v": variable})["v"] is variable


def test_composite_tensors_are_leaves():
    ragged = [tf.ragged.constant([[1], [2, 3]]), tf.ragged.constant([[4, 5], []])]
    grouped = regroup(ragged)
    assert select(1, grouped) is ragged[1]


def test_a_variable_is_not_read_on_its_way_through_a_merge_call(mirrored):
    """To ask a distributed variable for an attribute that it has not reads its whole value."""
    with mirrored.scope():
        variable = tf.Variable([1.0, 2.0])

    def replica_step():
        tf.distribute.get_replica_context().merge_call(lambda strategy, variables: None, args=([variable],))

    graph = tf.function(lambda: mirrored.run(replica_step)).get_concrete_function().graph
    assert not [op.name for op in graph.get_operations() if op.type == "ReadVariableOp"]
