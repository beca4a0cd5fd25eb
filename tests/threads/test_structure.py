"""Structures come apart into leaves with paths, and go together again."""

import collections
import copy
import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from threads.test_regroup import Attributes, Batch, Frozen, InNest, Pair

from replica_engine.errors import ReplicaValueError
from replica_engine.values.replica_weights import make_replica_seed, states
from replica_engine.values.structure import OtherStructure, flatten


def in_a_module(value):
    """The value as TensorFlow wraps it when it becomes an attribute of a module."""
    module = tf.Module()
    module.value = value
    return module.value


STRUCTURES = {
    "leaf": (3, [""]),
    "nothing": ([], []),
    "list": ([1, [2]], ["[0]", "[1][0]"]),
    "tuple": ((1, (), 2), ["[0]", "[2]"]),
    "namedtuple": (Pair(1, [2]), [".left", ".right[0]"]),
    "dict": ({"b": 1, "a": None}, ["['b']", "['a']"]),
    "keys": ({1: "x", "a": "y", (1, 2): "z"}, ["[1]", "['a']", "[(1, 2)]"]),
    "ordered": (collections.OrderedDict(b=1, a=2), ["['b']", "['a']"]),
    "default": (collections.defaultdict(list, b=1), ["['b']"]),
    "dataclass": (Batch([1], 2), [".inputs[0]", ".labels"]),
    "frozen": (Frozen(1), [".value"]),
    "attrs": (Attributes({"a": 1}), [".value['a']"]),
    "protocol": (InNest([1], "label"), ["[0][0]"]),
    "wrapped namedtuple": (in_a_module(Pair(1, [2])), [".left", ".right[0]"]),
    "wrapped": (in_a_module([1, {"b": (2, 3), "a": 4}]), ["[0]", "[1]['b'][0]", "[1]['b'][1]", "[1]['a']"]),
}


@pytest.mark.parametrize(("value", "paths"), STRUCTURES.values(), ids=STRUCTURES)
def test_a_structure_comes_apart_and_goes_together(value, paths):
    leaves, spec = flatten(value)
    assert spec.paths == paths
    assert len(leaves) == len(paths)
    assert spec.rebuild(leaves) == value
    assert spec.match_leaves(value) == leaves
    again = spec.rebuild([f"leaf {index}" for index in range(len(leaves))])
    assert flatten(again)[0] == [f"leaf {index}" for index in range(len(leaves))]
    if isinstance(value, dict):
        assert list(again) == list(value)


def test_specs_of_equal_structures_are_equal_keys():
    keys = [flatten(value)[1].key for value, _ in STRUCTURES.values()]
    assert len(set(keys)) == len(keys)
    assert keys == [flatten(copy.deepcopy(value))[1].key for value, _ in STRUCTURES.values()]
    assert flatten({1: 0})[1].key != flatten({True: 0})[1].key


def test_keys_that_are_equal_but_not_the_same_keep_their_types():
    for key in (1, True, 1.0):
        leaves, spec = flatten({key: "x"})
        assert [type(each) for each in spec.rebuild(leaves)] == [type(key)]


def test_leaves_of_another_mapping_come_in_the_order_of_the_first():
    _, spec = flatten({"b": 0, "a": [0, 0]})
    assert spec.match_leaves({"a": [1, 2], "b": 3}) == [3, 1, 2]


@pytest.mark.parametrize(
    ("value", "path", "wanted", "given"),
    [
        ({"a": [1, 2]}, "v", "a mapping with the keys 'a', 'b'", "a mapping with the keys 'a'"),
        ({"a": [1], "b": 2}, "v['a']", "a list of length 2", "a list of length 1"),
        ({"a": (1, 2), "b": 2}, "v['a']", "a list of length 2", "a tuple of length 2"),
        ({"a": None, "b": 2}, "v['a']", "a list of length 2", None),
        ({"a": [1, 2], "b": Pair(1, 2)}, "v['b']", None, "a Pair of length 2"),
    ],
)
def test_the_first_difference_is_named(value, path, wanted, given):
    _, spec = flatten({"a": [1, 2], "b": 3}, "v")
    with pytest.raises(OtherStructure) as raised:
        spec.match_leaves(value)
    assert (raised.value.path, raised.value.wanted, raised.value.given) == (path, wanted, given)


def test_a_structure_that_contains_itself_is_refused():
    circle = [1, {"deeper": ()}]
    circle[1]["deeper"] = (circle, circle)
    with pytest.raises(ReplicaValueError, match="among the inputs contains itself"):
        flatten(circle, what="the inputs")


def test_a_spec_does_not_keep_leaves():
    leaves, spec = flatten({"a": [tf.Module()], "b": (tf.Module(),)})
    kept = [weakref.ref(leaf) for leaf in leaves]
    del leaves
    gc.collect()
    assert [each() for each in kept] == [None, None]
    assert len(spec.paths) == 2


def test_replica_0_has_the_seed_of_the_user_and_the_others_have_seeds_of_their_own():
    for bits, dtype in ((32, np.uint32), (64, np.int64)):
        state = np.array([2**32 - 1, 5], dtype)
        of_replicas = states(state, 64, bits)
        assert (of_replicas[0] == state).all()
        assert {each.dtype for each in of_replicas} == {np.dtype(dtype)}
        assert {int(each[1]) for each in of_replicas} == {5}
        assert len({int(each[0]) for each in of_replicas}) == 64
    assert [make_replica_seed(replica, 7) for replica in range(3)] == [7, 0x9E3779C0, 0x3C6EF379]


def test_levels_that_are_made_once_are_not_confused():
    for make in (lambda n: [0] * n, lambda n: (0,) * n, lambda n: {str(i): 0 for i in range(n)}):
        for length in (0, 1, 64, 65, 300):
            value = make(length)
            leaves, spec = flatten(value)
            assert spec.rebuild(leaves) == value
            assert len(set(spec.paths)) == length
    assert flatten({"a": 1, "b": 2})[1].key != flatten({"b": 1, "a": 2})[1].key
